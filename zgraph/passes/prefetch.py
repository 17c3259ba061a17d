"""Prefetch: start gathers before what they gather is needed."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph.errors import PassError
from zgraph.ir.graph import Graph
from zgraph.passes.base import Hook, Pass
from zgraph.plan import Plan


@dataclass(frozen=True)
class Prefetch(Pass):
    """Start each gather `units` units before the first use of what it gathers.

    All gathers of a unit start together. They move up to behind the wait of the unit `units`
    places ahead in order of use, but not above the last use of the unit before that one, so that
    at most `units + 1` gathered units are alive at a time. (A unit that is used again later, such
    as a tied embedding, comes on top; see `Reshard(keep_between_uses=False)`.) Collectives keep
    their order.

    Args:
        units: units ahead in forward; 0 starts each gather directly before its first use.
        backward_units: the same in backward; None means as in forward.

    Raises:
        PassError: a number of units is not a non-negative integer.
    """

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[str]] = frozenset({"gathers"})
    provides: ClassVar[frozenset[str]] = frozenset({"prefetch"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"prefetch"})

    units: int = 1
    backward_units: int | None = None

    def __post_init__(self) -> None:
        for label, value in (("units", self.units), ("backward_units", self.backward_units)):
            count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if not (count or (label == "backward_units" and value is None)):
                raise PassError(
                    f"Prefetch({label}={value!r}): expected a number of units, 0 or more"
                )

    def plan(self, plan: Plan) -> Plan:
        backward = self.units if self.backward_units is None else self.backward_units
        return plan.changed(prefetch_forward=self.units, prefetch_backward=backward)

    def has(self, hook: Hook) -> bool:
        return hook == "schedule" and bool(self.units or self.backward_units)

    def schedule(self, graph: Graph, plan: Plan) -> None:
        ahead = plan.prefetch_backward if graph.stage == "backward" else plan.prefetch_forward
        if ahead:
            _hoist(graph, ahead)
            graph.finish()


def _hoist(graph: Graph, ahead: int) -> None:
    turns = _turns(graph)
    for turn in turns:
        for gather in reversed(turn[1:]):
            graph.move_after(gather, turn[0])
    for index in range(1, len(turns)):
        leader = turns[max(0, index - ahead)]
        # Behind the gathers of the unit before, however far up those have moved.
        anchor = max(turns[index - 1][-1], *(graph.gathered(gather).wait for gather in leader))
        previous = index - ahead - 1
        if previous >= 0:
            last = max(graph.gathered(gather).last_read for gather in turns[previous])
            # A unit used again later on does not hold its successors back.
            if last < turns[index][0]:
                anchor = max(anchor, last)
        if anchor < turns[index][0]:
            for gather in reversed(turns[index]):
                graph.move_after(gather, anchor)


def _turns(graph: Graph) -> list[list[fx.Node]]:
    """Gathers in program order, those of one unit that follow each other together."""
    turns: list[list[fx.Node]] = []
    for gather in graph.gathers():
        if turns and graph.unit_of(turns[-1][0]) == graph.unit_of(gather):
            turns[-1].append(gather)
        else:
            turns.append([gather])
    return turns
