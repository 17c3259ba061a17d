"""Collectives of one step: how often each unit meets, and what a rank sends over each mesh axis."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from zgraph.ir import ops
from zgraph.ir.graph import Graph, Stage, bytes_of

KINDS: dict[Any, str] = {
    ops.gather: "all-gather",
    ops.scatter: "reduce-scatter",
    ops.reduce: "all-reduce",
}


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
            axis, _, ranks = graph.axis_of(node).rpartition("=")
            if not axis:
                continue  # one rank: nothing is sent
            key = graph.unit_of(node), graph.stage, KINDS[node.target], axis, int(ranks)
            count, sent = totals.get(key, (0, 0))
            whole = bytes_of(node if node.target is ops.gather else node.all_input_nodes[0])
            totals[key] = count + 1, sent + sent_bytes(key[2], whole, int(ranks))
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
