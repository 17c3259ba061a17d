"""Training runs of a small Llama on GPUs, as functions that every rank runs."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zgraph as zg
from experiments.byte_llama.model import Block, Llama, LlamaConfig
from zgraph.backends.base import BackendName

STEPS = 5
CONFIG = LlamaConfig(dim=128, layers=4, heads=4, ffn=320, max_length=64, tied=True)


def mesh() -> DeviceMesh:
    return init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("shard",))


def llama(device: str = "cuda") -> Llama:
    torch.manual_seed(0)
    with torch.device(device):
        return Llama(CONFIG)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, 256, (2, 65), generator=generator).cuda()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(model: nn.Module, **optimizer: bool) -> list[float]:
    """Losses of the steps, then the sum of squares of each parameter."""
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer)
    losses = []
    for step in range(STEPS):
        loss = model(*batch(step))
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    wholes = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    return losses + [whole.double().square().sum().item() for whole in wholes]


def with_zgraph(
    extra: list[zg.Pass], backend: BackendName, optimizer: dict[str, bool]
) -> list[float]:
    passes = [zg.Partition(), zg.Group.by_class(Block), *extra]
    return train(zg.compile(llama(), passes, mesh=mesh(), backend=backend), **optimizer)


def with_fsdp2(mixed: bool) -> list[float]:
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    )
    model = llama()
    for block in model.layers:
        fully_shard(block, mesh=mesh(), mp_policy=policy)
    return train(fully_shard(model, mesh=mesh(), mp_policy=policy), foreach=True)
