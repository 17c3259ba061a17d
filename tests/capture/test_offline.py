"""zg.capture: the graphs of a real run, without ranks, without data, the model left as it was."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph as zg
from tests.capture.offline_models import (
    HSDP,
    PASSES,
    STAGES,
    TOKENS,
    Broken,
    Normed,
    Remembering,
    Single,
    offline,
)
from tests.capture.steps import captured, frozen_tower, small_tower, tied_tower
from tests.support.pool import run_ranks
from zgraph._torch import detect_fake_mode
from zgraph.ir.show import collectives

Make = Callable[[], nn.Module]


# ------------------------------------------------------------------ the graphs of a real run


@pytest.mark.parametrize(
    ("make", "passes"),
    [(small_tower, PASSES), (tied_tower, PASSES[:2]), (frozen_tower, PASSES[:2])],
)
def test_graphs_are_those_of_a_real_run_on_two_ranks(
    make: Make, passes: tuple[zg.Pass, ...]
) -> None:
    real = captured(make, *passes[1:])
    traced = offline(make, *passes)
    assert traced.graph("forward").text() == real.forward.text
    assert traced.graph("backward").text() == real.backward.text
    assert traced.plan.text() == real.plan.text()


def test_no_process_group_is_needed_or_left() -> None:
    assert not dist.is_initialized()
    zg.capture(Single(), (torch.ones(2, 4),), world_size=2)
    assert not dist.is_initialized()


def test_a_meta_model_is_captured_for_a_thousand_ranks() -> None:
    with torch.device("meta"):
        model = small_tower()
        tokens = torch.zeros(2, 4, dtype=torch.long)
    traced = zg.capture(model, (tokens,), passes=PASSES, world_size=1024)
    assert all(parameter.is_meta for parameter in model.parameters())
    # A block has fewer elements than there are ranks: each has one piece of 16 bytes.
    gather = "forward: all-gather layers.0, 16,384 B f32, shard=1024"
    assert gather in collectives(traced.graph("forward"))


def test_a_mesh_of_two_axes_scatters_over_one_and_reduces_over_the_other() -> None:
    mesh = {"replicate": 4, "shard": 8}
    traced = zg.capture(small_tower(), (TOKENS,), passes=HSDP, mesh=mesh)
    block = [line for line in collectives(traced.graph("backward")) if "layers.1" in line]
    assert block == [
        "backward: all-gather layers.1, 1,152 B f32, shard=8",
        "backward: reduce-scatter layers.1, 1,152 B f32, shard=8",
        "backward: all-reduce layers.1, 144 B f32, replicate=4",
    ]


def test_an_axis_of_one_rank_has_no_collectives() -> None:
    mesh = {"replicate": 1, "shard": 8}
    traced = zg.capture(Single(), (torch.ones(2, 4),), passes=HSDP[:1], mesh=mesh)
    assert not traced.graph("backward").reduces()


def test_without_a_mesh_nothing_crosses_ranks() -> None:
    traced = zg.capture(Single(), (torch.ones(2, 4),))
    lines = collectives(traced.graph("forward"))
    assert lines and all(line.endswith("f32, one rank") for line in lines)


def capture_on_a_mesh() -> tuple[list[str], str]:
    """On a rank: texts from a device mesh, and the device type found for a meta model."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    texts = zg.capture(small_tower(), (TOKENS,), passes=PASSES, mesh=mesh)
    with torch.device("meta"):
        model = small_tower()
    on_meta = zg.capture(model, (TOKENS,), passes=PASSES, mesh=mesh)
    return [texts.graph(stage).text() for stage in STAGES], on_meta.plan.device_type


def test_a_device_mesh_does_as_a_planned_one() -> None:
    traced = offline(small_tower, *PASSES)
    texts = [traced.graph(stage).text() for stage in STAGES]
    for rank in run_ranks(capture_on_a_mesh, 2):
        assert rank == (texts, "cpu")


# ------------------------------------------------------------------ what is left as it was


@pytest.mark.parametrize("make", [Normed, Remembering, Broken])
def test_a_model_is_left_as_it_was(make: Make) -> None:
    model, x = make(), torch.ones(2, 4)
    held = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    state = copy.deepcopy(model.state_dict())
    attributes = {name: dict(vars(part)) for name, part in model.named_modules()}
    classes = [type(part) for part in model.modules()]
    eager, random = copy.deepcopy(model), torch.get_rng_state()
    zg.capture(model, (x,), passes=PASSES[:1], world_size=2)
    assert torch.equal(torch.get_rng_state(), random)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: at for n, (at, _) in held.items()}
    assert all(torch.equal(p, held[name][1]) for name, p in model.named_parameters())
    assert [type(part) for part in model.modules()] == classes
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert "_zgraph" not in vars(model)
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    # Normed draws random numbers: both calls begin with the same ones.
    out = model(x)
    torch.set_rng_state(random)
    assert torch.equal(out, eager(x))


def test_arguments_are_left_as_they_were() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    zg.capture(Remembering(), (x,), passes=PASSES[:1], world_size=2)
    assert x.grad is None and type(x) is torch.Tensor and torch.equal(x, torch.ones(2, 4))


def test_a_captured_model_can_still_be_compiled() -> None:
    model, x = Single(), torch.ones(2, 4)
    zg.capture(model, (x,), world_size=8)
    expected = copy.deepcopy(model)(x)
    assert torch.equal(zg.compile(model, PASSES[:1], backend="aot_eager")(x), expected)


@zg.graph_pass(stage="schedule")
def fail(graph: zg.Graph, plan: zg.Plan) -> None:
    raise zg.GraphError("this pass always fails")


@pytest.mark.parametrize("fails", [False, True])
def test_global_state_is_left_as_it_was(fails: bool) -> None:
    def state() -> tuple[object, ...]:
        return (
            torch._dynamo.config.get_config_copy(),
            torch.is_grad_enabled(),
            torch.get_default_device(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
            detect_fake_mode() is None,
            type(torch.ones(1)),
        )

    before = state()
    if fails:
        with pytest.raises(zg.GraphError, match="this pass always fails"):
            zg.capture(Single(), (torch.ones(2, 4),), passes=[zg.Partition(), fail], world_size=2)
    else:
        zg.capture(Single(), (torch.ones(2, 4),), world_size=2)
    assert state() == before
