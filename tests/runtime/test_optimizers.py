"""Stock optimizers on shards do what they do on whole plain parameters, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zgraph as zg
from tests.runtime.ranks import Shapes, assert_equal, build, on_ranks, random_like, shard

KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "nadam": (torch.optim.NAdam, {}),
}
FUSED = ("adamw", "amsgrad", "sgd", "adagrad")
PATHS = {"for loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def make(kind: str, parameters: list[Any], **options: bool) -> Optimizer:
    cls, defaults = KINDS[kind]
    return cls(parameters, lr=0.05, **defaults, **options)


def feed(parameters: list[nn.Parameter], seed: int) -> None:
    """Give parameters, sharded or plain, the same whole gradients."""
    for parameter, gradient in zip(parameters, random_like(parameters, seed), strict=True):
        parameter.grad = gradient


def steps(optimizer: Optimizer, parameters: list[nn.Parameter], count: int = 3) -> None:
    for seed in range(count):
        feed(parameters, seed)
        optimizer.step()


@pytest.mark.parametrize("path", PATHS)
@on_ranks(2, 3)
def test_three_steps_equal_those_of_plain_parameters(path: str) -> None:
    for kind in FUSED if path == "fused" else KINDS:
        plain, sharded = trained(build(Shapes)), trained(shard(build(Shapes), zg.Persist(1)))
        for parameters in (plain, sharded):
            steps(make(kind, parameters, **PATHS[path]), parameters)
        assert_equal(sharded, plain)


@on_ranks(2)
def test_the_default_path_and_parameter_groups_do_as_well() -> None:
    results = []
    for model in (build(Shapes), shard(build(Shapes))):
        parameters = trained(model)
        decayed = [p for p in parameters if p.dim() >= 2]
        rest = [p for p in parameters if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "lr": 0.2}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for seed in range(3):
            feed(parameters, seed)
            optimizer.step()
            schedule.step()
        results.append(parameters)
    assert_equal(results[1], results[0])


@on_ranks(2)
def test_states_hold_pieces_in_the_shape_of_the_whole() -> None:
    parameters = trained(shard(build(Shapes)))
    optimizer = make("adamw", parameters)
    steps(optimizer, parameters, 1)
    for p in parameters:
        state = optimizer.state[p]["exp_avg"]
        assert isinstance(state, zg.ShardedParameter) and state.shape == p.shape
        assert state.to_local().shape == p.to_local().shape


@on_ranks(2, 3)
def test_padding_stays_zero_through_training() -> None:
    model = shard(build(Shapes), zg.Persist(1))
    optimizer = make("adamw", trained(model))
    for seed in range(3):
        feed(trained(model), seed)
        torch.nn.utils.clip_grad_norm_(trained(model), 0.5)
        optimizer.step()
    for flat in model._zgraph.shards.values():
        held = torch.zeros(flat.buffer.shard_numel, dtype=torch.bool)
        for slot in flat.buffer.slots:
            start, _, length = flat.buffer.piece(slot, flat.groups.shard_rank)
            held[start : start + length] = True
        for tensor in (flat.data, flat.grad):
            assert tensor is None or not tensor[~held].any()


@on_ranks(2)
def test_a_state_dict_continues_training_where_it_was_taken() -> None:
    expected = trained(build(Shapes))
    steps(make("adamw", expected), expected, 4)
    model = shard(build(Shapes))
    first = make("adamw", trained(model))
    steps(first, trained(model), 2)
    saved = copy.deepcopy(first.state_dict())
    second = make("adamw", trained(model))
    second.load_state_dict(saved)
    for seed in (2, 3):
        feed(trained(model), seed)
        second.step()
    assert_equal(trained(model), expected)


def closure_of(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return closure


@on_ranks(2)
def test_a_closure_may_compute_the_gradients() -> None:
    x, losses = torch.randn(4, 5), []
    for model in (build(Shapes), shard(build(Shapes))):
        optimizer = torch.optim.SGD(trained(model), lr=0.01)
        losses.append([optimizer.step(closure_of(model, x)).item() for _ in range(3)])
    torch.testing.assert_close(losses[1], losses[0])
    assert losses[0][2] < losses[0][0]


@on_ranks(2)
def test_an_ignored_plain_parameter_trains_in_the_same_lists() -> None:
    for options in PATHS.values():
        model = shard(build(Shapes), zg.Partition(ignore=["cube", "vector"]))
        plain, parameters = trained(build(Shapes)), trained(model)
        assert {type(p) for p in parameters} == {zg.ShardedParameter, nn.Parameter}
        for both in (plain, parameters):
            steps(make("adamw", both, **options), both)
        assert_equal(parameters, plain)
