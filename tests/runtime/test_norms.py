"""Reductions of sharded tensors are those of the whole tensors, on every rank."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import zgraph as zg
from tests.runtime.ranks import Shapes, build, on_ranks, random_like, shard, whole

INF = float("inf")


def with_gradients(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters, with gradients drawn alike for sharded and plain models.

    Without the empty one, whose maximum plain PyTorch refuses to take.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and p.numel()]
    for parameter, gradient in zip(parameters, random_like(parameters, 5), strict=True):
        parameter.grad = gradient * 3
    return parameters


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(whole(mine), theirs)


def models() -> list[nn.Module]:
    """Sharded, partly persistent, wholly persistent, and partly ignored."""
    ignored = zg.Partition(ignore=["cube", "vector"])
    return [
        shard(build(Shapes), *passes)
        for passes in ((), (zg.Persist(7),), (zg.Persist(99),), (ignored,))
    ]


@on_ranks(2, 3)
def test_clipping_by_norm_equals_plain_pytorch() -> None:
    sharded, unsharded = models(), build(Shapes)
    for foreach in (True, False, None):
        for norm_type in (1.0, 2.0, 3.0, INF):
            plain = with_gradients(unsharded)
            total = clip_grad_norm_(plain, 1.5, norm_type, foreach=foreach)
            for model in sharded:
                parameters = with_gradients(model)
                norm = clip_grad_norm_(parameters, 1.5, norm_type, foreach=foreach)
                assert type(norm) is Tensor
                torch.testing.assert_close(norm, total)
                assert_close([p.grad for p in parameters], [p.grad for p in plain])


@on_ranks(2)
def test_a_norm_below_the_limit_changes_no_gradient() -> None:
    parameters = with_gradients(shard(build(Shapes)))
    before = [whole(p.grad) for p in parameters]
    clip_grad_norm_(parameters, 1e6)
    for p, gradient in zip(parameters, before, strict=True):
        assert whole(p.grad).equal(gradient)


@on_ranks(2)
def test_persistent_parameters_count_once_in_a_norm() -> None:
    class Ones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(12))

    parameters = list(shard(Ones(), zg.Persist(4)).parameters())
    for p in parameters:
        p.grad = torch.ones(p.shape)
    assert get_total_norm([p.grad for p in parameters]).item() == 4.0  # the root of 16
    assert get_total_norm([p.grad for p in parameters], 1.0).item() == 16.0


@on_ranks(2)
def test_infinite_and_missing_numbers_show_in_the_norm_of_every_rank() -> None:
    parameters = with_gradients(shard(build(Shapes)))
    for value in (INF, float("nan")):
        for element in (0, 65):  # in the first rank's piece, in the last one's
            gradient = torch.zeros(66)
            gradient[element] = value
            parameters[-1].grad = gradient.view(3, 2, 11)
            for norm_type in (2.0, INF):
                norm = get_total_norm([p.grad for p in parameters], norm_type)
                assert torch.isnan(norm) if value != value else torch.isinf(norm)


@on_ranks(2)
def test_clipping_by_value_equals_plain_pytorch() -> None:
    sharded = models()
    for foreach in (True, False):
        plain = with_gradients(build(Shapes))
        clip_grad_value_(plain, 0.7, foreach=foreach)
        for model in sharded:
            parameters = with_gradients(model)
            clip_grad_value_(parameters, 0.7, foreach=foreach)
            assert_close([p.grad for p in parameters], [p.grad for p in plain])


@on_ranks(2)
def test_norms_of_negative_order_are_refused_on_every_rank() -> None:
    for p in with_gradients(shard(build(Shapes))):
        for order in (-1, -INF):
            with pytest.raises(zg.WholeTensorError, match=r"norm of a sharded tensor.*full_tensor"):
                torch.linalg.vector_norm(p.detach(), order)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "sum in double": lambda t: t.sum(dtype=torch.float64),
    "mean": torch.mean,
    "max": torch.max,
    "min": torch.min,
    "any": lambda t: (t > 1.5).any(),
    "all": lambda t: (t > -9).all(),
    "norm": torch.norm,
    "1-norm": lambda t: t.norm(1),
    "inf-norm": lambda t: torch.linalg.vector_norm(t, INF),
    "0-norm": lambda t: torch.linalg.vector_norm(t, 0),
    "norm in double": lambda t: torch.linalg.vector_norm(t, 2, dtype=torch.float64),
    "norm over all dimensions": lambda t: torch.linalg.vector_norm(t, dim=list(range(t.dim()))),
    "isfinite": lambda t: t.isfinite().all(),
    "isnan": lambda t: t.isnan().any(),
}


@on_ranks(2, 3)
def test_reductions_give_every_rank_the_value_of_the_whole() -> None:
    plain = dict(build(Shapes).named_parameters())
    for model in models()[:3]:
        for name, p in model.named_parameters():
            if not p.numel():
                continue
            for kind, reduce in REDUCTIONS.items():
                if p.dim() == 0 and "dimensions" in kind:
                    continue
                actual, expected = reduce(p.detach()), reduce(plain[name].detach())
                assert type(actual) is Tensor and actual.dtype == expected.dtype, kind
                torch.testing.assert_close(
                    actual, expected, msg=lambda t, k=kind, n=name: f"{k} {n}: {t}"
                )
