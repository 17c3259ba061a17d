"""Sharded training equals plain PyTorch in one process on the whole batch.

Tolerance: 1e-6 of each tensor's 2-norm after five AdamW steps, and of each loss. A part's matrix
products and the ranks' sums round differently from the whole batch's, by some 1e-7 a step.
"""

import pytest

import zgraph as zg
from tests.support.pool import run_ranks
from tests.support.training import assert_close, mean_run, plain_run, zgraph_rank

RELATIVE = 1e-6


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["mlp", "convnet", "llama", "odd"])
def test_training_on_shards_equals_plain_pytorch(name: str, world_size: int) -> None:
    runs = run_ranks(zgraph_rank, world_size, name, [zg.Partition()])
    assert_close(mean_run(runs), plain_run(name), RELATIVE)


@pytest.mark.parametrize("name", ["mlp", "convnet", "tied_llama", "odd"])
def test_training_on_repeated_shards_equals_plain_pytorch(name: str) -> None:
    passes = [zg.Partition(replicate="replicate"), zg.Persist(max_numel=40), zg.Prefetch()]
    runs = run_ranks(zgraph_rank, 4, name, passes, (2, 2))
    assert_close(mean_run(runs), plain_run(name), RELATIVE)
