"""Persist: small parameters stay whole on every rank."""

from dataclasses import dataclass, replace
from typing import ClassVar

from zgraph.errors import PassError
from zgraph.passes.base import Pass
from zgraph.plan import Plan


@dataclass(frozen=True)
class Persist(Pass):
    """Keep parameters of at most `max_numel` elements whole on every rank.

    They are never gathered: the graph reads them in place, and their gradients, one buffer a unit,
    are all-reduced. Optimizer states are whole too. (ZeRO-3's persistence threshold differs: it
    keeps such parameters sharded at rest and gathers them after each step.)

    Args:
        max_numel: elements of the largest parameter that persists.
        max_total: elements that persist in all, filled in registration order; None for no limit.

    Raises:
        PassError: a limit is not a non-negative integer.
    """

    name: ClassVar[str] = "persist"
    requires: ClassVar[frozenset[str]] = frozenset({"gathers"})
    provides: ClassVar[frozenset[str]] = frozenset({"persistence"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"persistence"})

    max_numel: int = 0
    max_total: int | None = None

    def __post_init__(self) -> None:
        for label, value in (("max_numel", self.max_numel), ("max_total", self.max_total)):
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if not (whole or (label == "max_total" and value is None)):
                raise PassError(
                    f"Persist({label}={value!r}): expected a number of elements, 0 or more"
                )

    def plan(self, plan: Plan) -> Plan:
        total = 0
        parameters = []
        for p in plan.parameters:
            fits = self.max_total is None or total + p.numel <= self.max_total
            persists = p.partitioned and p.numel <= self.max_numel and fits
            total += p.numel if persists else 0
            parameters.append(replace(p, persistent=persists))
        return plan.changed(parameters=tuple(parameters))
