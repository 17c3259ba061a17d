"""Note [Flat layout], as properties of every plan."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zgraph.layout import Buffer, Layout, lay_out
from zgraph.plan import Axis, ParameterPlan, Plan, Unit

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PROPERTY = settings(derandomize=True, max_examples=60, deadline=None)


@st.composite
def parameter_plans(draw: st.DrawFn) -> ParameterPlan:
    """A parameter of up to three dimensions, some of them empty or of one element."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    if draw(st.integers(0, 4)) == 0:
        dtypes = (draw(st.sampled_from([torch.int64, torch.uint8])),) * 3
        trained = False
    else:
        dtypes = tuple(draw(st.sampled_from(FLOATS)) for _ in range(3))
        trained = draw(st.booleans())
    persistent = draw(st.integers(0, 3)) == 0
    return ParameterPlan("", (), shape, dtypes[0], trained, *dtypes, True, persistent)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """One to three units over one to five ranks."""
    drawn = draw(st.lists(parameter_plans(), min_size=1, max_size=9))
    named = [ParameterPlan(**{**vars(p), "name": f"p{index}"}) for index, p in enumerate(drawn)]
    unit_of = [draw(st.integers(0, 2)) for _ in named]
    units = tuple(
        Unit(f"u{u}", tuple(p.name for p, at in zip(named, unit_of, strict=True) if at == u))
        for u in range(3)
        if u in unit_of
    )
    return Plan("cpu", tuple(named), (), units, shard=Axis("shard", draw(st.integers(1, 5))))


def ranks(plan: Plan, buffer: Buffer) -> int:
    return 1 if buffer.persistent else plan.shard_size


def narrowest(buffer: Buffer) -> int:
    dtypes = (buffer.master_dtype, buffer.param_dtype, buffer.reduce_dtype)
    return min(torch.empty(0, dtype=dtype).element_size() for dtype in dtypes)


def buffers(plan: Plan) -> tuple[Buffer, ...]:
    return lay_out(plan).buffers


@PROPERTY
@given(plans())
def test_the_pieces_of_all_ranks_tile_every_parameter(plan: Plan) -> None:
    for buffer, slot in lay_out(plan).slots():
        covered: list[int] = []
        for rank in range(ranks(plan, buffer)):
            _, start, length = buffer.piece(slot, rank)
            covered += range(start, start + length)
        assert covered == list(range(torch.Size(slot.shape).numel()))


@PROPERTY
@given(plans())
def test_the_gathered_slices_are_the_parameters_one_after_another(plan: Plan) -> None:
    for buffer in buffers(plan):
        values = {
            s.name: torch.arange(s.numel) + 1000 * (i + 1) for i, s in enumerate(buffer.slots)
        }
        slices = []
        for rank in range(ranks(plan, buffer)):
            own = torch.full((buffer.shard_numel,), -1)
            for slot in buffer.slots:
                at, start, length = buffer.piece(slot, rank)
                assert (own[at : at + length] == -1).all()  # nobody else's place
                own[at : at + length] = values[slot.name][start : start + length]
            slices.append(own)
        gathered = torch.cat(slices)
        assert gathered.numel() == buffer.numel
        for slot in buffer.slots:
            assert gathered[slot.offset : slot.offset + slot.numel].equal(values[slot.name])
        padding = buffer.numel - sum(slot.numel for slot in buffer.slots)
        assert int((gathered == -1).sum()) == padding


@PROPERTY
@given(plans())
def test_parameters_and_slices_start_at_multiples_of_16_bytes(plan: Plan) -> None:
    for buffer in buffers(plan):
        assert buffer.shard_numel * narrowest(buffer) % 16 == 0
        for slot in buffer.slots:
            assert slot.offset * narrowest(buffer) % 16 == 0


@PROPERTY
@given(plans())
def test_every_rank_owns_a_slice_of_one_size(plan: Plan) -> None:
    for buffer in buffers(plan):
        assert buffer.shard_numel * ranks(plan, buffer) == buffer.numel


@PROPERTY
@given(plans())
def test_padding_is_less_than_one_alignment_for_each_parameter_and_rank(plan: Plan) -> None:
    for buffer in buffers(plan):
        align = 16 // narrowest(buffer)
        padding = buffer.numel - sum(slot.numel for slot in buffer.slots)
        assert padding < align * (len(buffer.slots) + ranks(plan, buffer))


@PROPERTY
@given(plans())
def test_a_buffer_holds_one_kind_of_one_unit_in_registration_order(plan: Plan) -> None:
    units = {name: unit.name for unit in plan.units for name in unit.parameters}
    order = [p.name for p in plan.parameters]
    for buffer in buffers(plan):
        for slot in buffer.slots:
            parameter = plan.names[slot.name]
            assert units[slot.name] == buffer.unit
            assert parameter.shape == slot.shape
            for trait in ("requires_grad", "persistent", *DTYPES):
                assert getattr(parameter, trait) == getattr(buffer, trait)
        names = [slot.name for slot in buffer.slots]
        assert names == sorted(names, key=order.index)
        assert all(a.offset + a.numel <= b.offset for a, b in pairwise(buffer.slots))


DTYPES = ("master_dtype", "param_dtype", "reduce_dtype")


@PROPERTY
@given(plans())
def test_every_parameter_has_one_place_and_every_buffer_its_own_name(plan: Plan) -> None:
    layout = lay_out(plan)
    placed = [slot.name for _, slot in layout.slots()]
    assert sorted(placed) == sorted(p.name for p in plan.parameters)
    assert len({buffer.name for buffer in layout.buffers}) == len(layout.buffers)
    kinds = {(b.unit, b.persistent, b.requires_grad, *_dtypes(b)) for b in layout.buffers}
    assert len(kinds) == len(layout.buffers)  # as few buffers as kinds


def _dtypes(buffer: Buffer) -> tuple[torch.dtype, ...]:
    return tuple(getattr(buffer, name) for name in DTYPES)


def one_unit(*parameters: ParameterPlan, ranks: int = 2) -> Layout:
    unit = Unit("unit", tuple(p.name for p in parameters))
    return lay_out(Plan("cpu", parameters, (), (unit,), shard=Axis("shard", ranks)))


def fp32(name: str, numel: int, trained: bool = True, persistent: bool = False) -> ParameterPlan:
    dtype = torch.float32
    return ParameterPlan(name, (), (numel,), dtype, trained, *(dtype,) * 3, True, persistent)


def test_frozen_persistent_and_other_dtypes_lie_in_buffers_of_their_own() -> None:
    low = ParameterPlan("low", (), (4,), torch.float16, True, *(torch.float16,) * 3, True, False)
    layout = one_unit(
        fp32("a", 5), fp32("b", 3, trained=False), fp32("c", 2, persistent=True), low, fp32("d", 1)
    )
    names = {b.name: tuple(s.name for s in b.slots) for b in layout.buffers}
    assert names == {
        "unit": ("a", "d"),
        "unit:frozen": ("b",),
        "unit:persistent": ("c",),
        "unit:float16:float16:float16": ("low",),
    }


def test_bytes_are_those_of_the_dtype_at_rest_and_of_the_dtype_in_compute() -> None:
    p = ParameterPlan(
        "p", (), (10,), torch.float32, True, torch.float32, torch.bfloat16, torch.float32, True
    )
    (buffer,) = one_unit(p).buffers  # padded to 2 slices of 8 bf16 elements, 16 bytes each
    assert (buffer.shard_bytes, buffer.gathered_bytes) == (8 * 4, 16 * 2)
    (whole,) = one_unit(fp32("q", 10, persistent=True)).buffers
    assert (whole.shard_bytes, whole.gathered_bytes) == (12 * 4, 0)
