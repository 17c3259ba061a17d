"""How many collectives one step has, counted in its graphs on two ranks."""

import pytest
import torch
from torch import nn

import zgraph as zg
from tests.capture.steps import captured, captured_on_all, frozen_tower, tied_tower, tower
from tests.passes.toys import Block

BLOCKS = ("layers.0", "layers.1", "layers.2", "layers.3")
UNITS = ("embed", *BLOCKS, "norm..head")
BY_CLASS = zg.Group.by_class(Block)


def four_blocks() -> nn.Module:
    """Blocks and nothing else."""
    return nn.Sequential(nn.Flatten(0), *(Widened() for _ in range(4)))


class Widened(Block):
    """A block that takes tokens or activations."""

    def __init__(self) -> None:
        super().__init__(width=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


def test_with_reshard_each_unit_is_gathered_forward_and_those_that_backward_needs_again() -> None:
    step = captured(tower, BY_CLASS, zg.Reshard(True))
    assert step.forward.gathers == UNITS
    # The gradient of an embedding does not need the embedding.
    assert step.backward.gathers == ("norm..head", *reversed(BLOCKS))


def test_without_reshard_backward_gathers_nothing() -> None:
    step = captured(tower, BY_CLASS, zg.Reshard(False))
    assert step.forward.gathers == UNITS
    assert step.backward.gathers == ()


@pytest.mark.parametrize("after_forward", [True, False])
def test_each_trained_unit_is_scattered_once_and_in_backward_only(after_forward: bool) -> None:
    step = captured(tower, BY_CLASS, zg.Reshard(after_forward))
    assert step.forward.scatters == ()
    assert step.backward.scatters == tuple(reversed(UNITS))
    assert step.forward.reduces == step.backward.reduces == ()


def test_three_layers_as_one_unit_and_the_fourth_as_another_are_two_gathers() -> None:
    groups = zg.Group.by_name([["1", "2", "3"], ["4"]])
    step = captured(four_blocks, groups, zg.Reshard(True))
    assert step.forward.gathers == ("1..3", "4")
    assert step.backward.gathers == ("4", "1..3")
    assert step.backward.scatters == ("4", "1..3")


def test_the_whole_model_as_one_unit_is_one_gather_each_way_and_one_scatter() -> None:
    step = captured(tower, zg.Group.whole(), zg.Reshard(True))
    assert step.forward.gathers == step.backward.gathers == step.backward.scatters == ("model",)


def test_persistent_parameters_are_never_gathered_and_reduced_once_a_unit() -> None:
    step = captured(tower, BY_CLASS, zg.Persist(max_numel=16))
    kept = tuple(f"{name}:persistent" for name in ("norm..head", *reversed(BLOCKS)))
    assert step.forward.gathers == UNITS  # the weights
    assert step.backward.scatters == tuple(reversed(UNITS))
    assert step.forward.reduces == ()
    assert step.backward.reduces == kept


def test_where_everything_persists_there_is_one_reduce_a_unit_and_nothing_else() -> None:
    step = captured(tower, BY_CLASS, zg.Persist(max_numel=10**6))
    for graph in (step.forward, step.backward):
        assert graph.gathers == graph.scatters == ()
        assert graph.peak_gathered_bytes == 0
    assert step.backward.reduces == tuple(f"{name}:persistent" for name in reversed(UNITS))


def test_frozen_parameters_are_gathered_and_never_scattered() -> None:
    step = captured(frozen_tower, BY_CLASS)
    frozen = {"embed:frozen", "layers.1:frozen", "layers.2:frozen"}
    assert frozen < set(step.forward.gathers)
    assert step.backward.scatters == ("norm..head", "layers.3", "layers.2", "layers.0")
    # Gradients flow through the frozen block, but need neither frozen biases nor the embedding.
    assert step.backward.gathers == (
        "norm..head",
        "layers.3",
        "layers.2",
        "layers.1:frozen",
        "layers.0",
    )


def test_a_tied_embedding_is_scattered_once() -> None:
    step = captured(tied_tower, BY_CLASS)
    assert step.backward.scatters == ("norm", *reversed(BLOCKS), "embed")


def test_the_report_counts_what_the_graphs_hold() -> None:
    step = captured(tower, BY_CLASS, zg.Reshard(True))
    rows = {row.name: row for row in step.report.units()}
    assert tuple(rows) == UNITS
    for name, row in rows.items():
        assert row.gathers == step.forward.gathers.count(name) + step.backward.gathers.count(name)
        assert (row.scatters, row.reduces) == (1, 0)
    assert step.report.gathers_per_step == 11
    assert step.report.scatters_per_step == 6
    numel = sum(p.numel() for p in tower().parameters())
    assert sum(row.numel for row in rows.values()) == numel
    assert step.report.shard_bytes == numel * 4 // 2  # sizes here need no padding


@pytest.mark.parametrize("passes", [(BY_CLASS,), (BY_CLASS, zg.Persist(16), zg.Prefetch(1))])
def test_ranks_capture_the_same_program(passes: tuple[zg.Pass, ...]) -> None:
    first, second = captured_on_all(tower, *passes)
    assert first.forward.text == second.forward.text
    assert first.backward.text == second.backward.text
    assert first.report.plan.text() == second.report.plan.text()
