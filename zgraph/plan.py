"""Plan: what every rank will hold, gather and reduce, decided before anything is traced.

A plan is frozen and holds no tensors. `describe` makes the first one from a model; each pass
returns a changed copy; `zgraph.layout` turns the last one into offsets in flat buffers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from zgraph.errors import ModelError, nearest


@dataclass(frozen=True)
class Axis:
    """One dimension of the device mesh: its name and its number of ranks."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter, under the first of its names.

    Attributes:
        name: first fully qualified name in registration order.
        aliases: the further names of a tied parameter.
        shape: global shape.
        dtype: dtype in the model as given.
        master_dtype: dtype at rest and in the optimizer.
        param_dtype: dtype in which it is gathered and computed with.
        reduce_dtype: dtype in which its gradient is reduced.
        partitioned: False for parameters that `Partition(ignore=…)` leaves alone.
        persistent: kept whole on every rank.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    master_dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    partitioned: bool = False
    persistent: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ModulePlan:
    """One module: its class names and the parameters registered directly on it.

    Attributes:
        name: fully qualified name, "" for the root.
        classes: qualified names of its class and bases, most derived first.
        parameters: canonical names of its direct parameters.
        is_list: True for ModuleList, Sequential and ModuleDict, which are no units themselves.
    """

    name: str
    classes: tuple[str, ...]
    parameters: tuple[str, ...]
    is_list: bool


@dataclass(frozen=True)
class Unit:
    """Parameters gathered, used and freed together.

    Attributes:
        name: the module's name, or a range such as "layers.0..2".
        parameters: canonical parameter names in registration order.
        modules: names of the modules it stands for; forward inputs are cast at their borders.
    """

    name: str
    parameters: tuple[str, ...]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The whole plan. Two ranks with the same plan have the same `text()`.

    Attributes:
        shard: mesh axis over which flat buffers are split; None in one process without a mesh.
        replicate: mesh axis over which shards are repeated (HSDP), or None.
        cast_inputs: dtype to which units cast their floating-point inputs, or None.
        output_dtype: dtype to which units cast their floating-point outputs, or None.
        reshard_after_forward: backward gathers again (True) or forward's buffer is kept (False).
        keep_between_uses: one buffer from the first to the last use of a unit in a graph (True),
            or one for each run of uses with no other unit between (False).
        prefetch_forward, prefetch_backward: units that a gather starts ahead.
        max_live_bytes: gathered bytes that may be alive at once in a graph; None for no limit.
    """

    device_type: str
    parameters: tuple[ParameterPlan, ...]
    modules: tuple[ModulePlan, ...]
    units: tuple[Unit, ...] = ()
    shard: Axis | None = None
    replicate: Axis | None = None
    cast_inputs: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    keep_between_uses: bool = True
    prefetch_forward: int = 0
    prefetch_backward: int = 0
    max_live_bytes: int | None = None
    passes: tuple[str, ...] = field(default=())

    @property
    def shard_size(self) -> int:
        """Ranks over which a flat buffer is split."""
        return 1 if self.shard is None else self.shard.size

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes in use, outermost first; none in one process without a mesh."""
        return tuple(axis for axis in (self.replicate, self.shard) if axis is not None)

    @property
    def names(self) -> dict[str, ParameterPlan]:
        """Parameters by canonical name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @property
    def canonical(self) -> dict[str, str]:
        """Canonical name of every name, aliases included."""
        return {
            name: parameter.name
            for parameter in self.parameters
            for name in (parameter.name, *parameter.aliases)
        }

    def partitioned(self) -> Iterator[ParameterPlan]:
        """Parameters that zgraph looks after, in registration order."""
        return (parameter for parameter in self.parameters if parameter.partitioned)

    def ignored(self) -> Iterator[ParameterPlan]:
        """Parameters that every rank keeps as they are, in registration order."""
        return (parameter for parameter in self.parameters if not parameter.partitioned)

    def module(self, name: str) -> ModulePlan:
        """The module called `name`. Raises `ModelError` with the nearest names."""
        for module in self.modules:
            if module.name == name:
                return module
        known = [module.name for module in self.modules]
        raise ModelError(f"no module is called {name!r}; {nearest(name, known)}")

    def parameters_under(self, name: str) -> tuple[str, ...]:
        """Canonical names of the partitioned parameters in the module `name` and below it."""
        self.module(name)
        prefix = f"{name}." if name else ""
        owners = [m for m in self.modules if m.name == name or m.name.startswith(prefix)]
        inside = {parameter for module in owners for parameter in module.parameters}
        return tuple(p.name for p in self.partitioned() if p.name in inside)

    def changed(self, **changes: Any) -> "Plan":
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def text(self) -> str:
        """The plan as lines that ranks compare; equal plans give equal text."""
        lines = [f"passes: {' '.join(self.passes)}"]
        for label, axis in (("shard", self.shard), ("replicate", self.replicate)):
            lines.append(f"{label}: {axis or 'none'}")
        lines.append(
            f"reshard_after_forward={self.reshard_after_forward} "
            f"keep_between_uses={self.keep_between_uses} "
            f"prefetch={self.prefetch_forward}/{self.prefetch_backward} "
            f"max_live_bytes={self.max_live_bytes} "
            f"cast_inputs={self.cast_inputs} output_dtype={self.output_dtype}"
        )
        names = self.names
        for unit in self.units:
            lines.append(f"unit {unit.name}: modules {', '.join(unit.modules) or 'none'}")
            lines.extend(f"  {_parameter_line(names[name])}" for name in unit.parameters)
        lines.extend(f"ignored {_parameter_line(parameter)}" for parameter in self.ignored())
        return "\n".join(lines)


def _parameter_line(p: ParameterPlan) -> str:
    traits = [
        word for word, on in (("persistent", p.persistent), ("frozen", not p.requires_grad)) if on
    ]
    tied = f" = {' = '.join(p.aliases)}" if p.aliases else ""
    dtypes = f"{p.master_dtype}/{p.param_dtype}/{p.reduce_dtype}".replace("torch.", "")
    return f"{p.name}{tied} {list(p.shape)} {dtypes} {' '.join(traits)}".rstrip()


def describe(model: nn.Module, device_type: str) -> Plan:
    """The plan of a model before any pass: every parameter whole, no units.

    Tied parameters, one tensor under several names, become one entry with aliases.
    """
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    canonical = {name: names[0] for names in names_of.values() for name in names}
    parameters = tuple(
        ParameterPlan(
            name=names[0],
            aliases=tuple(names[1:]),
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            requires_grad=parameter.requires_grad,
            master_dtype=parameter.dtype,
            param_dtype=parameter.dtype,
            reduce_dtype=parameter.dtype,
        )
        for parameter, names in names_of.items()
    )
    return Plan(device_type, parameters, tuple(_modules(model, canonical)))


def _modules(model: nn.Module, canonical: dict[str, str]) -> Iterator[ModulePlan]:
    lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        own = [canonical[prefix + key] for key, p in module._parameters.items() if p is not None]
        classes = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__)
        yield ModulePlan(name, classes, tuple(own), isinstance(module, lists))


def units_covering(plan: Plan, claimed: Sequence[Unit]) -> tuple[Unit, ...]:
    """`claimed` plus units for what no pass claimed, all in registration order.

    The rest is cut into runs between claimed parameters, so what lies before the blocks and what
    lies after them are two units, and neither has to live as long as both.
    """
    unit_of = {name: unit for unit in claimed for name in unit.parameters}
    units: list[Unit] = []
    run: list[str] = []
    for parameter in plan.partitioned():
        unit = unit_of.get(parameter.name)
        if unit is None:
            run.append(parameter.name)
            continue
        if run:
            units.append(_rest_unit(plan, run))
            run = []
        if unit not in units:
            units.append(unit)
    if run:
        units.append(_rest_unit(plan, run))
    return tuple(_distinctly_named(units))


def _distinctly_named(units: Sequence[Unit]) -> Iterator[Unit]:
    """Two runs between the parameters of one module bear its name: the second becomes "name#2"."""
    taken: set[str] = set()
    for unit in units:
        name, count = unit.name, 1
        while name in taken:
            count += 1
            name = f"{unit.name}#{count}"
        taken.add(name)
        yield replace(unit, name=name)


def _rest_unit(plan: Plan, names: Sequence[str]) -> Unit:
    # Named by the modules that own the first and the last of them; a tied name counts once.
    first, last = (name.rpartition(".")[0] or name for name in (names[0], names[-1]))
    return Unit(first if first == last else f"{first}..{last}", tuple(names))
