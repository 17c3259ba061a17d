"""GradScaler: an overflow on one rank is an overflow on all."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph as zg
from tests.runtime.ranks import Shapes, assert_equal, build, on_ranks, random_like, shard, wholes

INF = float("inf")


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def step(parameters: list[nn.Parameter], bad_element: int | None, fused: bool) -> tuple[Any, float]:
    """One scaled step; one element of the cube's gradient may be infinite. (optimizer, scale)."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
    scaler.scale(torch.ones(()))  # makes the scale
    for p, gradient in zip(parameters, random_like(parameters, 3), strict=True):
        scaled = gradient * 8
        if bad_element is not None and p.dim() == 3:
            scaled.view(-1)[bad_element] = INF
        p.grad = scaled
    scaler.step(optimizer)
    scaler.update()
    return optimizer, scaler.get_scale()


@on_ranks(2, 3)
def test_finite_gradients_step_as_plain_ones_do() -> None:
    for fused in (False, True):
        plain, sharded = trained(build(Shapes)), trained(shard(build(Shapes), zg.Persist(1)))
        _, expected_scale = step(plain, None, fused)
        _, scale = step(sharded, None, fused)
        assert scale == expected_scale == 8.0
        assert_equal(sharded, plain)


@on_ranks(2, 3)
def test_an_overflow_in_one_ranks_piece_skips_the_step_on_all() -> None:
    for fused in (False, True):
        for element in (0, 65):  # the first rank holds the one, the last the other
            parameters = trained(shard(build(Shapes)))
            before = wholes(parameters)
            _, scale = step(parameters, element, fused)
            assert scale == 4.0
            assert_equal(parameters, before)


@on_ranks(4)
def test_an_overflow_skips_the_step_on_repeated_shards_too() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = trained(shard(build(Shapes), zg.Partition(replicate="replicate"), mesh=mesh))
    before = wholes(parameters)
    _, scale = step(parameters, 65, False)
    assert scale == 4.0
    assert_equal(parameters, before)


@on_ranks(2)
def test_unscaling_before_clipping_gives_the_norm_of_plain_pytorch() -> None:
    norms = []
    for model in (build(Shapes), shard(build(Shapes), zg.Partition(ignore=["vector"]))):
        parameters = trained(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler.scale(torch.ones(()))
        for p, gradient in zip(parameters, random_like(parameters, 3), strict=True):
            p.grad = gradient * 8
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(norms[1], norms[0])
