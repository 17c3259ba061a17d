"""Reshard: whether gathered parameters are freed after forward, or kept for backward."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph.errors import PassError
from zgraph.ir import ops
from zgraph.ir.graph import Gathered, Graph
from zgraph.passes.base import Hook, Pass
from zgraph.plan import Plan


@dataclass(frozen=True)
class Reshard(Pass):
    """Free gathered parameters after forward, or keep them.

    In the joint graph each gather, its wait, and every view or cast of it is tagged: for
    recomputation (`after_forward=True`), so that backward gathers again, what it needs; or to be
    saved (`False`), so that backward has no gather.

    In the schedule, a unit used twice in one graph with other units between, such as a tied
    embedding and head, has one long-lived buffer (`keep_between_uses=True`, the fewest gathers) or
    is gathered anew for each run of uses (`False`, the least memory).

    Raises:
        PassError: an argument is not a bool.
    """

    name: ClassVar[str] = "reshard"
    requires: ClassVar[frozenset[str]] = frozenset({"gathers"})
    provides: ClassVar[frozenset[str]] = frozenset({"reshard"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"reshard"})

    after_forward: bool = True
    keep_between_uses: bool = True

    def __post_init__(self) -> None:
        for label in ("after_forward", "keep_between_uses"):
            value = getattr(self, label)
            if not isinstance(value, bool):
                raise PassError(f"Reshard({label}={value!r}): expected True or False")

    def plan(self, plan: Plan) -> Plan:
        return plan.changed(
            reshard_after_forward=self.after_forward, keep_between_uses=self.keep_between_uses
        )

    def joint(self, graph: Graph, plan: Plan) -> None:
        for gather in graph.gathers():
            wait = graph.gathered(gather).wait
            graph.recompute([gather, *graph.casts_and_views(wait)])
            if self.after_forward:
                graph.recompute([wait])
            else:
                graph.save([wait])
        for node in graph.nodes(ops.whole):
            graph.recompute([node, *graph.casts_and_views(node)])

    def has(self, hook: Hook) -> bool:
        return hook == "joint" or not self.keep_between_uses

    def schedule(self, graph: Graph, plan: Plan) -> None:
        for gather in graph.gathers():
            _regather(graph, graph.gathered(gather))
        graph.finish()


def _regather(graph: Graph, item: Gathered) -> None:
    """Give each run of uses, uninterrupted by another gather, a gather of its own."""
    unit = graph.unit_of(item.gather)
    others = [node for node in graph.gathers() if graph.unit_of(node) != unit]
    runs: list[list[fx.Node]] = []
    for use in item.uses:
        apart = not runs or any(runs[-1][-1] < other < use for other in others)
        if apart:
            runs.append([])
        runs[-1].append(use)
    for run in runs[1:]:
        copies = graph.copy_before([item.gather, item.wait, *item.views], run[0])
        for use in run:
            for node in (item.wait, *item.views):
                graph.replace_input(use, node, copies[node])
