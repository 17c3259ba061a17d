"""The same Llama made ready for sharded training in each of the ways that are compared.

All of them: fp32 master parameters split over the "shard" axis, one unit a block and one for the
rest, bf16 gathers and compute, fp32 gradient reduction, parameters freed after the forward.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zgraph as zg
from experiments.byte_llama.model import Block, Llama

Backend = Literal["inductor", "aot_eager"]
Prepare = Callable[[Llama, DeviceMesh], nn.Module]


def with_zgraph(
    model: Llama, mesh: DeviceMesh, backend: Backend, kernels: str | None = None
) -> nn.Module:
    """The whole model captured as graphs; each gather starts one unit ahead of its use."""
    return zg.compile(
        model,
        passes=[
            zg.Partition(),
            zg.Group.by_class(Block),
            zg.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            zg.Reshard(after_forward=True),
            zg.Prefetch(units=1),
        ],
        mesh=mesh,
        backend=backend,
        options={"kernels": kernels} if kernels else None,
    )


def with_fsdp2(model: Llama, mesh: DeviceMesh, compile_blocks: bool) -> nn.Module:
    """FSDP2 as its users run it: `fully_shard` on each block, then on the root."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        if compile_blocks:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def variants(zgraph_backend: Backend) -> dict[str, Prepare]:
    """Every way by its name on the command line."""
    return {
        "zgraph": partial(with_zgraph, backend=zgraph_backend),
        "zgraph_torch_kernels": partial(with_zgraph, backend=zgraph_backend, kernels="torch"),
        "fsdp2_compile": partial(with_fsdp2, compile_blocks=True),
        "fsdp2": partial(with_fsdp2, compile_blocks=False),
    }
