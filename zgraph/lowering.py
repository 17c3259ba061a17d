"""Lowering: the nodes of the dialect become functional collectives, kernels and views.

What a gather casts and what a scatter packs is moved by the kernels of `zgraph_kernels` on CUDA,
which Inductor calls as they are; elsewhere, and for comparison, by torch's own `cat` and casts,
which it fuses.

Note [Averaging]
Gradients are averaged over the ranks, as FSDP2 does. NCCL divides inside the collective (AVG) for
fp32 and bf16. Elsewhere, and for fp16, the collective sums: one division follows it, and fp16 is
also divided before, so that the sum does not overflow (`runtime.collectives.division`). Captured
graphs and eager code divide alike, so that a graph break changes no number. The division before is
by a power of two, which a pack kernel does on the way where it does not round besides.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx

import zgraph_kernels
from zgraph.errors import PassError
from zgraph.ir import ops
from zgraph.ir.graph import Graph
from zgraph.ir.nodes import arguments
from zgraph.runtime import collectives

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default
_pack_kernel = torch.ops.zgraph_kernels.pack.default

# What divides.
_MEANS = (ops.scatter, ops.reduce)

Kernels = Literal["triton", "torch"]


def choose_kernels(options: Mapping[str, str] | None, device_type: str) -> Kernels:
    """Which kernels move gathered and scattered memory: those of `options`, else by device.

    Args:
        options: {"kernels": "triton"}, {"kernels": "torch"} or nothing.

    Raises:
        PassError: an unknown option or value, or Triton's kernels for a device that is not CUDA.
    """
    options = dict(options or {})
    chosen = options.pop("kernels", "triton" if device_type == "cuda" else "torch")
    if options:
        raise PassError(f"options has {', '.join(options)}: the only one is kernels")
    if chosen not in get_args(Kernels):
        raise PassError(f'options["kernels"] is {chosen!r}: expected "triton" or "torch"')
    if chosen == "triton" and device_type != "cuda":
        raise PassError(
            f'options["kernels"]="triton" needs CUDA devices, and the model is on {device_type}; '
            'leave it out, or choose "torch"'
        )
    return "triton" if chosen == "triton" else "torch"


def accumulation(kernels: Kernels) -> Callable[[Tensor, Tensor], None]:
    """What adds a flat gradient, the second, into the one that is there."""
    return zgraph_kernels.accumulate if kernels == "triton" else _add


def _add(into: Tensor, value: Tensor) -> None:
    into.add_(value)


def lower(graph: Graph, kernels: Kernels) -> None:
    """Replace every node of the dialect by what runs, in place and in order."""
    rules: dict[Any, Callable[[Graph, fx.Node], fx.Node]] = {
        ops.gather: partial(_gather, kernels=kernels),
        ops.whole: _whole,
        ops.pack: _packed if kernels == "triton" else _concatenated,
        ops.scatter: _scatter,
        ops.reduce: _reduce,
    }
    with graph.edited_by("lower"):
        # Waits first: whether one divides depends on what it waits for.
        for node in graph.waits():
            graph.replace(node, _wait(graph, node))
        for target, rule in rules.items():
            for node in graph.nodes(target):
                graph.replace(node, rule(graph, node))
    graph.finish()


def _gather(graph: Graph, node: fx.Node, kernels: Kernels) -> fx.Node:
    shard, _, _, dtype, group = arguments(node)
    value = shard.meta["val"]
    if kernels == "triton" and group and value.dtype != dtype:
        call = ([shard], [0], value.numel(), dtype)
        shard = graph.call(_pack_kernel, *call, before=node, role="cast")
    else:
        shard = _to(graph, shard, dtype, node)
    if not group:
        return shard
    ranks = collectives.size(group)
    return graph.call(
        _c10d.all_gather_into_tensor.default, shard, ranks, group, before=node, role="gather"
    )


def _whole(graph: Graph, node: fx.Node) -> fx.Node:
    shard, _, dtype = arguments(node)
    return _to(graph, shard, dtype, node)


def _packed(graph: Graph, node: fx.Node) -> fx.Node:
    """One kernel, which also divides for its scatter. See Note [Averaging]."""
    grads, offsets, _, numel, dtype = arguments(node)
    before = {_mean(user)[1] for user in node.users if user.target in _MEANS}
    alike = len(before) == len({user.target in _MEANS for user in node.users}) == 1
    unrounded = all(grad.meta["val"].dtype == dtype for grad in grads)
    scale = 1 / before.pop() if alike and unrounded else 1.0
    call = (grads, offsets, numel, dtype, scale)
    return graph.call(_pack_kernel, *call, before=node, role="pack")


def _concatenated(graph: Graph, node: fx.Node) -> fx.Node:
    """Flatten, cast and concatenate, with zeros between and for parameters without gradient."""
    grads, offsets, _, numel, dtype = arguments(node)
    parts: list[fx.Node] = []
    end = 0
    for grad, offset in zip(grads, offsets, strict=True):
        count = grad.meta["val"].numel()
        if not count:
            continue
        if end < offset:
            parts.append(_zeros(graph, node, offset - end))
        flat = graph.call(_aten.reshape.default, grad, [count], before=node, role="flatten")
        parts.append(_to(graph, flat, dtype, node))
        end = offset + count
    if end < numel or not parts:
        parts.append(_zeros(graph, node, numel - end))
    return graph.call(_aten.cat.default, parts, before=node, role="pack")


def _zeros(graph: Graph, pack: fx.Node, count: int) -> fx.Node:
    value = pack.meta["val"]
    with graph.fx.inserting_before(pack):
        node = graph.fx.call_function(
            _aten.full.default,
            ([count], 0),
            {"dtype": value.dtype, "device": value.device, "pin_memory": False},
        )
    node.meta["val"] = value.new_empty(count)
    return node


def _scatter(graph: Graph, node: fx.Node) -> fx.Node:
    flat, _, group = arguments(node)
    op, before, _ = _mean(node)
    flat = _divide_unless_packed(graph, flat, before, node)
    ranks = collectives.size(group)
    return graph.call(
        _c10d.reduce_scatter_tensor.default, flat, op, ranks, group, before=node, role="scatter"
    )


def _reduce(graph: Graph, node: fx.Node) -> fx.Node:
    flat, _, group = arguments(node)
    op, before, _ = _mean(node)
    flat = _divide_unless_packed(graph, flat, before, node)
    return graph.call(_c10d.all_reduce.default, flat, op, group, before=node, role="reduce")


def _wait(graph: Graph, node: fx.Node) -> fx.Node:
    (source,) = node.all_input_nodes
    if source.target is ops.gather and not arguments(source)[4]:
        return source
    result = graph.call(_c10d.wait_tensor.default, source, before=node, role="wait")
    if source.target is ops.gather:
        return result
    return _divide(graph, result, _mean(source)[2], node)


def _mean(node: fx.Node) -> tuple[str, float, float]:
    """(reduce op, division before, division after). See Note [Averaging]."""
    value, group = node.meta["val"], arguments(node)[2]
    if collectives.averages(group, value.dtype, value.device.type):
        return "avg", 1.0, 1.0
    return ("sum", *collectives.division(group, value.dtype))


def _divide(graph: Graph, value: Any, factor: float, before: fx.Node) -> fx.Node:
    if factor == 1:
        return value
    return graph.call(_aten.div.Tensor, value, factor, before=before, role="mean")


def _divide_unless_packed(graph: Graph, flat: Any, factor: float, before: fx.Node) -> fx.Node:
    """Divide, where the kernel that packed `flat` has not done so."""
    packed = flat.target is _pack_kernel and flat.args[4] != 1
    return flat if packed else _divide(graph, flat, factor, before)


def _to(graph: Graph, value: Any, dtype: Any, before: fx.Node) -> fx.Node:
    if value.meta["val"].dtype == dtype:
        return value
    return graph.call(_cast, value, dtype, before=before, role="cast")
