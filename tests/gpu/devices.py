"""run_on_gpus: run a function on one process a GPU, joined by NCCL."""

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

needs_gpus = {
    count: pytest.mark.skipif(
        torch.cuda.device_count() < count, reason=f"needs {count} CUDA device(s)"
    )
    for count in (1, 2)
}


def run_on_gpus(function: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """Results of `function(*args)` on ranks 0 to `count` - 1; results must be plain values."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_rank, (count, port, function, args, results), nprocs=count)
    return [result for _, result in sorted(results.get() for _ in range(count))]


def _rank(
    rank: int, count: int, port: int, function: Callable[..., Any], args: Any, results: Any
) -> None:
    # Sums in a fixed order, so that runs can be compared bit for bit.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "nccl", init_method=address, rank=rank, world_size=count, device_id=device
    )
    try:
        results.put((rank, function(*args)))
    finally:
        dist.destroy_process_group()
