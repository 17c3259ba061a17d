"""Where gathers and scatters stand in the program, and how many gathered bytes that keeps alive."""

import re

import pytest
import torch
from torch.testing import FileCheck

import zgraph as zg
from tests.capture.steps import Captured, captured, compiled, small_tower, tied_tower, tower
from tests.passes.toys import Block
from tests.support.pool import run_ranks
from zgraph.frames import GraphRecord

BY_CLASS = zg.Group.by_class(Block)
BLOCK_BYTES = 4 * sum(p.numel() for p in Block(8).parameters())


def outline(record: GraphRecord) -> str:
    """The program's collectives and matrix products, a line each: "gather layers.0"."""
    patterns = {
        r" = (gather)\(.* # all-gather ([^,]+),": r"\1 \2",
        r" = (scatter)\(.* # reduce-scatter ([^,]+),": r"\1 \2",
        r" = (wait)\((\w+)\)": r"\1 \2",
        r" = aten\.((?:add)?mm|embedding|native_layer_norm)\(": r"\1",
    }
    lines = []
    for line in record.text.splitlines():
        for pattern, shown in patterns.items():
            found = re.search(pattern, line)
            if found:
                lines.append(found.expand(shown))
    return "\n".join(lines)


def unit_bytes(step: Captured) -> dict[str, int]:
    return {row.name: row.gathered_bytes for row in step.report.units()}


def most_bytes(step: Captured, units: int) -> int:
    """Bytes of the largest `units` units."""
    return sum(sorted(unit_bytes(step).values(), reverse=True)[:units])


# ---------------------------------------------------------------------- order


def test_without_prefetch_each_gather_stands_directly_before_its_first_use() -> None:
    program = outline(captured(small_tower, BY_CLASS, zg.Prefetch(0)).forward)
    expected = ["gather embed", "wait gather_embed", "embedding"]
    for block in (0, 1):
        expected += [f"gather layers.{block}", f"wait gather_layers_{block}", "addmm", "addmm"]
    expected += ["gather norm..head", "wait gather_norm_head", "native_layer_norm", "mm"]
    assert program.splitlines() == expected


def test_no_prefetch_pass_and_prefetch_of_none_give_one_program() -> None:
    without, none = captured(tower, BY_CLASS), captured(tower, BY_CLASS, zg.Prefetch(0))
    assert without.forward.text == none.forward.text
    assert without.backward.text == none.backward.text


def test_prefetch_moves_the_second_gather_up() -> None:
    plain = outline(captured(small_tower, BY_CLASS, zg.Prefetch(0)).forward)
    ahead = outline(captured(small_tower, BY_CLASS, zg.Prefetch(1)).forward)
    FileCheck().check("gather layers.0").check_count("addmm", 2).check("gather layers.1").run(plain)
    FileCheck().check("wait gather_layers_0").check_next("gather layers.1").check("addmm").run(
        ahead
    )
    # Not further than the last use of the unit before: two units are alive, not three.
    third = FileCheck().check("gather layers.1").check_count("addmm", 2)
    third.check("gather norm..head").run(ahead)


def test_prefetch_moves_gathers_up_in_backward_too() -> None:
    plain = outline(captured(small_tower, BY_CLASS, zg.Prefetch(0)).backward)
    ahead = outline(captured(small_tower, BY_CLASS, zg.Prefetch(1)).backward)
    FileCheck().check("gather norm..head").check("mm").check("gather layers.1").run(plain)
    FileCheck().check("gather norm..head").check("gather layers.1").check("mm").run(ahead)


def test_forward_and_backward_may_be_prefetched_differently() -> None:
    mixed = captured(tower, BY_CLASS, zg.Prefetch(1, backward_units=0))
    assert mixed.forward.text == captured(tower, BY_CLASS, zg.Prefetch(1)).forward.text
    assert mixed.backward.text == captured(tower, BY_CLASS, zg.Prefetch(0)).backward.text


@pytest.mark.parametrize("units", [1, 2, 9])
def test_prefetch_keeps_the_order_and_number_of_collectives(units: int) -> None:
    plain, ahead = captured(tower, BY_CLASS), captured(tower, BY_CLASS, zg.Prefetch(units))
    for stage in ("forward", "backward"):
        one, other = getattr(plain, stage), getattr(ahead, stage)
        assert (one.gathers, one.scatters) == (other.gathers, other.scatters)


@pytest.mark.parametrize("units", [0, 1, 2])
def test_prefetch_changes_no_computation_nor_its_order(units: int) -> None:
    def compute(record: GraphRecord) -> list[str]:
        return [line for line in outline(record).splitlines() if " " not in line]

    plain, ahead = captured(tower, BY_CLASS), captured(tower, BY_CLASS, zg.Prefetch(units))
    assert compute(plain.forward) == compute(ahead.forward)
    assert compute(plain.backward) == compute(ahead.backward)


def test_a_scatter_follows_its_last_gradient_and_is_waited_for_at_the_next() -> None:
    program = outline(captured(small_tower, BY_CLASS).backward)
    check = FileCheck().check("scatter norm..head")
    check.check("gather layers.1").check("wait scatter_norm_head").check_next("scatter layers.1")
    check.check("wait scatter_layers_1").check_next("scatter layers.0")
    check.check("wait scatter_layers_0").check_next("scatter embed")
    check.check_next("wait scatter_embed").run(program)


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("units", [0, 1, 2])
def test_at_most_one_unit_more_than_prefetched_is_alive(units: int, stage: str) -> None:
    step = captured(tower, BY_CLASS, zg.Prefetch(units))
    assert unit_bytes(step)["layers.0"] == BLOCK_BYTES
    peak = getattr(step, stage).peak_gathered_bytes
    assert peak <= most_bytes(step, 1 + units) == (1 + units) * BLOCK_BYTES
    assert peak >= units * BLOCK_BYTES  # prefetching did happen


@pytest.mark.parametrize("units", [0, 1])
def test_units_of_several_blocks_are_bounded_alike(units: int) -> None:
    groups = zg.Group.by_name([["layers.0", "layers.1"], ["layers.2", "layers.3"]])
    step = captured(tower, groups, zg.Prefetch(units))
    for record in (step.forward, step.backward):
        assert record.peak_gathered_bytes <= most_bytes(step, 1 + units)


def infer(units: int) -> GraphRecord:
    """On a rank: the graph of a call without gradients."""
    model = compiled(tower, (zg.Partition(), BY_CLASS, zg.Prefetch(units)))
    with torch.no_grad():
        model(torch.arange(8).view(2, 4))
    (record,) = zg.inspect(model).graphs("inference")
    return record


@pytest.mark.parametrize("units", [0, 1])
def test_without_gradients_the_same_bound_holds_and_nothing_is_scattered(units: int) -> None:
    record = run_ranks(infer, 2, units)[0]
    assert record.gathers == captured(tower, BY_CLASS).forward.gathers
    assert record.scatters == record.reduces == ()
    assert record.peak_gathered_bytes == (1 + units) * BLOCK_BYTES


def test_without_reshard_the_whole_model_is_alive_at_the_end_of_forward() -> None:
    step = captured(tower, BY_CLASS, zg.Reshard(False))
    # Backward does not read the embedding: it is freed all the same.
    needed = sum(unit_bytes(step).values()) - unit_bytes(step)["embed"]
    last = step.forward.text.splitlines()[-1]
    assert last.startswith("return ")
    assert int(last.rpartition("| ")[2].replace(",", "")) == needed
    assert step.report.peak_gathered_bytes >= needed


def test_gathers_of_low_precision_are_half_the_bytes() -> None:
    precision = zg.MixedPrecision(param_dtype="bf16")
    half, full = captured(tower, BY_CLASS, precision), captured(tower, BY_CLASS)
    padding = 2 * 16  # each of two ranks' slices is padded to 16 bytes
    for stage in ("forward", "backward"):
        peaks = [getattr(step, stage).peak_gathered_bytes for step in (half, full)]
        assert peaks[1] / 2 <= peaks[0] <= peaks[1] / 2 + padding


# ---------------------------------------------------------------------- tied


def test_a_tied_embedding_is_one_long_lived_buffer_by_default() -> None:
    step = captured(tied_tower, BY_CLASS, zg.Prefetch(0))
    assert step.forward.gathers.count("embed") == 1
    sizes = unit_bytes(step)
    assert step.forward.peak_gathered_bytes == sizes["layers.0"] + sizes["embed"]


def test_a_tied_embedding_is_two_short_buffers_where_none_is_kept_between_uses() -> None:
    step = captured(tied_tower, BY_CLASS, zg.Reshard(keep_between_uses=False))
    assert step.forward.gathers == (
        *("embed", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "embed"),
    )


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("units", [0, 1, 2])
def test_two_short_buffers_obey_the_bound(units: int, stage: str) -> None:
    reshard = zg.Reshard(keep_between_uses=False)
    step = captured(tied_tower, BY_CLASS, reshard, zg.Prefetch(units))
    assert getattr(step, stage).peak_gathered_bytes <= most_bytes(step, 1 + units)


def test_both_choices_scatter_the_tied_gradient_once() -> None:
    for keep in (True, False):
        step = captured(tied_tower, BY_CLASS, zg.Reshard(keep_between_uses=keep))
        assert step.backward.scatters.count("embed") == 1
