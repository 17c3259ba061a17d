"""From a plan to flat buffers: which parameter lies where.

Note [Flat layout]
A unit's parameters are flattened in registration order into one buffer. Each starts at a multiple
of 16 bytes in the narrowest dtype the buffer ever has, so that views of it can be read in 16-byte
words. The total is padded so that every rank of the shard axis owns an equal, aligned slice: rank r
owns elements [r * shard_numel, (r + 1) * shard_numel). The all-gather of the slices is therefore
the concatenation of the parameters, and each parameter is a contiguous view of it: nothing is
copied out. Padding is zero and stays zero.

Parameters of one unit share a buffer only if they agree in dtypes, in whether they are trained and
in whether they are persistent; a unit that mixes these has several buffers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zgraph.plan import ParameterPlan, Plan, Unit

ALIGN_BYTES = 16


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its buffer: `offset` and `numel` in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int


def held(offset: int, numel: int, rank: int, shard_numel: int) -> tuple[int, int]:
    """What `rank` holds of a parameter at `offset`: (start in the parameter, length), in elements.

    (0, 0) if it holds nothing. See Note [Flat layout].
    """
    start = max(offset, rank * shard_numel)
    stop = min(offset + numel, (rank + 1) * shard_numel)
    return (start - offset, stop - start) if start < stop else (0, 0)


@dataclass(frozen=True)
class Buffer:
    """One flat buffer of a unit. See Note [Flat layout].

    Attributes:
        name: the unit's name, with ":frozen", ":persistent" or dtypes where a unit has several.
        numel: elements of the whole padded buffer.
        shard_numel: elements that one rank keeps; equals `numel` for persistent buffers.
    """

    name: str
    unit: str
    slots: tuple[Slot, ...]
    numel: int
    shard_numel: int
    requires_grad: bool
    persistent: bool
    master_dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def shard_bytes(self) -> int:
        """Bytes that one rank keeps in the master dtype."""
        return self.shard_numel * self.master_dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered buffer in the compute dtype; 0 for persistent buffers."""
        return 0 if self.persistent else self.numel * self.param_dtype.itemsize

    def piece(self, slot: Slot, rank: int) -> tuple[int, int, int]:
        """The part of `slot` on shard rank `rank`: (start in the shard, start in the parameter,
        number of elements), all in elements; the number may be 0."""
        owner = 0 if self.persistent else rank
        start, length = held(slot.offset, slot.numel, owner, self.shard_numel)
        return (slot.offset + start - owner * self.shard_numel if length else 0), start, length


@dataclass(frozen=True)
class UnitSize:
    """One unit: its elements, and the bytes of it that a rank keeps and that it gathers."""

    numel: int
    shard_bytes: int
    gathered_bytes: int


@dataclass(frozen=True)
class Layout:
    """All buffers of a model, in the order of its units."""

    buffers: tuple[Buffer, ...]

    def unit(self, name: str) -> list[Buffer]:
        """The buffers of one unit."""
        return [buffer for buffer in self.buffers if buffer.unit == name]

    def size(self, unit: str) -> UnitSize:
        """The size of one unit."""
        buffers = self.unit(unit)
        return UnitSize(
            numel=sum(slot.numel for buffer in buffers for slot in buffer.slots),
            shard_bytes=sum(buffer.shard_bytes for buffer in buffers),
            gathered_bytes=sum(buffer.gathered_bytes for buffer in buffers),
        )

    def slots(self) -> Iterator[tuple[Buffer, Slot]]:
        """Every buffer with each of its slots."""
        return ((buffer, slot) for buffer in self.buffers for slot in buffer.slots)


def lay_out(plan: Plan) -> Layout:
    """Offsets for every partitioned parameter of `plan`."""
    names = plan.names
    buffers: list[Buffer] = []
    for unit in plan.units:
        kinds: dict[tuple[object, ...], list[ParameterPlan]] = {}
        for name in unit.parameters:
            parameter = names[name]
            kinds.setdefault(_kind(parameter), []).append(parameter)
        taken: set[str] = set()
        for members in kinds.values():
            name = _buffer_name(unit, members[0], taken)
            taken.add(name)
            buffers.append(_buffer(name, unit, members, plan.shard_size))
    return Layout(tuple(buffers))


def _kind(p: ParameterPlan) -> tuple[object, ...]:
    return p.persistent, p.requires_grad, p.master_dtype, p.param_dtype, p.reduce_dtype


def _buffer_name(unit: Unit, p: ParameterPlan, taken: set[str]) -> str:
    name = unit.name
    if p.persistent:
        name += ":persistent"
    if not p.requires_grad:
        name += ":frozen"
    if name in taken:
        name += f":{p.master_dtype}:{p.param_dtype}:{p.reduce_dtype}".replace("torch.", "")
    return name


def _buffer(name: str, unit: Unit, members: list[ParameterPlan], shard_size: int) -> Buffer:
    p = members[0]
    narrowest = min(p.master_dtype.itemsize, p.param_dtype.itemsize, p.reduce_dtype.itemsize)
    align = ALIGN_BYTES // narrowest
    slots: list[Slot] = []
    end = 0
    for member in members:
        slots.append(Slot(member.name, member.shape, end, member.numel))
        end += -(-member.numel // align) * align
    ranks = 1 if p.persistent else shard_size
    shard_numel = -(-end // (ranks * align)) * align
    return Buffer(
        name=name,
        unit=unit.name,
        slots=tuple(slots),
        numel=shard_numel * ranks,
        shard_numel=shard_numel,
        requires_grad=p.requires_grad,
        persistent=p.persistent,
        master_dtype=p.master_dtype,
        param_dtype=p.param_dtype,
        reduce_dtype=p.reduce_dtype,
    )
