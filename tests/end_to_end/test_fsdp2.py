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

BLOCKS: dict[str, type[nn.Module]] = {"mlp": MlpBlock, "llama": Block, "tied_llama": Block}
FP32: dict[str, torch.dtype] = {}
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
ALL_BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}


@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
@pytest.mark.parametrize("dtypes", [FP32, BF16, ALL_BF16], ids=["fp32", "bf16", "all_bf16"])
@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_training_has_the_bits_of_fsdp2(
    name: str, dtypes: dict[str, torch.dtype], keep: bool
) -> None:
    block = BLOCKS[name]
    passes: list[zg.Pass] = [zg.Partition(), zg.Group.by_class(block), zg.Reshard(not keep)]
    if dtypes:
        passes.append(zg.MixedPrecision(**dtypes))
    theirs = run_ranks(fsdp2_rank, 2, name, block, MixedPrecisionPolicy(**dtypes), keep)
    ours = run_ranks(zgraph_rank, 2, name, passes)
    for mine, their in zip(ours, theirs, strict=True):
        assert_same_bits(mine, their)
