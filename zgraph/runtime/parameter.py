"""ShardedParameter: a parameter with its global shape that holds this rank's piece.

Elementwise ops, in place or not, run on the pieces, so stock optimizers work, one kernel for all of
them where they are fused or foreach. Norms and other reductions return the global value on every
rank. Anything else needs the whole tensor and says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zgraph._torch import enable_foreach, pytree
from zgraph.errors import WholeTensorError
from zgraph.runtime import collectives, reductions
from zgraph.runtime.storage import FlatShard

_aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """Which part of which parameter: `start` and `length` in elements of the whole."""

    name: str
    shape: tuple[int, ...]
    start: int
    length: int
    offset: int  # of the parameter in its flat buffer, in elements
    shard_numel: int  # elements of one rank's slice of that buffer
    group: str  # over which the parameter is split; "" if it lies whole on every rank

    def of(self, whole: Tensor) -> Tensor:
        """This piece of a whole tensor of `shape`, 1-D."""
        return whole.reshape(-1)[self.start : self.start + self.length]


class ShardedParameter(torch.Tensor):
    """A tensor of global shape, held as one 1-D piece a rank.

    What `model.parameters()` yields after `zg.compile`; its `grad` and its optimizer states are of
    this class too. `to_local()` is the piece, `full_tensor()` the whole tensor.
    """

    _local: Tensor
    _piece: Piece
    _flat: FlatShard | None
    _cached_grad: tuple[Tensor | None, "ShardedParameter | None"]

    @staticmethod
    def __new__(
        cls: type["ShardedParameter"],
        local: Tensor,
        piece: Piece,
        flat: FlatShard | None = None,
        requires_grad: bool = False,
    ) -> "ShardedParameter":
        self = torch.Tensor._make_wrapper_subclass(
            cls, piece.shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        self._local, self._piece, self._flat = local, piece, flat
        self._cached_grad = None, None
        if flat is not None:
            self._is_param = True  # isinstance(self, nn.Parameter)
            if requires_grad:
                torch.Tensor.register_post_accumulate_grad_hook(self, _take_over_grad)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    # ------------------------------------------------------------------ what users call

    def to_local(self) -> Tensor:
        """This rank's piece, 1-D and possibly empty. A view: writing to it changes the model."""
        return self._local

    def full_tensor(self) -> Tensor:
        """The whole tensor, of shape `shape`, in this tensor's dtype. All ranks must call it."""
        piece, local = self._piece, self._local.detach()
        numel = torch.Size(piece.shape).numel()
        if not piece.group:
            return local.reshape(piece.shape).clone()
        longest = min(numel, piece.shard_numel)
        padded = local.new_zeros(longest)
        padded[: piece.length] = local
        parts = collectives.all_gather(padded, piece.group)
        whole = local.new_empty(numel)
        for rank in range(collectives.size(piece.group)):
            start = max(piece.offset, rank * piece.shard_numel) - piece.offset
            stop = min(piece.offset + numel, (rank + 1) * piece.shard_numel) - piece.offset
            if start < stop:
                part = parts[rank * longest : rank * longest + stop - start]
                whole[start:stop] = part
        return whole.view(piece.shape)

    @property  # What torch declares as a variable is a property there too, written in C.
    def grad(self) -> Tensor | None:
        """The gradient, averaged over ranks, as a `ShardedParameter`; None if there is none."""
        if self._flat is None:
            return None
        local = self._flat.grad_piece(self._piece.name)
        if local is None:
            return None
        # Optimizers ask several times a step; the wrapper is as good as the flat gradient it views.
        source, cached = self._cached_grad
        if source is not self._flat.grad or cached is None:
            cached = ShardedParameter(local, self._piece)
            self._cached_grad = self._flat.grad, cached
        return cached

    @grad.setter
    def grad(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: Tensor | None
    ) -> None:
        if self._flat is None:
            raise WholeTensorError(f"{self._piece.name}: only a model's parameters have a gradient")
        if value is not None and value is self.grad:
            return  # `p.grad *= 2` assigns what it changed in place
        local = None if value is None else self._own_part(value)
        self._flat.drop_grad(self._piece.name)
        self._cached_grad = None, None
        if local is not None:
            self._flat.receive_piece(self._piece.name, local)

    def _own_part(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient to assign; a copy, since it may alias the present one."""
        if tuple(gradient.shape) != self._piece.shape:
            raise WholeTensorError(
                f"{self._piece.name}: a gradient of shape {list(gradient.shape)} was assigned; "
                f"expected {list(self._piece.shape)}"
            )
        if isinstance(gradient, ShardedParameter):
            return gradient._local.clone()
        return self._piece.of(gradient).clone()

    @property
    def data(self) -> Tensor:
        """The tensor without its gradient's history. Assigning copies, since shards stay in place."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        with torch.no_grad():
            self.copy_(value)

    def register_hook(self, hook: Any) -> Any:
        """Refuse: it would never run, since gradients arrive for a whole unit at once."""
        raise WholeTensorError(
            f"{self._piece.name}: gradients of a unit arrive together, so hooks on its parameters "
            "would not run; read or change p.grad after backward"
        )

    register_post_accumulate_grad_hook = register_hook

    def share_memory_(self) -> "ShardedParameter":
        """Refuse: this tensor has no storage of its own."""
        raise WholeTensorError(f"{self._piece.name}: a shard cannot be moved to shared memory")

    def requires_grad_(self, mode: bool = True) -> "ShardedParameter":
        """Refuse to change what the plan has fixed; otherwise return the tensor itself."""
        if self._flat is not None and mode != self.requires_grad:
            raise WholeTensorError(
                f"{self._piece.name}: requires_grad is part of the plan, since frozen parameters "
                "lie in buffers of their own; set it before zg.compile"
            )
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:
        p = self._piece
        where = f"elements {p.start}..{p.start + p.length}" if p.group else "whole"
        return (
            f"ShardedParameter({p.name}, shape={list(p.shape)}, dtype={self.dtype}, {where}, "
            f"piece={self._local!r})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedParameter":
        if self._flat is not None:
            raise WholeTensorError(
                f"{self._piece.name}: a model cannot be copied after zg.compile; copy it before, "
                "or copy {name: p.full_tensor() for name, p in model.named_parameters()}"
            )
        return ShardedParameter(self._local.clone(), self._piece)

    # ------------------------------------------------------------------ how ops run on it

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        reduction = reductions.RULES.get(func)
        if reduction is not None:
            return reduction(func, args, kwargs)
        if not _is_elementwise(func):
            raise _needs_whole(func, args, kwargs)
        return _run_on_pieces(func, args, kwargs)


def _take_over_grad(parameter: ShardedParameter) -> None:
    """Move what autograd accumulated to the flat shard: a loss term of the parameter itself.

    Every rank computes such a term of the whole parameter alike, so it needs no averaging.
    """
    base: Any = torch.Tensor.grad
    gradient = base.__get__(parameter)
    assert parameter._flat is not None and isinstance(gradient, ShardedParameter)
    parameter._flat.receive_piece(parameter._piece.name, gradient._local)
    base.__set__(parameter, None)


def _is_elementwise(func: Any) -> bool:
    name = func._schema.name
    return (
        torch.Tag.pointwise in func.tags
        or func in _SAME_PLACE
        or name.startswith(("aten::_foreach_", "aten::_fused_"))
    )


# Ops that give each element its own result without the tag that says so.
_SAME_PLACE = frozenset(
    {
        _aten.detach.default,
        _aten.alias.default,
        _aten.clone.default,
        _aten.copy_.default,
        _aten._to_copy.default,
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.fill_.Tensor,
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.full_like.default,
        _aten.masked_fill.Scalar,
        _aten.masked_fill_.Scalar,
        _aten.lerp_.Scalar,
        _aten.lerp_.Tensor,
        _aten._amp_foreach_non_finite_check_and_unscale_.default,
    }
)


def _run_on_pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sharded = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ShardedParameter)]
    piece = sharded[0]._piece
    lists = isinstance(args[0], (list, tuple))
    if not lists:
        _check_same_place(func, sharded)
        if any(
            x.dim() and not isinstance(x, ShardedParameter) for x in _written(func, args, kwargs)
        ):
            raise _needs_whole(func, args, kwargs)  # a rank would write its own part only

    def local(value: Any) -> Any:
        if isinstance(value, ShardedParameter):
            return value._local
        if (
            isinstance(value, Tensor)
            and not lists
            and value.dim()
            and tuple(value.shape) == piece.shape
        ):
            return piece.of(value)
        if isinstance(value, Tensor) and not lists and value.dim():
            raise _needs_whole(func, args, kwargs)
        return value

    # A memory format speaks of the global shape; pieces are flat.
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    result = func(*pytree.tree_map(local, args), **pytree.tree_map(local, kwargs))
    if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
        reductions.share_found_inf(args[0], args[1])
    written = [x for x in _written(func, args, kwargs) if isinstance(x, ShardedParameter)]
    if written:
        # Below autograd nothing counts this write; graphs that saved the shard must notice it.
        torch.autograd.graph.increment_version([x._local for x in written])
    if func._schema.name.endswith("_") or func._schema.name.startswith("aten::_fused_"):
        return args[0] if not lists else None
    return _wrap(result, args[0] if lists else sharded[0])


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors that `func` writes to, sharded or not."""
    found: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += pytree.tree_leaves(value)
    return [x for x in found if isinstance(x, Tensor)]


def _wrap(result: Any, like: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [_wrap(item, source) for item, source in zip(result, like, strict=True)]
    if isinstance(result, Tensor) and isinstance(like, ShardedParameter):
        return ShardedParameter(result, like._piece)
    return result


def _check_same_place(func: Any, sharded: Sequence[ShardedParameter]) -> None:
    first = sharded[0]._piece
    for other in sharded[1:]:
        p = other._piece
        if (p.shape, p.start, p.length) != (first.shape, first.start, first.length):
            raise WholeTensorError(
                f"{func}: {first.name} and {p.name} are split differently; combine "
                f"{first.name}.full_tensor() and {p.name}.full_tensor() instead"
            )


def _needs_whole(func: Any, args: Any, kwargs: Any) -> WholeTensorError:
    leaves = pytree.tree_leaves((args, kwargs))
    piece = next(x._piece for x in leaves if isinstance(x, ShardedParameter))
    ranks = collectives.size(piece.group)
    return WholeTensorError(
        f"{func} needs the whole of {piece.name} {list(piece.shape)}, which is split over "
        f"{ranks} ranks; call .full_tensor() first, on every rank"
    )


Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

enable_foreach(ShardedParameter)
