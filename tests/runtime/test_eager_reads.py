"""Outside captured code a unit is gathered once for modules that read it in turn."""

import logging

import pytest
import torch
from torch import Tensor, nn

import zgraph as zg
from tests.runtime.ranks import build, on_ranks, random_like, shard, whole


class Stack(nn.Module):
    """Four layers, two parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Skipped(Stack):
    """A stack that torch.compile must not look into."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


PAIRS = zg.Group.by_name([["layers.0", "layers.1"], ["layers.2", "layers.3"]])


def gathers(model: nn.Module) -> int:
    return model._zgraph.eager_reads.gathers


@on_ranks(2)
def test_units_read_in_turn_are_gathered_once_each() -> None:
    for groups, expected in ((zg.Group.whole(), 1), (PAIRS, 2), (zg.Group.by_class(nn.Linear), 4)):
        model = shard(build(Skipped), groups)
        assert gathers(model) == 0
        with torch.no_grad():
            model(torch.randn(2, 5))
        assert gathers(model) == expected
    assert not zg.inspect(model).frames


@on_ranks(2)
def test_backward_needs_no_gather_and_gives_the_gradients_of_plain_pytorch() -> None:
    x = torch.randn(2, 5)
    model, plain = shard(build(Skipped), PAIRS), build(Stack)
    for both in (model, plain):
        both(x).square().sum().backward()
    assert gathers(model) == 2
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)


@on_ranks(2)
def test_a_changed_shard_is_gathered_anew() -> None:
    model, plain = shard(build(Stack), zg.Group.whole()), build(Stack)
    changes = [
        lambda p: p.detach().mul_(0.5),
        lambda p: p.detach().copy_(random_like([p], 4)[0]),
        lambda p: setattr(p, "data", p.data + 1),
    ]
    for count, change in enumerate(changes, start=1):
        for layer in model.layers:
            assert layer.weight.shape
        assert gathers(model) == count
        for both in (model, plain):
            for p in both.parameters():
                change(p)
        torch.testing.assert_close(model.layers[0].weight, plain.layers[0].weight.detach())


@on_ranks(2)
def test_nothing_stays_gathered_after_a_call() -> None:
    model = shard(build(Skipped), zg.Group.whole())
    with torch.no_grad():
        model(torch.randn(2, 5))
        model(torch.randn(2, 5))
    assert gathers(model) == 2


@on_ranks(2)
def test_optimizer_steps_are_seen_by_the_next_eager_read() -> None:
    x = torch.randn(2, 5)
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        model, plain = shard(build(Skipped), PAIRS), build(Stack)
        for both in (model, plain):
            optimizer = torch.optim.AdamW(both.parameters(), lr=0.1, **options)
            for _ in range(3):
                both(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q.detach(), atol=1e-5, rtol=1e-5)
        assert gathers(model) == 6


@on_ranks(2)
def test_persistent_parameters_are_read_without_a_gather() -> None:
    model = shard(build(Skipped), zg.Persist(100))
    torch.testing.assert_close(model(torch.ones(2, 5)), build(Stack)(torch.ones(2, 5)))
    assert gathers(model) == 0


@on_ranks(2)
def test_attributes_read_by_hand_are_whole_and_differentiable() -> None:
    model, plain = shard(build(Stack)), build(Stack)
    for both in (model, plain):
        (both.layers[0].weight @ both.layers[1].weight.T).square().sum().backward()
    assert type(model.layers[0].weight) is Tensor
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(whole(p.grad), q.grad)


@on_ranks(2)
def test_captured_code_reads_nothing_eagerly() -> None:
    model = shard(build(Stack), PAIRS)
    model(torch.randn(2, 5)).sum().backward()
    assert gathers(model) == 0


class Messages(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@on_ranks(2)
def test_each_module_that_reads_eagerly_is_named_once() -> None:
    messages = Messages()
    logging.getLogger("zgraph").addHandler(messages)
    try:
        model = shard(build(Skipped), PAIRS)
        for _ in range(3):
            model(torch.randn(2, 5))
    finally:
        logging.getLogger("zgraph").removeHandler(messages)
    assert [text.split()[0] for text in messages.texts] == [f"layers.{i}" for i in range(4)]
    assert all("outside a captured graph" in text for text in messages.texts)


@on_ranks(2)
def test_a_forward_in_low_precision_reads_in_it() -> None:
    model = shard(build(Skipped), zg.MixedPrecision("bf16", "fp32"))
    out = model(torch.randn(2, 5))
    out.float().sum().backward()
    assert out.dtype == model.layers[0].weight.dtype == torch.bfloat16
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("breaks", [False, True])
@on_ranks(2)
def test_a_layer_left_out_of_the_graph_trains_like_the_rest(breaks: bool) -> None:
    x = torch.randn(2, 5)
    model, plain = build(Stack), build(Stack)
    if breaks:
        model.layers[1].forward = torch.compiler.disable(model.layers[1].forward)
    model = shard(model, PAIRS)
    for both in (model, plain):
        for _ in range(2):
            both(x).square().sum().backward()
    assert (gathers(model) > 0) == breaks
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)
