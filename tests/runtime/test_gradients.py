"""Gradients on shards: where they come from, how they add up, how they go."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph as zg
from tests.runtime.ranks import Shapes, assert_equal, build, on_ranks, random_like, shard, whole


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def assert_close_grads(sharded: nn.Module, plain: nn.Module) -> None:
    """Same gradients up to the rounding of a mean over equal ranks, None where there is none."""
    for name, p in named(plain).items():
        q = named(sharded)[name]
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert q.grad is not None and q.grad.shape == p.shape
            torch.testing.assert_close(
                whole(q.grad), p.grad, msg=lambda text, n=name: f"{n}: {text}"
            )


class Parts(nn.Module):
    """Two heads, of which a call uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor, use: str) -> Tensor:
        hidden = torch.tanh(self.body(x))
        out = hidden.sum()
        if "l" in use:
            out = out + self.left(hidden).square().sum()
        if "r" in use:
            out = out + self.right(hidden).square().sum()
        return out


@on_ranks(2)
def test_gradients_are_the_mean_over_ranks() -> None:
    batch = torch.randn(2, 4, 5)
    model, plain = shard(build(Shapes), zg.Persist(1)), build(Shapes)
    backward(model, batch[dist.get_rank()])
    backward(plain, batch.flatten(0, 1))
    assert_close_grads(model, plain)


@on_ranks(2)
def test_backward_passes_add_up_until_gradients_are_cleared() -> None:
    x = torch.randn(3, 4, 5)
    for set_to_none in (True, False):
        model, plain = shard(build(Shapes), zg.Persist(1)), build(Shapes)
        for both in (model, plain):
            optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
            backward(both, x[0])
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(both, x[1])
            backward(both, x[2])
        assert_close_grads(model, plain)


@on_ranks(2)
def test_clearing_leaves_none_or_zeros_as_asked() -> None:
    model = shard(build(Shapes))
    for set_to_none in (False, True):
        backward(model, torch.randn(4, 5))
        model.zero_grad(set_to_none=set_to_none)
        gradients = [p.grad for p in model.parameters()]
        if set_to_none:
            assert gradients == [None] * 7
        else:
            assert all(g is None or not whole(g).any() for g in gradients)
            assert sum(g is not None for g in gradients) == 5


@on_ranks(2)
def test_unused_and_frozen_parameters_have_no_gradient_and_are_not_decayed() -> None:
    model = shard(build(Parts), zg.Group.whole())
    before = {name: whole(p) for name, p in named(model).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(torch.randn(4, 5), "l").backward()
    assert named(model)["right.weight"].grad is None and named(model)["right.bias"].grad is None
    optimizer.step()
    for name, p in named(model).items():
        assert whole(p).equal(before[name]) == name.startswith("right"), name


@on_ranks(2)
def test_parameters_used_in_turn_have_the_gradients_of_plain_pytorch() -> None:
    x = torch.randn(4, 4, 5)
    model, plain = shard(build(Parts), zg.Group.whole()), build(Parts)
    for both in (model, plain):
        for row, use in zip(x, ["l", "r", "", "lr"], strict=True):
            both(row, use).backward()
            if use == "r":
                both.left.weight  # noqa: B018 - reading outside the call changes nothing
                named(both)["left.weight"].grad = None
    assert_close_grads(model, plain)


@on_ranks(2)
def test_one_gradient_can_be_dropped_and_comes_back_alone() -> None:
    x = torch.randn(2, 4, 5)
    model, plain = shard(build(Shapes)), build(Shapes)
    for both in (model, plain):
        backward(both, x[0])
        named(both)["vector"].grad = None
        named(both)["cube"].grad = None
        backward(both, x[1])
    assert_close_grads(model, plain)


@on_ranks(2, 3)
def test_a_gradient_can_be_assigned_whole_or_sharded() -> None:
    model = shard(build(Shapes))
    trained = [p for p in model.parameters() if p.requires_grad]
    given = random_like(trained, 1)
    for p, gradient in zip(trained, given, strict=True):
        p.grad = gradient
    assert_equal([p.grad for p in trained], given)
    for p in trained:
        p.grad = p.grad * 2  # type: ignore[operator]
    assert_equal([p.grad for p in trained], [2 * g for g in given])
    for p in trained:
        p.grad = p.grad.detach()  # type: ignore[union-attr]
    assert_equal([p.grad for p in trained], [2 * g for g in given])


@on_ranks(2)
def test_changing_a_gradient_in_place_changes_it_and_nothing_else() -> None:
    model = shard(build(Shapes))
    trained = [p for p in model.parameters() if p.requires_grad]
    given = random_like(trained, 1)
    for p, gradient in zip(trained, given, strict=True):
        p.grad = gradient
    trained[0].grad *= 3
    trained[1].grad += 1
    trained[2].grad.mul_(0.5)
    expected = [given[0] * 3, given[1] + 1, given[2] * 0.5, *given[3:]]
    assert_equal([p.grad for p in trained], expected)


@on_ranks(2)
def test_an_assigned_gradient_is_a_copy_that_later_ones_add_to() -> None:
    model, plain = shard(build(Shapes)), build(Shapes)
    x, gradient = torch.randn(4, 5), torch.randn(5, 3)
    for both in (model, plain):
        named(both)["matrix"].grad = gradient.clone()
        backward(both, x)
    assert_close_grads(model, plain)


@on_ranks(2)
def test_a_gradient_of_another_shape_is_refused() -> None:
    p = named(shard(build(Shapes)))["matrix"]
    p.grad = torch.ones(5, 3)
    with pytest.raises(zg.WholeTensorError, match=r"matrix: .*\[3, 5\].*expected \[5, 3\]"):
        p.grad = torch.ones(3, 5)
    assert p.grad is not None and whole(p.grad).equal(torch.ones(5, 3))


def penalty(model: nn.Module) -> Tensor:
    """A loss term of the parameters themselves."""
    return sum(
        (
            p.square().sum() + 0.1 * p.abs().sum() + p.norm()
            for p in model.parameters()
            if p.numel()
        ),
        start=torch.zeros(()),
    )


@on_ranks(2)
def test_a_loss_term_of_the_parameters_themselves_reaches_their_gradients() -> None:
    x = torch.randn(4, 5)
    model, plain = shard(build(Shapes), zg.Persist(1)), build(Shapes)
    for both in (model, plain):
        loss = both(x).square().mean() + penalty(both)
        loss.backward()
    assert_close_grads(model, plain)
    for both in (model, plain):
        penalty(both).backward()
    assert_close_grads(model, plain)
