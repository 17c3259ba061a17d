"""The nodes of the dialect, as `torch.library` ops in the namespace `zgraph`.

Captured level, what Dynamo and AOTAutograd see:

    parameter(shard, name, buffer, shape, offset, dtype, reduce_dtype, group, sum_groups)
        -> whole                                              this parameter, in compute dtype
    gradient(grad, name, buffer, offset, shard_numel, reduce_dtype, dtype, group, sum_groups)
        -> flat                                               its mean, on this rank's slice

Unit level, what the joint passes put in their place and schedule passes move:

    gather(shard, buffer, numel, dtype, group) -> pending     cast to dtype, all-gather
    whole(shard, buffer, dtype) -> flat                       a persistent buffer, cast to dtype
    pack(grads, offsets, buffer, numel, dtype) -> flat        cast and flatten, zero elsewhere
    scatter(flat, buffer, group) -> pending                   mean over the group, own slice
    reduce(flat, buffer, group) -> pending                    mean over the group, all of it
    wait(pending) -> result

Ops describe themselves: names and group names as strings, sizes in elements. An empty group name
means one rank and no collective. All have an eager kernel, so a graph of them also runs under a
backend that knows nothing of zgraph; `zgraph.lowering` gives the efficient form. "Mean" divides as
Note [Averaging] in `zgraph.lowering` says.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zgraph.runtime import collectives
from zgraph_kernels import pack as pack_tensors

LIBRARY = torch.library.Library("zgraph", "DEF")

LIBRARY.define(
    "parameter(Tensor shard, str name, str buffer, SymInt[] shape, int offset, ScalarType dtype,"
    " ScalarType reduce_dtype, str group, str[] sum_groups) -> Tensor"
)
LIBRARY.define(
    "gradient(Tensor grad, str name, str buffer, int offset, int shard_numel,"
    " ScalarType reduce_dtype, ScalarType dtype, str group, str[] sum_groups) -> Tensor"
)
LIBRARY.define("gather(Tensor shard, str buffer, int numel, ScalarType dtype, str group) -> Tensor")
LIBRARY.define("whole(Tensor shard, str buffer, ScalarType dtype) -> Tensor")
LIBRARY.define(
    "pack(Tensor[] grads, int[] offsets, str buffer, int numel, ScalarType dtype) -> Tensor"
)
LIBRARY.define("scatter(Tensor flat, str buffer, str group) -> Tensor")
LIBRARY.define("reduce(Tensor flat, str buffer, str group) -> Tensor")
LIBRARY.define("wait(Tensor pending) -> Tensor")


def _parameter(
    shard: Tensor,
    name: str,
    buffer: str,
    shape: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: str,
    sum_groups: Sequence[str],
) -> Tensor:
    flat = collectives.all_gather(shard.to(dtype), group)
    numel = torch.Size(shape).numel()
    # A fresh tensor: an op may not return a view of its input, which `flat` is without a group.
    return flat[offset : offset + numel].view(list(shape)).clone()


def _gradient(
    grad: Tensor,
    name: str,
    buffer: str,
    offset: int,
    shard_numel: int,
    reduce_dtype: torch.dtype,
    dtype: torch.dtype,
    group: str,
    sum_groups: Sequence[str],
) -> Tensor:
    numel = shard_numel * collectives.size(group)
    packed = pack_tensors([grad], [offset], numel, reduce_dtype)
    flat = collectives.reduce_scatter_mean(packed, group)
    for other in sum_groups:
        flat = collectives.all_reduce_mean(flat, other)
    return flat.to(dtype)


def _pack(
    grads: Sequence[Tensor], offsets: Sequence[int], buffer: str, numel: int, dtype: torch.dtype
) -> Tensor:
    return pack_tensors(grads, offsets, numel, dtype)


def _gather(shard: Tensor, buffer: str, numel: int, dtype: torch.dtype, group: str) -> Tensor:
    return collectives.all_gather(shard.to(dtype, copy=True), group)


def _whole(shard: Tensor, buffer: str, dtype: torch.dtype) -> Tensor:
    return shard.to(dtype, copy=True)


def _scatter(flat: Tensor, buffer: str, group: str) -> Tensor:
    return collectives.reduce_scatter_mean(flat, group).clone()


def _reduce(flat: Tensor, buffer: str, group: str) -> Tensor:
    return collectives.all_reduce_mean(flat, group).clone()


def _wait(pending: Tensor) -> Tensor:
    return pending.clone()


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "parameter": _parameter,
    "gradient": _gradient,
    "gather": _gather,
    "whole": _whole,
    "pack": _pack,
    "scatter": _scatter,
    "reduce": _reduce,
    "wait": _wait,
}

# Shapes and dtypes only; arguments as in the schemas.
_FAKES: dict[str, Callable[..., Tensor]] = {
    "parameter": lambda shard, name, buffer, shape, offset, dtype, *_: shard.new_empty(
        shape, dtype=dtype
    ),
    "gradient": lambda grad, name, buffer, offset, numel, reduce_dtype, dtype, *_: grad.new_empty(
        numel, dtype=dtype
    ),
    "gather": lambda shard, buffer, numel, dtype, group: shard.new_empty(numel, dtype=dtype),
    "whole": lambda shard, buffer, dtype: shard.new_empty(shard.shape, dtype=dtype),
    "pack": lambda grads, offsets, buffer, numel, dtype: grads[0].new_empty(numel, dtype=dtype),
    "scatter": lambda flat, buffer, group: flat.new_empty(flat.numel() // collectives.size(group)),
    "reduce": lambda flat, buffer, group: torch.empty_like(flat),
    "wait": lambda pending: torch.empty_like(pending),
}

for _name, _kernel in _KERNELS.items():
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zgraph::{_name}", _FAKES[_name], lib=LIBRARY)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, ctx.name, ctx.buffer, _, ctx.offset, _, ctx.reduce_dtype, ctx.group, ctx.sums = inputs
    ctx.shard_numel, ctx.dtype = shard.numel(), shard.dtype


def _parameter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    flat = torch.ops.zgraph.gradient(
        grad,
        ctx.name,
        ctx.buffer,
        ctx.offset,
        ctx.shard_numel,
        ctx.reduce_dtype,
        ctx.dtype,
        ctx.group,
        ctx.sums,
    )
    return flat, None, None, None, None, None, None, None, None


torch.library.register_autograd(
    "zgraph::parameter", _parameter_backward, setup_context=_remember, lib=LIBRARY
)

parameter = torch.ops.zgraph.parameter.default
gradient = torch.ops.zgraph.gradient.default
gather = torch.ops.zgraph.gather.default
whole = torch.ops.zgraph.whole.default
pack = torch.ops.zgraph.pack.default
scatter = torch.ops.zgraph.scatter.default
reduce = torch.ops.zgraph.reduce.default
wait = torch.ops.zgraph.wait.default

# The ops that start a collective, by its usual name.
STARTS: dict[Any, str] = {gather: "all-gather", scatter: "reduce-scatter", reduce: "all-reduce"}
# Where an op's arguments name its buffer, and its process group.
BUFFER_ARGUMENT: dict[Any, int] = {
    parameter: 2,
    gradient: 2,
    gather: 1,
    whole: 1,
    pack: 2,
    scatter: 1,
    reduce: 1,
}
DIALECT = frozenset((*BUFFER_ARGUMENT, wait))
GROUP_ARGUMENT: dict[Any, int] = {parameter: 7, gradient: 7, gather: 4, scatter: 2, reduce: 2}
