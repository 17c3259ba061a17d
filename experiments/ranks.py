"""Starting and stopping the process group that `torch.distributed.run` prepared."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh
    """One axis, "shard", over all ranks."""
    idle_group: dist.ProcessGroup
    """A gloo group to wait in: a blocked gloo call sleeps, where NCCL's kernels would spin."""

    def wait_for_all(self) -> None:
        """Return once every rank is here."""
        dist.barrier(group=self.idle_group)

    def mean(self, value: torch.Tensor) -> float:
        """The mean over all ranks of one number each."""
        total = value.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.world


def choose_device(choice: DeviceChoice) -> torch.device:
    """A GPU for each local rank where there are enough of them, else the CPU."""
    local_rank = int(os.environ["LOCAL_RANK"])
    gpus, needed = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if choice == "cuda" and gpus < needed:
        raise SystemExit(f"--device cuda: {needed} ranks need a GPU each and {gpus} are visible")
    on_gpu = choice != "cpu" and gpus >= needed
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")


@contextmanager
def process_group(choice: DeviceChoice, wait_minutes: int = 30) -> Iterator[Ranks]:
    """Join the other ranks; leave them at the end.

    CPU threads are shared out between the ranks of this machine.
    """
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start this under torchrun: python -m torch.distributed.run --help")
    device = choose_device(choice)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # With its device known, NCCL builds the communicator now rather than in the first step.
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        world = dist.get_world_size()
        idle_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=wait_minutes))
        assert isinstance(idle_group, dist.ProcessGroup)  # every rank is a member
        yield Ranks(
            rank=dist.get_rank(),
            world=world,
            device=device,
            mesh=init_device_mesh(device.type, (world,), mesh_dim_names=("shard",)),
            idle_group=idle_group,
        )
    finally:
        dist.destroy_process_group()
