"""Faults: what a wrong pass may do to a graph, each with the rule that must name it.

A fault is a function of the graph. It runs as a pass of its own name, behind the others, on each
graph of its stage; the module that defines it is one of `faults_in_…` beside this file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

import zgraph as zg
from tests.capture.steps import small_tower, tied_tower
from zgraph.ir.graph import Stage
from zgraph.ir.verify import Snapshot, verify

Edit = Callable[[zg.Graph], None]
HSDP = {"replicate": 2, "shard": 2}
HSDP_PASSES = (zg.Partition(replicate="replicate"),)
PERSISTENT = (zg.Partition(), zg.Persist(max_numel=16))


class Dropouts(nn.Module):
    """Two layers, with dropout of another probability behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one = nn.functional.dropout(self.first(x), 0.25)
        return one, nn.functional.dropout(self.second(x), 0.5)


class Attention(nn.Module):
    """Two products that differ in their weights and in random scales alone; a softmax over keys.

    There are as many queries as keys, so that shapes do not tell one from the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        one, other = torch.rand(8, 8), torch.rand(8, 8)
        scores = (self.q(x) * one) @ (self.k(x) * other).T
        return torch.softmax(scores * 1.0, dim=-1)


TOKENS = torch.arange(8).view(2, 4)
ARGS: dict[Callable[[], nn.Module], tuple[Any, ...]] = {
    small_tower: (TOKENS,),
    tied_tower: (TOKENS,),
    Dropouts: (torch.ones(4, 8),),
    Attention: (torch.ones(8, 8),),
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        edit: what the wrong pass does.
        stage: where it does it.
        rule: name of the rule that must reject it.
        passes: the list in front of it.
        model: what is captured, on `mesh`.
        says_so: whether the pass says that it changes what is computed.
        given: what the graph has beforehand that these captures lack, such as a written buffer.
    """

    edit: Edit
    stage: Stage
    rule: str
    passes: tuple[zg.Pass, ...] = (zg.Partition(),)
    model: Callable[[], nn.Module] = small_tower
    mesh: Mapping[str, int] = field(default_factory=lambda: {"shard": 2})
    says_so: bool = False
    given: Edit = lambda graph: None

    @property
    def name(self) -> str:
        """The name of the wrong pass."""
        return self.edit.__name__

    def captured(self) -> zg.Captured:
        """The graphs that the passes in front leave."""
        return captured(self.model, self.passes, tuple(self.mesh.items()))

    def verify(self) -> None:
        """Let the fault into a copy of the graph, and verify it as after any pass."""
        source = self.captured()
        graph = source.graph(self.stage).copy()
        self.given(graph)
        before = Snapshot.of(graph)
        with graph.edited_by(self.name):
            self.edit(graph)
        verify(graph, source.plan, self.name, before, self.says_so)

    def capture(self) -> zg.Captured:
        """Capture anew with the wrong pass in the list."""

        def wrong(graph: zg.Graph, plan: zg.Plan) -> None:
            if graph.stage == self.stage:
                self.edit(graph)

        wrong.__qualname__ = self.name
        at = "joint" if self.stage == "joint" else "schedule"
        item = zg.graph_pass(stage=at, changes_compute=self.says_so)(wrong)
        passes = [*self.passes, item]
        return zg.capture(self.model(), ARGS[self.model], passes=passes, mesh=self.mesh)


@cache
def captured(
    model: Callable[[], nn.Module], passes: tuple[zg.Pass, ...], mesh: tuple[tuple[str, int], ...]
) -> zg.Captured:
    """One capture for all faults that begin with the same graphs."""
    return zg.capture(model(), ARGS[model], passes=passes, mesh=dict(mesh))


FAULTS: dict[str, Fault] = {}


def fault(stage: Stage, rule: str, **options: Any) -> Callable[[Edit], Edit]:
    """Enter the decorated function as a fault that `rule` must reject."""

    def enter(edit: Edit) -> Edit:
        FAULTS[edit.__name__] = Fault(edit, stage, rule, **options)
        return edit

    return enter


def first_wait(graph: zg.Graph) -> Node:
    return graph.gathered(graph.gathers()[0]).wait


def view_of(graph: zg.Graph, parameter: str) -> Node:
    """The view that a graph computes with, of one parameter."""
    name = parameter.replace(".", "_")
    return next(node for node in graph.fx.nodes if node.name == name)


def call_of(graph: zg.Graph, name: str) -> Node:
    """First call of an ATen op."""
    return next(n for n in graph.compute() if str(n.target).startswith(f"aten.{name}."))


def set_argument(node: Node, at: int, value: Any) -> None:
    args = list(node.args)
    args[at] = value
    node.args = tuple(args)


def swap_arguments(one: Node, other: Node, at: int) -> None:
    mine, theirs = one.args[at], other.args[at]
    set_argument(one, at, theirs)
    set_argument(other, at, mine)


def tied_and_split() -> dict[str, Any]:
    """A tied embedding that is gathered anew for its second use."""
    passes = (zg.Partition(), zg.Group.auto(), zg.Reshard(keep_between_uses=False))
    return {"model": tied_tower, "passes": passes}
