"""Ways to call a model besides one batch a step: lengths, modes, accumulation, repeated calls.

Compared with plain PyTorch on the whole batch, to 1e-6 of each tensor's 2-norm, as in
test_plain_pytorch.py; with another sharded run at two ranks, bit for bit.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph as zg
from tests.support.models import BATCH, Batch, batches, build
from tests.support.pool import run_ranks
from tests.support.training import (
    STEPS,
    Run,
    assert_close,
    assert_same_bits,
    mean_run,
    mesh_of,
    own_batches,
    plain_run,
    train,
    train_by,
    zgraph_rank,
)

RELATIVE = 1e-6
PASSES = [zg.Partition(), zg.Persist(max_numel=30), zg.Prefetch()]


def sharded(name: str, **options: Any) -> nn.Module:
    return zg.compile(build(name), PASSES, mesh_of(), backend="aot_eager", **options)


# ------------------------------------------------------------------ sequence lengths

LENGTHS = [8, 5, 8, 11, 5]


def texts_of_many_lengths(rank: int = 0, ranks: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randint(40, (BATCH, n + 1), generator=generator) for n in LENGTHS]
    rows = [text.chunk(ranks)[rank] for text in drawn]
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in rows]


def train_on_many_lengths(dynamic: bool | None) -> tuple[Run, int]:
    model = sharded("tagger", dynamic=dynamic)
    data = texts_of_many_lengths(dist.get_rank(), dist.get_world_size())
    return train(model, data), len(zg.inspect(model).frames)


@pytest.mark.parametrize(("dynamic", "frames"), [(True, 1), (None, 2), (False, 3)])
def test_sequence_lengths_may_change(dynamic: bool | None, frames: int) -> None:
    """One graph for all lengths; or one for the first and one for all others; or one for each."""
    replies = run_ranks(train_on_many_lengths, 2, dynamic)
    plain = train(build("tagger"), texts_of_many_lengths())
    assert_close(mean_run([run for run, _ in replies]), plain, RELATIVE)
    assert [captured for _, captured in replies] == [frames, frames]


# ------------------------------------------------------------------ modes


def train_and_evaluate(name: str, compiled: bool) -> tuple[Run, list[float]]:
    """Evaluate before each step; (the training run, the losses in evaluation)."""
    model = sharded(name) if compiled else build(name)
    found: list[float] = []

    def step(batch: Batch) -> Tensor:
        model.eval()
        with torch.no_grad():
            found.append(model(*batch).item())
        model.train()
        loss = model(*batch)
        loss.backward()
        return loss

    return train_by(step, model, batches(name, STEPS)), found


@pytest.mark.parametrize("name", ["mlp", "convnet"])
def test_evaluation_between_steps_changes_nothing_and_is_right(name: str) -> None:
    """All ranks get the whole batch here."""
    plain, evaluated = train_and_evaluate(name, False)
    for run, losses in run_ranks(train_and_evaluate, 2, name, True):
        assert_close(run, plain, RELATIVE)
        assert losses == pytest.approx(evaluated, rel=RELATIVE)


def infer_without_training(name: str) -> tuple[float, list[str]]:
    model = sharded(name)
    with torch.inference_mode():
        loss = model(*batches(name, 1)[0])
    stages = [graph.stage for frame in zg.inspect(model).frames for graph in frame.graphs]
    return loss.item(), stages


@pytest.mark.parametrize("name", ["mlp", "odd"])
def test_a_model_that_only_infers_has_only_an_inference_graph(name: str) -> None:
    expected = build(name)(*batches(name, 1)[0]).item()
    for loss, stages in run_ranks(infer_without_training, 2, name):
        assert loss == pytest.approx(expected, rel=RELATIVE)
        assert stages == ["inference"]


# ------------------------------------------------------------------ several calls a step


def train_in_parts(name: str) -> Run:
    """Accumulate gradients over two halves of this rank's rows."""
    model = sharded(name)

    def step(batch: Batch) -> Tensor:
        losses = []
        for part in range(2):
            loss = model(*(tensor.chunk(2)[part] for tensor in batch)) / 2
            loss.backward()
            losses.append(loss.detach())
        return sum(losses, torch.zeros(()))

    return train_by(step, model, own_batches(name))


@pytest.mark.parametrize("name", ["mlp", "odd"])
def test_accumulated_gradients_equal_those_of_one_batch(name: str) -> None:
    runs = run_ranks(train_in_parts, 2, name)
    assert_close(mean_run(runs), plain_run(name), RELATIVE)


def train_on_pairs(name: str, compiled: bool) -> Run:
    """Two calls before one backward."""
    model = sharded(name) if compiled else build(name)
    drawn = own_batches(name, 2 * STEPS) if compiled else batches(name, 2 * STEPS)

    def step(pair: tuple[Batch, Batch]) -> Tensor:
        loss = model(*pair[0]) + 0.5 * model(*pair[1])
        loss.backward()
        return loss

    return train_by(step, model, list(zip(drawn[::2], drawn[1::2], strict=True)))


@pytest.mark.parametrize("name", ["mlp", "odd", "broken_mlp"])
def test_a_model_may_be_called_twice_before_backward(name: str) -> None:
    runs = run_ranks(train_on_pairs, 2, name, True)
    assert_close(mean_run(runs), train_on_pairs(name, False), RELATIVE)


def train_with_idle_forwards(name: str) -> Run:
    """Each step also runs a forward whose loss nobody uses."""
    model = sharded(name)

    def step(batch: Batch) -> Tensor:
        model(*batch)
        loss = model(*batch)
        loss.backward()
        return loss

    return train_by(step, model, own_batches(name))


def test_a_forward_without_backward_leaves_no_trace() -> None:
    idle = run_ranks(train_with_idle_forwards, 2, "mlp")
    for mine, other in zip(idle, run_ranks(zgraph_rank, 2, "mlp", PASSES), strict=True):
        assert_same_bits(mine, other)
