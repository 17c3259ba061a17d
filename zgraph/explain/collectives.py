"""Collectives of one step: how often each unit meets, and what a rank sends over each mesh axis."""

from collections.abc import Iterable
from dataclasses import dataclass

from zgraph.ir import ops
from zgraph.ir.graph import Graph, Stage


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind, unit, stage and mesh axis in one step.

    Attributes:
        axis: mesh axis that they cross; its number of ranks is `ranks`.
        count: how many start.
        sent_bytes: bytes that each rank sends, and receives, in all of them together.
    """

    unit: str
    stage: Stage
    kind: str
    axis: str
    ranks: int
    count: int
    sent_bytes: int


def collectives(graphs: Iterable[Graph]) -> list[Collective]:
    """One entry for each unit, stage, kind and axis, in program order."""
    totals: dict[tuple[str, Stage, str, str, int], tuple[int, int]] = {}
    for graph in graphs:
        for node in graph.starts():
            axis = graph.axis_of(node)
            if axis is None:
                continue  # one rank: nothing is sent
            unit, kind = graph.unit_of(node), ops.STARTS[node.target]
            key = unit, graph.stage, kind, axis.name, axis.size
            count, sent = totals.get(key, (0, 0))
            totals[key] = count + 1, sent + sent_bytes(kind, graph.moved_bytes(node), axis.size)
    return [Collective(*key, *total) for key, total in totals.items()]


def sent_bytes(kind: str, whole_bytes: int, ranks: int) -> int:
    """Bytes that a rank sends in one collective on `whole_bytes` of data over `ranks`.

    Of an all-gather or a reduce-scatter every rank sends (ranks - 1) / ranks of the whole; an
    all-reduce is one of each. This is the least that any algorithm can do (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009), and what rings
    do.
    """
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * whole_bytes * (ranks - 1) // ranks
