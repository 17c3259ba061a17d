"""Where Dynamo breaks a graph, or traces nothing, training stays the same and zgraph says so once.

Compared with the unbroken model at two ranks, where no sum depends on its order: bit for bit.
"""

import logging
from dataclasses import dataclass

import pytest
import torch

import zgraph as zg
from tests.support.models import build
from tests.support.pool import run_ranks
from tests.support.training import (
    Run,
    assert_close,
    assert_same_bits,
    mean_run,
    mesh_of,
    own_batches,
    plain_run,
    train,
    zgraph_rank,
)

BLOCKS = [zg.Partition(), zg.Group.by_class("MlpBlock"), zg.Persist(max_numel=20), zg.Prefetch()]
HALF = zg.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Heard:
    """A run, what zgraph logged during it, and how many frames it captured."""

    run: Run
    messages: list[str]
    frames: int


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train_listening(name: str, passes: list[zg.Pass], skipped: bool = False) -> Heard:
    """Train; `skipped` keeps Dynamo out of the whole forward."""
    model, messages, log = build(name), _Messages(), logging.getLogger("zgraph")
    if skipped:
        model.forward = torch.compiler.disable(model.forward)
    log.addHandler(messages)
    try:
        zg.compile(model, passes, mesh_of(), backend="aot_eager")
        run = train(model, own_batches(name))
        return Heard(run, messages.texts, len(zg.inspect(model).frames))
    finally:
        log.removeHandler(messages)


def modules_named(messages: list[str]) -> list[str]:
    assert all("outside a captured graph" in text for text in messages)
    return [text.split()[0] for text in messages]


@pytest.mark.parametrize("precision", [[], [HALF]], ids=["fp32", "bf16"])
def test_a_break_in_every_block_changes_no_bit(precision: list[zg.Pass]) -> None:
    broken = run_ranks(train_listening, 2, "broken_mlp", BLOCKS + precision)
    unbroken = run_ranks(zgraph_rank, 2, "mlp", BLOCKS + precision)
    for heard, run in zip(broken, unbroken, strict=True):
        assert_same_bits(heard.run, run)


def test_only_the_halves_of_broken_blocks_are_captured() -> None:
    """Dynamo skips the loop around the blocks; zgraph's own eager reads are no graphs."""
    for heard in run_ranks(train_listening, 2, "broken_mlp", BLOCKS):
        assert heard.frames == 2 * 2
        assert modules_named(heard.messages) == ["enter", "leave"]


def test_more_broken_blocks_than_dynamos_recompile_limit_are_all_captured() -> None:
    broken = run_ranks(train_listening, 2, "deep_broken_mlp", BLOCKS)
    unbroken = run_ranks(zgraph_rank, 2, "deep_mlp", BLOCKS)
    for heard, run in zip(broken, unbroken, strict=True):
        assert_same_bits(heard.run, run)
        assert heard.frames == 2 * 12
        assert modules_named(heard.messages) == ["enter", "leave"]


def test_each_module_outside_graphs_is_named_once() -> None:
    inside = [f"blocks.{i}.{layer}" for i in range(2) for layer in ("norm", "up", "down")]
    for heard in run_ranks(train_listening, 2, "mlp", BLOCKS, True):
        assert heard.frames == 0
        assert modules_named(heard.messages) == ["enter", *inside, "leave"]


@pytest.mark.parametrize(
    ("name", "precision"),
    [("mlp", []), ("mlp", [HALF]), ("llama", [])],
    ids=["mlp-fp32", "mlp-bf16", "llama-fp32"],
)
def test_a_model_that_dynamo_never_traces_trains_on_the_same_bits(
    name: str, precision: list[zg.Pass]
) -> None:
    passes = [zg.Partition(), zg.Persist(max_numel=20), *precision]
    skipped = run_ranks(train_listening, 2, name, passes, True)
    captured = run_ranks(zgraph_rank, 2, name, passes)
    for heard, run in zip(skipped, captured, strict=True):
        assert_same_bits(heard.run, run)


@pytest.mark.parametrize("name", ["convnet", "odd", "tied_llama"])
def test_a_model_that_dynamo_never_traces_equals_plain_pytorch(name: str) -> None:
    heard = run_ranks(train_listening, 3, name, [zg.Partition(), zg.Persist(max_numel=20)], True)
    # As in test_plain_pytorch.py: sums over three ranks round by some 1e-7 a step.
    assert_close(mean_run([each.run for each in heard]), plain_run(name), 1e-6)
