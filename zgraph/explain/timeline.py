"""Timeline: when each node of a scheduled graph would run, by a simple model of the machine.

An estimate to compare schedules by, not a measurement: compute runs in program order, each node as
long as its arithmetic or its memory traffic takes, whichever is longer; the collectives of one
mesh axis queue behind one another; a wait stands still until its collective is done. Launches,
fusion and contention are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from zgraph.explain.collectives import sent_bytes
from zgraph.ir import ops
from zgraph.ir.graph import Graph
from zgraph.ir.nodes import bytes_in, is_view
from zgraph.plan import Axis


@dataclass(frozen=True)
class Machine:
    """Rates that one rank sustains.

    The defaults are about what one H200 reaches in large matrix products, copies, and NCCL
    collectives over NVLink.

    Attributes:
        half_flops, full_flops: floating-point operations a second in 16-bit and in wider types.
        memory_bytes: bytes a second to and from memory.
        link_bytes: bytes a second that a rank sends in a collective.
        latency_us: what a collective takes at least.
    """

    half_flops: float = 650e12
    full_flops: float = 45e12
    memory_bytes: float = 4.0e12
    link_bytes: float = 350e9
    latency_us: float = 15.0

    def __str__(self) -> str:
        return (
            f"{self.half_flops / 1e12:g} TFLOP/s in 16-bit types, {self.full_flops / 1e12:g} in "
            f"wider ones, {self.memory_bytes / 1e12:g} TB/s of memory, collectives of "
            f"{self.link_bytes / 1e9:g} GB/s a rank and at least {self.latency_us:g} µs"
        )


@dataclass(frozen=True)
class Span:
    """When a node runs, in microseconds from the start of its graph.

    A collective ends when its data has arrived; a wait lasts as long as compute stands still.
    """

    node: Node
    start_us: float
    end_us: float


def timeline(graph: Graph, machine: Machine) -> list[Span]:
    """One span for each node of a scheduled graph, in program order."""
    now = 0.0
    free: dict[Axis | None, float] = {}  # when the collectives of an axis are done
    done: dict[Node, float] = {}
    spans = []
    for node in graph.fx.nodes:
        if node.target in ops.STARTS:
            axis = graph.axis_of(node)
            start = max(now, free.get(axis, 0.0))
            done[node] = free[axis] = start + _collective_us(graph, node, machine)
            spans.append(Span(node, start, done[node]))
            continue
        end = max(now, done[node.all_input_nodes[0]]) if node.target is ops.wait else now
        if node.target is not ops.wait:
            end += _compute_us(node, machine)
        spans.append(Span(node, now, end))
        now = end
    return spans


def _collective_us(graph: Graph, node: Node, machine: Machine) -> float:
    axis = graph.axis_of(node)
    if axis is None:
        return 0.0
    sent = sent_bytes(ops.STARTS[node.target], graph.moved_bytes(node), axis.size)
    return max(machine.latency_us, sent / machine.link_bytes * 1e6)


def _compute_us(node: Node, machine: Machine) -> float:
    if node.op != "call_function" or is_view(node) or "val" not in node.meta:
        return 0.0
    moved = bytes_in([other.meta.get("val") for other in (node, *node.all_input_nodes)])
    rate = machine.half_flops if _is_half(node.meta["val"]) else machine.full_flops
    return max(moved / machine.memory_bytes, _flops(node) / rate) * 1e6


def _flops(node: Node) -> float:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0
    args: Any = torch.fx.map_arg(node.args, lambda source: source.meta["val"])
    kwargs: Any = torch.fx.map_arg(node.kwargs, lambda source: source.meta["val"])
    return float(count(*args, **kwargs, out_val=node.meta["val"]))


def _is_half(value: Any) -> bool:
    first = value[0] if isinstance(value, Sequence) and value else value
    return isinstance(first, Tensor) and first.dtype.itemsize <= 2
