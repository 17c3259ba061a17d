"""Elementwise ops on sharded tensors: each rank runs them on its own pieces.

Foreach and fused ops take whole models in lists, hundreds of tensors a call, once or more a step:
what is done for each of them here is host time of every training step.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from zgraph.errors import WholeTensorError
from zgraph.runtime import reductions
from zgraph.runtime.piece import Piece, needs_whole

_aten = torch.ops.aten

# Ops that give each element its own result without the tag that says so.
_UNTAGGED = frozenset(
    {
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


_REDUCING = frozenset(f"aten::_foreach_{name}" for name in ("norm", "max", "powsum"))
_FUSED = frozenset(f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))


@cache
def is_pointwise(func: Any) -> bool:
    """Whether each element of the op's results depends on one element of each input."""
    name = func._schema.name
    foreach = name.startswith("aten::_foreach_") and name not in _REDUCING
    fused = name in _FUSED
    return foreach or fused or torch.Tag.pointwise in func.tags or func in _UNTAGGED


def run(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise op whose arguments hold instances of `cls`, a sharded tensor class.

    Results are of `cls` where the argument that they belong to is. Plain tensors of the global
    shape take part with the elements that belong to the pieces.

    Raises:
        WholeTensorError: pieces do not match one another or a plain tensor.
    """
    # A memory format speaks of the global shape; pieces are flat.
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    if isinstance(args[0], (list, tuple)):
        _check_lists(cls, func, args, kwargs)
        local = partial(_pieces_of_list, cls)
    else:
        piece = _common_piece(cls, func, args, kwargs)
        local = partial(_piece_of_one, cls, func, piece)
    values = {name: local(value) for name, value in kwargs.items()}
    result = func(*(local(value) for value in args), **values)
    if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
        reductions.share_found_inf(args[0], args[1])
    written = [x._local for x in _written(func, args, kwargs) if isinstance(x, cls)]
    if written:
        # Below autograd nothing counts this write; graphs that saved the shard must notice it.
        torch.autograd.graph.increment_version(written)
        # Lists that are written to are not returned.
        return None if isinstance(args[0], (list, tuple)) else args[0]
    return _wrap(cls, result, args[0] if isinstance(args[0], (list, tuple)) else _first(cls, args))


def _check_lists(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Where one list holds a sharded tensor, no other may hold a plain one of any dimension.

    Optimizer steps, which are plain scalars, and whole tensors beside whole ones are fine.
    """
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)) and x]
    for members in zip(*lists, strict=False):
        if not any(isinstance(x, Tensor) and type(x) is not cls and x.dim() for x in members):
            continue
        for sharded in members:
            if isinstance(sharded, cls):
                raise needs_whole(func, sharded._piece)


def _pieces_of_list(cls: type[Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [x._local if isinstance(x, cls) else x for x in value]
    return value


def _piece_of_one(cls: type[Any], func: Any, piece: Piece, value: Any) -> Any:
    if isinstance(value, cls):
        return value._local
    if isinstance(value, Tensor) and value.dim():
        if tuple(value.shape) == piece.shape:
            return piece.of(value)
        raise needs_whole(func, piece)
    return value


def _common_piece(
    cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Piece:
    """The piece that all sharded arguments of an op on single tensors share."""
    sharded = [x for x in (*args, *kwargs.values()) if isinstance(x, cls)]
    first: Piece = sharded[0]._piece
    for other in sharded[1:]:
        if not first.same_place(other._piece):
            raise WholeTensorError(
                f"{func}: {first.name} and {other._piece.name} are split differently; combine "
                f"{first.name}.full_tensor() and {other._piece.name}.full_tensor() instead"
            )
    if any(x.dim() and not isinstance(x, cls) for x in _written(func, args, kwargs)):
        raise needs_whole(func, first)  # a rank would write its own part only
    return first


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Tensors that the op writes to, sharded or not."""
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        members: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
        yield from (x for x in members if isinstance(x, Tensor))


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _first(cls: type[Any], args: tuple[Any, ...]) -> Any:
    return next(x for x in args if isinstance(x, cls))


def _wrap(cls: type[Any], result: Any, like: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [_wrap(cls, item, source) for item, source in zip(result, like, strict=True)]
    if isinstance(result, Tensor) and isinstance(like, cls):
        return cls(result, like._piece)
    return result
