"""The Inductor backend on CPU, and one process without a mesh.

Tolerance: 1e-5 of each tensor's 2-norm after five AdamW steps. Inductor fuses and vectorises, so
each sum and each transcendental function may round differently from ATen's, a few 1e-7 a step.
"""

import pytest
import torch
from torch import nn

import zgraph as zg
from tests.support.models import build
from tests.support.pool import run_ranks
from tests.support.training import (
    Run,
    assert_close,
    assert_same_bits,
    mean_run,
    own_batches,
    plain_run,
    train,
    zgraph_rank,
)
from zgraph.backends.base import BackendName

COMPILER_ROUNDING = 1e-5
PASSES = [zg.Partition(), zg.Persist(max_numel=30), zg.Prefetch()]


@pytest.mark.parametrize("name", ["mlp", "odd"])
def test_inductor_trains_on_shards_within_compiler_rounding(name: str) -> None:
    runs = run_ranks(zgraph_rank, 2, name, PASSES, None, "inductor")
    assert_close(mean_run(runs), plain_run(name), COMPILER_ROUNDING)


def train_without_mesh(name: str, backend: BackendName) -> tuple[Run, bool]:
    """(the run, whether the parameters are the very objects that they were)."""
    model = build(name)
    before = list(model.parameters())
    zg.compile(model, PASSES, backend=backend)
    after = list(model.parameters())
    same = all(one is other for one, other in zip(before, after, strict=True))
    return train(model, own_batches(name)), same and {type(p) for p in after} == {nn.Parameter}


def train_with_torch_compile(name: str, backend: BackendName) -> Run:
    model = build(name)
    model.compile(backend=backend)
    return train(model, own_batches(name))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_without_a_mesh_compile_is_torch_compile(backend: BackendName) -> None:
    [(run, untouched)] = run_ranks(train_without_mesh, 1, "mlp", backend)
    [expected] = run_ranks(train_with_torch_compile, 1, "mlp", backend)
    assert untouched
    assert_same_bits(run, expected)


def train_in_half_without_mesh(name: str) -> tuple[Run, set[torch.dtype]]:
    passes = [zg.MixedPrecision(param_dtype="bf16", reduce_dtype="fp32")]
    model = zg.compile(build(name), passes, backend="aot_eager")
    return train(model, own_batches(name)), {p.dtype for p in model.parameters()}


def test_without_a_mesh_precision_is_that_of_one_rank() -> None:
    [(run, dtypes)] = run_ranks(train_in_half_without_mesh, 1, "mlp")
    passes = [zg.Partition(), zg.MixedPrecision(param_dtype="bf16", reduce_dtype="fp32")]
    [expected] = run_ranks(zgraph_rank, 1, "mlp", passes)
    assert dtypes == {torch.float32}
    assert_same_bits(run, expected)
