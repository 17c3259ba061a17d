"""Reductions of sharded tensors to plain scalars, equal on every rank.

Each reduces the pieces, then combines the ranks' results: one collective a call, so `foreach` norms
of a whole model cost one. A tensor that lies whole on every rank is counted once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zgraph._torch import group_by_name
from zgraph.errors import WholeTensorError
from zgraph.runtime import collectives
from zgraph.runtime.piece import needs_whole

_aten = torch.ops.aten

Rule = Callable[[Any, Any, dict[str, Any]], Any]


def _combine(values: Tensor, groups: Sequence[str], op: dist.ReduceOp.RedOpType) -> Tensor:
    """All-reduce each value of a 1-D tensor over its group ("": leave it), in place."""
    for group in dict.fromkeys(group for group in groups if group):
        chosen = [index for index, other in enumerate(groups) if other == group]
        if len(chosen) == len(groups):
            _all_reduce(values, group, op)
        else:
            part = values[chosen]
            _all_reduce(part, group, op)
            values[chosen] = part
    return values


def _all_reduce(values: Tensor, group: str, op: dist.ReduceOp.RedOpType) -> None:
    """All-reduce a 1-D tensor in place. Unlike a collective's own, maxima and minima keep NaN."""
    if op not in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        dist.all_reduce(values, op=op, group=group_by_name(group))
        return
    rows = collectives.all_gather(values, group).view(-1, values.numel())
    values.copy_(rows.amax(0) if op == dist.ReduceOp.MAX else rows.amin(0))


def _group(tensor: Any) -> str:
    """The group over which the tensor is split; "" if it lies whole here."""
    piece = getattr(tensor, "_piece", None)
    return piece.group if piece else ""


def norms(tensors: Sequence[Any], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The global `order`-norm of each tensor, 0-dim. Orders 0 and below infinity sum powers."""
    # Optimizers and clipping put parameters that `Partition(ignore=…)` spared in the same lists.
    pieces = [getattr(t, "_local", t) for t in tensors]
    pieces = pieces if dtype is None else [piece.to(dtype) for piece in pieces]
    groups = list(map(_group, tensors))
    if order < 0:
        raise WholeTensorError(
            f"the {order:g}-norm of a sharded tensor is not supported; use full_tensor()"
        )
    if order == math.inf:
        local = [p.abs().amax() if p.numel() else p.new_zeros(()) for p in pieces]
        return list(_combine(torch.stack(local), groups, dist.ReduceOp.MAX).unbind())
    values = torch.stack(
        torch._foreach_norm(pieces, order)
        if order
        else [p.count_nonzero().to(p.dtype) for p in pieces]
    )
    if not any(groups):
        return list(values.unbind())
    if order in (0, 1):
        return list(_combine(values, groups, dist.ReduceOp.SUM).unbind())
    # Powers leave the range of half precision long before norms do.
    powers = _combine(values.double().pow(order), groups, dist.ReduceOp.SUM)
    return list(powers.pow(1.0 / order).to(values.dtype).unbind())


def _vector_norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if dims is not None and sorted(d % args[0].dim() for d in dims) != list(range(args[0].dim())):
        raise needs_whole(func, args[0]._piece)
    if keepdim:
        raise needs_whole(func, args[0]._piece)
    return norms([args[0]], float(order), kwargs.get("dtype"))[0]


def _norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    return norms([args[0]], float(args[1] if len(args) > 1 else kwargs.get("p", 2)), None)[0]


def _foreach_norm(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return norms(args[0], float(order), args[2] if len(args) > 2 else kwargs.get("dtype"))


def _scalar(
    reduce: Callable[[Tensor], Tensor],
    op: dist.ReduceOp.RedOpType,
    empty: Callable[[Tensor], Tensor],
) -> Rule:
    """A reduction of one whole tensor to a 0-dim result."""

    def rule(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        if len(args) > 1:
            raise needs_whole(func, args[0]._piece)
        tensor, dtype = args[0], kwargs.get("dtype")
        local = tensor._local if dtype is None else tensor._local.to(dtype)
        value = reduce(local) if local.numel() else empty(local)
        wide = value.to(torch.uint8) if value.dtype == torch.bool else value
        combined = _combine(wide.reshape(1), [tensor._piece.group], op)[0]
        return combined.to(value.dtype)

    return rule


def _mean(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    return RULES[_aten.sum.default](func, args, kwargs) / args[0].numel()


def share_found_inf(tensors: Sequence[Any], found_inf: Tensor) -> None:
    """Make `GradScaler`'s flag, a 0- or 1-element tensor, the maximum over the tensors' ranks."""
    flag = found_inf.reshape(1)
    for group in dict.fromkeys(filter(None, map(_group, tensors))):
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group_by_name(group))
    found_inf.copy_(flag.reshape(found_inf.shape))


def _limit(sign: int) -> Callable[[Tensor], Tensor]:
    def limit(piece: Tensor) -> Tensor:
        floats = piece.dtype.is_floating_point
        info = torch.finfo(piece.dtype) if floats else torch.iinfo(piece.dtype)
        worst = sign * math.inf if floats else (info.max if sign > 0 else info.min)
        return piece.new_full((), worst)

    return limit


RULES: dict[Any, Rule] = {
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.norm.Scalar: _norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.sum.default: _scalar(lambda t: t.sum(), dist.ReduceOp.SUM, lambda t: t.sum()),
    _aten.mean.default: _mean,
    _aten.max.default: _scalar(lambda t: t.max(), dist.ReduceOp.MAX, _limit(-1)),
    _aten.min.default: _scalar(lambda t: t.min(), dist.ReduceOp.MIN, _limit(1)),
    _aten.any.default: _scalar(lambda t: t.any(), dist.ReduceOp.MAX, lambda t: t.any()),
    _aten.all.default: _scalar(lambda t: t.all(), dist.ReduceOp.MIN, lambda t: t.all()),
}
