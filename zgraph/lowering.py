"""Lowering: the nodes of the dialect become functional collectives, casts, `cat` and views.

Note [Averaging]
Gradients are averaged over the ranks, as FSDP2 does. NCCL divides inside the collective (AVG) for
fp32 and bf16. Elsewhere, and for fp16, the collective sums: one division follows it, and fp16 is
also divided before, so that the sum does not overflow (`runtime.collectives.division`). Captured
graphs and eager code divide alike, so that a graph break changes no number.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from zgraph.ir import ops
from zgraph.ir.graph import Graph
from zgraph.ir.nodes import arguments
from zgraph.runtime import collectives

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default


def lower(graph: Graph) -> None:
    """Replace every node of the dialect by what runs, in place and in order."""
    rules: dict[Any, Callable[[Graph, fx.Node], fx.Node]] = {
        ops.gather: _gather,
        ops.whole: _whole,
        ops.pack: _pack,
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


def _gather(graph: Graph, node: fx.Node) -> fx.Node:
    shard, _, _, dtype, group = arguments(node)
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


def _pack(graph: Graph, node: fx.Node) -> fx.Node:
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
    flat = _divide(graph, flat, before, node)
    ranks = collectives.size(group)
    return graph.call(
        _c10d.reduce_scatter_tensor.default, flat, op, ranks, group, before=node, role="scatter"
    )


def _reduce(graph: Graph, node: fx.Node) -> fx.Node:
    flat, _, group = arguments(node)
    op, before, _ = _mean(node)
    flat = _divide(graph, flat, before, node)
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


def _to(graph: Graph, value: Any, dtype: Any, before: fx.Node) -> fx.Node:
    if value.meta["val"].dtype == dtype:
        return value
    return graph.call(_cast, value, dtype, before=before, role="cast")
