"""Blocking collectives on flat tensors, named by group, as the eager paths use them.

An empty group name means one rank: the tensor itself is returned.

Note [Planned groups]
`zg.capture` traces for a mesh that need not exist. Its groups have names such as "shard=8", the
mesh axis and its ranks: enough for shapes and for lowering. What runs outside captured graphs
there runs on fake tensors, which have no values to exchange.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from zgraph._torch import all_gather_flat, backend_name, group_by_name, reduce_scatter_flat


def size(group: str) -> int:
    """Ranks in the group; 1 for "". See Note [Planned groups]."""
    if is_planned(group):
        return int(group.rpartition("=")[2])
    return group_by_name(group).size() if group else 1


def planned(axis: str, ranks: int) -> str:
    """The name of a group that is planned only. See Note [Planned groups]."""
    return f"{axis}={ranks}"


def is_planned(group: str) -> bool:
    """Whether a group is planned only. See Note [Planned groups]."""
    return "=" in group


def averages(group: str, dtype: torch.dtype, device_type: str) -> bool:
    """Whether the group's backend divides by itself. See Note [Averaging] in `zgraph.lowering`."""
    if device_type != "cuda" or dtype not in (torch.float32, torch.bfloat16):
        return False
    if is_planned(group):
        return True  # CUDA meshes use NCCL
    return backend_name(group_by_name(group), device_type) == "nccl"


def division(group: str, dtype: torch.dtype) -> tuple[float, float]:
    """Factors (before, after) by which a sum over the group is divided to make a mean.

    As FSDP2 does: fp16 is divided by about the square root on either side, so that neither the
    sum overflows nor the terms vanish; wider types once, after.
    """
    ranks = size(group)
    if dtype != torch.float16:
        return 1.0, float(ranks)
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return float(before), ranks / before


def all_gather(shard: Tensor, group: str) -> Tensor:
    """1-D shards, all of one size, concatenated in rank order."""
    if not group:
        return shard
    whole = shard.new_empty(shard.numel() * size(group))
    if not is_planned(group):
        all_gather_flat(whole, shard.contiguous(), group_by_name(group))
    return whole


def reduce_scatter_mean(flat: Tensor, group: str) -> Tensor:
    """This rank's slice of the mean of the ranks' 1-D tensors, in their dtype."""
    if not group:
        return flat
    shard = flat.new_empty(flat.numel() // size(group))
    op, before, after = _mean(group, flat)
    source = flat / before if before != 1 else flat
    if not is_planned(group):
        reduce_scatter_flat(shard, source, op, group_by_name(group))
    return shard.div_(after) if after != 1 else shard


def all_reduce_mean(flat: Tensor, group: str) -> Tensor:
    """The mean of the ranks' tensors, in their dtype, as a new tensor."""
    if not group:
        return flat
    op, before, after = _mean(group, flat)
    total = flat / before if before != 1 else flat.clone()
    if not is_planned(group):
        dist.all_reduce(total, op=op, group=group_by_name(group))
    return total.div_(after) if after != 1 else total


def _mean(group: str, flat: Tensor) -> tuple[dist.ReduceOp.RedOpType, float, float]:
    if averages(group, flat.dtype, flat.device.type):
        return dist.ReduceOp.AVG, 1.0, 1.0
    return (dist.ReduceOp.SUM, *division(group, flat.dtype))
