"""What `zg.explain` counts in graphs equals the closed formulas of ZeRO, FSDP and HSDP.

Symbols as in the literature: P parameters, W ranks; S ranks that a shard group has and R replicas.
"""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zgraph as zg
from zgraph.explain.collectives import sent_bytes
from zgraph.explain.memory import memory

WIDTH = 32  # every layer divides evenly over up to 64 ranks, so no buffer is padded


class Stack(nn.Module):
    """Linear layers without bias; backward needs every weight but the first."""

    def __init__(self, depth: int, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@cache
def explained(depth: int, mesh: tuple[tuple[str, int], ...], *passes: zg.Pass) -> zg.Explanation:
    """A step on inputs that need a gradient, so that backward needs the first weight too."""
    x = torch.zeros(4, WIDTH, requires_grad=True)
    listed = [zg.Group.by_class(nn.Linear), *passes]
    if not any(isinstance(item, zg.Partition) for item in passes):
        listed.insert(0, zg.Partition())
    else:
        listed = [*passes, zg.Group.by_class(nn.Linear)]
    return zg.explain(Stack(depth), (x,), passes=listed, mesh=dict(mesh))


def parameters(depth: int) -> int:
    return depth * WIDTH * WIDTH


@settings(max_examples=8, deadline=None)
@given(depth=st.integers(1, 4), ranks=st.sampled_from([2, 4, 8, 32]))
def test_zero_3_sends_three_times_the_parameters(depth: int, ranks: int) -> None:
    step = explained(depth, (("shard", ranks),))
    assert step.sent_bytes() == 4 * 3 * parameters(depth) * (ranks - 1) // ranks
    assert step.sent_bytes(stage="forward") * 3 == step.sent_bytes()


@pytest.mark.parametrize("ranks", [2, 16])
def test_without_resharding_it_sends_twice_the_parameters(ranks: int) -> None:
    step = explained(3, (("shard", ranks),), zg.Reshard(False))
    assert step.sent_bytes() == 4 * 2 * parameters(3) * (ranks - 1) // ranks


@pytest.mark.parametrize(("replicas", "ranks"), [(2, 4), (4, 8)])
def test_hsdp_gathers_within_and_reduces_across(replicas: int, ranks: int) -> None:
    mesh = (("replicate", replicas), ("shard", ranks))
    step = explained(3, mesh, zg.Partition(replicate="replicate"))
    p = parameters(3)
    assert step.sent_bytes("shard") == 4 * 3 * p * (ranks - 1) // ranks
    across = 2 * (p // ranks) * (replicas - 1) // replicas
    assert step.sent_bytes("replicate") == 4 * across
    assert step.sent_bytes("replicate", "forward") == 0


def test_gathers_are_in_compute_dtype_and_scatters_in_the_dtype_of_reduction() -> None:
    precision = zg.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    step = explained(3, (("shard", 8),), precision)
    gathered = sum(c.sent_bytes for c in step.collectives if c.kind == "all-gather")
    scattered = sum(c.sent_bytes for c in step.collectives if c.kind == "reduce-scatter")
    share = parameters(3) * 7 // 8
    assert (gathered, scattered) == (2 * 2 * share, 4 * share)


def test_persistent_parameters_are_reduced_as_a_whole() -> None:
    step = explained(2, (("shard", 8),), zg.Persist(max_numel=WIDTH * WIDTH))
    assert {c.kind for c in step.collectives} == {"all-reduce"}
    assert step.sent_bytes() == 4 * 2 * parameters(2) * 7 // 8


def test_each_unit_is_counted_for_itself() -> None:
    step = explained(3, (("shard", 4),))
    found = {(c.unit, c.stage, c.kind): (c.count, c.sent_bytes) for c in step.collectives}
    one = (1, 4 * WIDTH * WIDTH * 3 // 4)
    for layer in range(3):
        unit = f"layers.{layer}"
        assert found.pop((unit, "forward", "all-gather")) == one
        assert found.pop((unit, "backward", "all-gather")) == one
        assert found.pop((unit, "backward", "reduce-scatter")) == one
    assert not found


def test_one_rank_sends_nothing() -> None:
    assert explained(2, ()).sent_bytes() == explained(2, (("shard", 1),)).sent_bytes() == 0


@pytest.mark.parametrize(
    ("kind", "sent"), [("all-gather", 700), ("reduce-scatter", 700), ("all-reduce", 1400)]
)
def test_a_collective_sends_what_rings_send(kind: str, sent: int) -> None:
    assert sent_bytes(kind, 800, 8) == sent


# ---------------------------------------------------------------------- memory


@settings(max_examples=6, deadline=None)
@given(depth=st.integers(1, 3), ranks=st.sampled_from([2, 8, 32]))
def test_at_rest_adam_takes_sixteen_bytes_a_parameter_over_the_ranks(
    depth: int, ranks: int
) -> None:
    found = explained(depth, (("shard", ranks),)).memory
    share = parameters(depth) // ranks
    assert (found.parameters, found.optimizer_states, found.gradients) == (
        4 * share,
        8 * share,
        4 * share,
    )
    assert found.parameters + found.optimizer_states + found.gradients == 16 * share


def test_hsdp_keeps_the_shards_of_its_shard_group_only() -> None:
    mesh = (("replicate", 4), ("shard", 2))
    found = explained(3, mesh, zg.Partition(replicate="replicate")).memory
    at_rest = found.parameters + found.optimizer_states + found.gradients
    assert at_rest == 16 * parameters(3) // 2


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("momentum", 1), ("adamw", 2)])
def test_states_are_those_of_the_optimizer(optimizer: str, states: int) -> None:
    step = zg.explain(
        zg.capture(Stack(2), (torch.zeros(4, WIDTH),), world_size=8), optimizer=optimizer
    )
    assert step.memory.optimizer_states == states * step.memory.parameters


@pytest.mark.parametrize("units", [0, 1, 2])
def test_at_most_one_unit_more_than_prefetched_is_gathered(units: int) -> None:
    step = explained(4, (("shard", 8),), zg.Prefetch(units))
    most = max(moment.gathered for moment in step.memory.moments)
    assert most == (1 + units) * 4 * WIDTH * WIDTH


def test_saved_activations_are_those_that_autograd_saves() -> None:
    x = torch.randn(4, WIDTH)
    model = Stack(3)
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    for tensor in (x, *model.parameters()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    found = zg.explain(model, (x,), world_size=2).memory.saved_activations
    # tanh saves its result; the last result is also what the call returns.
    assert found == sum(storages.values()) == 3 * output.numel() * 4


def test_what_is_kept_without_resharding_is_gathered_at_the_end_of_forward() -> None:
    kept = explained(3, (("shard", 8),), zg.Reshard(False))
    last = [m for m in kept.memory.moments if m.stage == "forward"][-1]
    assert last.gathered == 4 * parameters(3)
    assert kept.memory.moments[-1].gathered == 0


def test_at_the_end_only_gradients_and_results_are_alive() -> None:
    step = explained(3, (("shard", 8),))
    end = step.memory.moments[-1]
    assert end.gathered == end.temporary == 0
    # The gradient of the input is returned too.
    assert end.gradients == step.memory.gradients + 4 * 4 * WIDTH
    assert end.activations == 4 * 4 * WIDTH


def test_no_kind_of_memory_is_ever_negative() -> None:
    for passes in [(), (zg.Reshard(False),), (zg.Prefetch(2),), (zg.Persist(10_000),)]:
        for moment in explained(4, (("shard", 8),), *passes).memory.moments:
            kinds = (moment.gathered, moment.activations, moment.gradients, moment.temporary)
            assert min(kinds) >= 0


def test_a_fusing_compiler_keeps_chains_of_pointwise_results_out_of_memory() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return ((x * self.weight).sin().cos().exp() + 1).sum()

    captured = zg.capture(Chain(), (torch.zeros(64, WIDTH),), world_size=2)
    plain, fused = (
        memory(captured.frames[0].scheduled, captured.layout, 0, fused=fused)
        for fused in (False, True)
    )
    size = 4 * 64 * WIDTH
    forward = [m.temporary + m.activations for m in plain.moments if m.stage == "forward"]
    assert max(forward) >= 2 * size  # a result beside the one that it is computed from
    assert fused.peak_bytes < plain.peak_bytes
