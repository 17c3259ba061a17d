"""Sharded training equals FSDP2 bit for bit, given the same units and the same precision.

At two ranks: a sum of two terms has one result in any order, so nothing is left to rounding.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zgraph as zg
from experiments.byte_llama.model import Block
from tests.support.models import MlpBlock
from tests.support.pool import run_ranks
from tests.support.training import assert_same_bits, fsdp2_rank, zgraph_rank

FP32: dict[str, torch.dtype] = {}
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
ALL_BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
DTYPES = {"fp32": FP32, "bf16": BF16, "all_bf16": ALL_BF16}


def compare(
    name: str,
    precision: str,
    reshard: bool = True,
    shape: tuple[int, int] | None = None,
    extra: tuple[zg.Pass, ...] = (),
) -> None:
    """Train both ways on two ranks, or on a mesh of `shape`, and compare every rank's run."""
    block: type[nn.Module] = MlpBlock if name == "mlp" else Block
    dtypes = DTYPES[precision]
    replicate = "replicate" if shape else None
    passes: list[zg.Pass] = [zg.Partition(replicate=replicate), zg.Group.by_class(block)]
    passes += [zg.Reshard(reshard), *extra]
    if dtypes:
        passes.append(zg.MixedPrecision(**dtypes))
    ranks = 4 if shape else 2
    policy = MixedPrecisionPolicy(**dtypes)
    theirs = run_ranks(fsdp2_rank, ranks, name, block, policy, reshard, shape)
    ours = run_ranks(zgraph_rank, ranks, name, passes, shape)
    for mine, their in zip(ours, theirs, strict=True):
        assert_same_bits(mine, their)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "all_bf16"])
def test_a_perceptron_has_the_bits_of_fsdp2(precision: str, reshard: bool) -> None:
    compare("mlp", precision, reshard)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_llama_has_the_bits_of_fsdp2(precision: str, reshard: bool) -> None:
    compare("llama", precision, reshard)


def test_tied_weights_have_the_bits_of_fsdp2() -> None:
    compare("tied_llama", "bf16")


def test_repeated_shards_have_the_bits_of_fsdp2() -> None:
    """Two ranks on each axis: again only sums of two terms."""
    compare("mlp", "bf16", shape=(2, 2))


def test_persistence_and_prefetch_keep_the_bits_of_fsdp2() -> None:
    compare("mlp", "bf16", extra=(zg.Persist(max_numel=30), zg.Prefetch(units=2)))
