"""Group: which parameters are gathered, used and freed together.

A group pass claims parameters for units; several may follow each other if they claim different
parameters. What nobody claims is cut into runs between the claimed (`plan.units_covering`), when
the plan is finished. Without any group pass, `Group.auto()` is used.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from zgraph.errors import PassError, nearest
from zgraph.passes.base import Pass
from zgraph.plan import ModulePlan, Plan, Unit


class Group:
    """Ways to form units. Each returns a pass; none changes a number in training."""

    @staticmethod
    def by_class(*classes: type[nn.Module] | str) -> "GroupByClass":
        """Each module of one of these classes is a unit (FSDP's transformer wrap).

        A parameter belongs to the innermost such module around it. A class is given as itself or
        by its name. Raises `PassError` if one matches no module with parameters.
        """
        return GroupByClass(tuple(classes))

    @staticmethod
    def by_name(groups: Iterable[Iterable[str] | str]) -> "GroupByName":
        """Each inner list of module or parameter names is a unit; no common parent is needed.

        Raises `PassError` if a name matches nothing, or is claimed twice.
        """
        return GroupByName(tuple((g,) if isinstance(g, str) else tuple(g) for g in groups))

    @staticmethod
    def by_numel(min_numel: int) -> "GroupByNumel":
        """A module is a unit once its unclaimed parameters reach `min_numel` elements.

        Bottom-up, as FSDP's size-based wrap: children first, then what they left. Lists of modules
        are never units. Raises `PassError` unless `min_numel` is a positive integer.
        """
        return GroupByNumel(min_numel)

    @staticmethod
    def by_policy(policy: Callable[[ModulePlan], bool]) -> "GroupByPolicy":
        """Each module for which `policy` is true is a unit, as by FSDP's `CustomPolicy`.

        A parameter belongs to the innermost such module around it. The policy sees the module as
        the plan describes it: `name`, `classes`, `parameters`, `is_list`. It must answer alike on
        every rank, and be a function with a name or a lambda: that is how the pass is printed.
        Raises `PassError` if it is true for no module with parameters, or is no function.
        """
        return GroupByPolicy(policy)

    @staticmethod
    def whole() -> "GroupWhole":
        """All parameters are one unit."""
        return GroupWhole()

    @staticmethod
    def auto() -> "GroupAuto":
        """The children of the model's repeated block lists are units.

        A block list is a ModuleList or Sequential with at least two children of one class that
        have parameters; lists inside a block do not count. A model without one is one unit.
        """
        return GroupAuto()


@dataclass(frozen=True)
class _GroupPass(Pass, ABC):
    requires: ClassVar[frozenset[str]] = frozenset({"gathers"})
    provides: ClassVar[frozenset[str]] = frozenset({"units"})

    def plan(self, plan: Plan) -> Plan:
        owner = {name: unit for unit in plan.units for name in unit.parameters}
        claimed: list[Unit] = []
        for unit in self.units(plan):
            for name in unit.parameters:
                if name in owner:
                    raise PassError(
                        f"{self}: {name} would be in unit {unit.name}, but is in unit "
                        f"{owner[name].name} already; let each parameter be in one group"
                    )
                owner[name] = unit
            claimed.append(unit)
        return plan.changed(units=plan.units + tuple(claimed))

    @abstractmethod
    def units(self, plan: Plan) -> list[Unit]:
        """The units that this pass forms."""


@dataclass(frozen=True)
class GroupByClass(_GroupPass):
    """See `Group.by_class`."""

    name: ClassVar[str] = "group_by_class"
    classes: tuple[type[nn.Module] | str, ...] = ()

    def __post_init__(self) -> None:
        if not self.classes:
            raise PassError("Group.by_class() names no class; give at least one")
        for cls in self.classes:
            if not (isinstance(cls, str) or (isinstance(cls, type) and issubclass(cls, nn.Module))):
                raise PassError(f"Group.by_class({cls!r}): expected an nn.Module class or its name")

    def units(self, plan: Plan) -> list[Unit]:
        chosen: dict[str, ModulePlan] = {}
        for cls in self.classes:
            wanted = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
            found = [m for m in plan.modules if _is_a(m, wanted)]
            if not any(plan.parameters_under(m.name) for m in found):
                known = [m.classes[0].rsplit(".", 1)[-1] for m in plan.modules]
                short = wanted.rsplit(".", 1)[-1]
                raise PassError(
                    f"Group.by_class({short}) matches no module with parameters; "
                    f"{nearest(short, known)}"
                )
            chosen.update({m.name: m for m in found})
        return _innermost_units(plan, list(chosen))


@dataclass(frozen=True)
class GroupByName(_GroupPass):
    """See `Group.by_name`."""

    name: ClassVar[str] = "group_by_name"
    groups: tuple[tuple[str, ...], ...] = ()

    def units(self, plan: Plan) -> list[Unit]:
        return [self._unit(plan, names) for names in self.groups]

    def _unit(self, plan: Plan, names: Sequence[str]) -> Unit:
        modules = {m.name for m in plan.modules}
        inside: set[str] = set()
        for name in names:
            if name in modules:
                found = set(plan.parameters_under(name))
            elif name in plan.canonical and plan.names[plan.canonical[name]].partitioned:
                found = {plan.canonical[name]}
            else:
                found = set()
            if not found:
                known = [*modules, *plan.canonical]
                raise PassError(
                    f"{self}: {name!r} is no module or parameter to group; {nearest(name, known)}"
                )
            if found & inside:
                raise PassError(f"{self}: {min(found & inside)} is named twice in one group")
            inside |= found
        members = tuple(p.name for p in plan.partitioned() if p.name in inside)
        return Unit(range_name(names) or "model", members, tuple(n for n in names if n in modules))


@dataclass(frozen=True)
class GroupByNumel(_GroupPass):
    """See `Group.by_numel`."""

    name: ClassVar[str] = "group_by_numel"
    min_numel: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.min_numel, int) or self.min_numel <= 0:
            raise PassError(f"Group.by_numel({self.min_numel!r}): expected a positive integer")

    def units(self, plan: Plan) -> list[Unit]:
        left = {p.name: p.numel for p in plan.partitioned()}
        units: list[Unit] = []
        # Deepest first: a module comes after everything inside it.
        for module in sorted(plan.modules, key=lambda m: -_depth(m.name)):
            inside = [name for name in plan.parameters_under(module.name) if name in left]
            if module.is_list or sum(left[name] for name in inside) < self.min_numel:
                continue
            units.append(Unit(module.name or "model", tuple(inside), (module.name,)))
            for name in inside:
                del left[name]
        if not units:
            total = sum(left.values())
            raise PassError(f"{self} forms no unit: the model has {total:,} parameters in all")
        return units


@dataclass(frozen=True)
class GroupByPolicy(_GroupPass):
    """See `Group.by_policy`."""

    name: ClassVar[str] = "group_by_policy"
    policy: Callable[[ModulePlan], bool]

    def __post_init__(self) -> None:
        if not callable(self.policy):
            raise PassError(
                f"Group.by_policy({self.policy!r}): expected a function of a ModulePlan, such as "
                'lambda module: module.name.endswith("mlp")'
            )

    def __str__(self) -> str:
        function = getattr(self.policy, "__qualname__", type(self.policy).__qualname__)
        return f"{self.name}{{policy={function}}}"

    def units(self, plan: Plan) -> list[Unit]:
        found = _innermost_units(plan, [m.name for m in plan.modules if self.policy(m)])
        if not found:
            raise PassError(f"{self} is true for no module with parameters")
        return found


@dataclass(frozen=True)
class GroupWhole(_GroupPass):
    """See `Group.whole`."""

    name: ClassVar[str] = "group_whole"

    def units(self, plan: Plan) -> list[Unit]:
        return [Unit("model", tuple(p.name for p in plan.partitioned()))]


@dataclass(frozen=True)
class GroupAuto(_GroupPass):
    """See `Group.auto`."""

    name: ClassVar[str] = "group_auto"

    def units(self, plan: Plan) -> list[Unit]:
        blocks: list[str] = []
        for module in plan.modules:
            inside_block = any(module.name.startswith(f"{block}.") for block in blocks)
            if module.is_list and not inside_block:
                children = _children(plan, module.name)
                if len(children) >= 2 and len({child.classes[0] for child in children}) == 1:
                    blocks.extend(child.name for child in children)
        return _innermost_units(plan, blocks) if blocks else GroupWhole().units(plan)


def range_name(names: Sequence[str]) -> str:
    """A short name for a group: "layers.0..2" for consecutive numbers, else joined by "+"."""
    parts = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    if len(names) > 1 and all(parts):
        stems = {part[1] for part in parts if part}
        numbers = [int(part[2]) for part in parts if part]
        if len(stems) == 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{names[0]}..{numbers[-1]}"
    return "+".join(names)


def _is_a(module: ModulePlan, wanted: str) -> bool:
    return any(name == wanted or name.endswith(f".{wanted}") for name in module.classes)


def _children(plan: Plan, name: str) -> list[ModulePlan]:
    prefix = f"{name}." if name else ""
    return [
        m
        for m in plan.modules
        if m.name != name
        and m.name.startswith(prefix)
        and "." not in m.name[len(prefix) :]
        and plan.parameters_under(m.name)
    ]


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _innermost_units(plan: Plan, modules: Sequence[str]) -> list[Unit]:
    """One unit a module; each parameter goes to the deepest of the modules around it."""
    left = {p.name for p in plan.partitioned()}
    members: dict[str, tuple[str, ...]] = {}
    for module in sorted(modules, key=_depth, reverse=True):
        inside = tuple(name for name in plan.parameters_under(module) if name in left)
        members[module] = inside
        left -= set(inside)
    return [Unit(m or "model", members[m], (m,)) for m in modules if members[m]]
