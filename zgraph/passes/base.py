"""Pass: one protocol for shipped passes and yours; Pipeline: a checked list of them.

How to write one: zgraph/passes/README.md.

A pass is a frozen value with up to three hooks. `plan` runs before anything is traced and returns a
changed plan. `joint` edits the graph that holds forward and backward. `schedule` edits the forward
and the backward graph after the partition, one at a time, and moves nodes only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch

from zgraph.errors import PassError
from zgraph.ir.graph import Graph
from zgraph.plan import Plan

Hook = Literal["joint", "schedule"]


@dataclass(frozen=True)
class Pass:
    """Base of every pass.

    Class attributes, the contract that is checked before the model is touched:
        requires: words that earlier passes must provide.
        provides: words that later passes may require.
        conflicts: words that no earlier pass may have provided.
        changes_compute: True for a pass whose `joint` changes what is computed, and not only how
            parameters and gradients travel; the verifier then lets it.
    """

    name: ClassVar[str] = "pass"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()
    changes_compute: ClassVar[bool] = False

    def plan(self, plan: Plan) -> Plan:
        """Return the changed plan. Must not depend on the rank."""
        return plan

    def joint(self, graph: Graph, plan: Plan) -> None:
        """Edit the joint graph in place."""

    def schedule(self, graph: Graph, plan: Plan) -> None:
        """Move nodes of a forward, backward or inference graph."""

    def has(self, hook: Hook) -> bool:
        """Whether this pass does anything at a hook."""
        return getattr(type(self), hook) is not getattr(Pass, hook)

    def __str__(self) -> str:
        options = [
            f"{item.name}={_shown(getattr(self, item.name))}"
            for item in fields(self)
            if item.repr and getattr(self, item.name) != item.default
        ]
        return f"{self.name}{{{','.join(options)}}}" if options else self.name


def _shown(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return f"[{' '.join(map(_shown, value))}]"
    return getattr(value, "__qualname__", str(value))


@dataclass(frozen=True)
class GraphPass(Pass):
    """A pass made from a function by `graph_pass`."""

    function: Callable[[Graph, Plan], None] = lambda graph, plan: None
    stage: Hook = "schedule"

    def joint(self, graph: Graph, plan: Plan) -> None:
        self.function(graph, plan)

    def schedule(self, graph: Graph, plan: Plan) -> None:
        self.function(graph, plan)

    def has(self, hook: Hook) -> bool:
        return hook == self.stage

    def __str__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}@{self.stage}"


@dataclass(frozen=True)
class ComputingGraphPass(GraphPass):
    """A pass made from a function that changes what is computed."""

    changes_compute: ClassVar[bool] = True


def graph_pass(
    *, stage: Hook, changes_compute: bool = False
) -> Callable[[Callable[[Graph, Plan], None]], GraphPass]:
    """Turn `function(graph, plan)` into a pass that runs at `stage`.

    Args:
        stage: "joint", or "schedule" for the forward and the backward graph, one at a time.
        changes_compute: for a joint pass that changes what is computed; the verifier then lets it.

    Raises:
        PassError: `stage` is neither, or a schedule pass would change what is computed.
    """
    if stage not in ("joint", "schedule"):
        raise PassError(f'graph_pass(stage={stage!r}): expected "joint" or "schedule"')
    if changes_compute and stage == "schedule":
        raise PassError(
            'graph_pass(stage="schedule", changes_compute=True): a schedule pass moves nodes only; '
            'change what is computed at stage="joint", where forward and backward are one graph'
        )
    make = ComputingGraphPass if changes_compute else GraphPass
    return lambda function: make(function=function, stage=stage)


class Pipeline:
    """A pass list whose contracts hold.

    Raises:
        PassError: an entry is no pass; one requires what no earlier pass provides, or conflicts
            with an earlier one. The message says which pass to add or move.
    """

    def __init__(self, passes: Sequence[Pass]) -> None:
        for item in passes:
            if not isinstance(item, Pass):
                raise PassError(
                    f"passes holds {item!r}, a {type(item).__name__}; expected passes such as "
                    "zg.Partition() or functions decorated with @zg.graph_pass(stage=…)"
                )
        _check_contracts(passes)
        self.passes = tuple(passes)

    def plan(self, plan: Plan) -> Plan:
        """Run every plan hook."""
        for item in self.passes:
            plan = item.plan(plan)
        return plan.changed(passes=tuple(map(str, self.passes)))


def _check_contracts(passes: Sequence[Pass]) -> None:
    provided: dict[str, Pass] = {}
    for index, item in enumerate(passes):
        for word in sorted(item.conflicts & provided.keys()):
            raise PassError(
                f"{item} comes after {provided[word]}, and only one of them can decide about "
                f"{word}: keep one"
            )
        for word in sorted(item.requires - provided.keys()):
            later = next((p for p in passes[index + 1 :] if word in p.provides), None)
            provider = _PROVIDERS.get(word, f"a pass that provides {word}")
            cure = f"move {later} before it" if later else f"add {provider} before it"
            raise PassError(f"{item} requires {word}; no earlier pass provides them: {cure}")
        provided.update(dict.fromkeys(item.provides, item))


# What to add for each word that shipped passes provide.
_PROVIDERS = {
    "gathers": "zg.Partition()",
    "units": "zg.Group.auto()",
    "persistence": "zg.Persist()",
    "precision": "zg.MixedPrecision()",
    "reshard": "zg.Reshard()",
    "prefetch": "zg.Prefetch()",
}
