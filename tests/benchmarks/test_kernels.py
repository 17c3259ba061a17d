"""Kernels beside what a user has today, in device time, as a fraction of copy bandwidth.

scripts/test --benchmark-only tests/benchmarks/test_kernels.py --benchmark-json kernels.json
scripts/kernel_report kernels.json
"""

from importlib.metadata import version

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks.contenders import SIZES, TASKS, Size
from tests.benchmarks.device_time import Round, Stamp, copy_bandwidth

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 CUDA device(s)"),
]
ROUNDS = 15
CASES = [
    pytest.param(task, size, name, id=f"{task}-{size.model} of {size.ranks}-{name}")
    for task in TASKS
    for size in SIZES
    for name in TASKS[task].contenders(size)
]


@pytest.fixture(scope="module")
def bytes_per_s() -> float:
    """Copy bandwidth, in this run."""
    return copy_bandwidth()


@pytest.mark.benchmark(timer=Stamp)
@pytest.mark.parametrize(("task", "size", "name"), CASES)
def test_kernel(
    task: str, size: Size, name: str, benchmark: BenchmarkFixture, bytes_per_s: float
) -> None:
    torch.compiler.reset()
    call_bytes = int(TASKS[task].call_bytes(size))
    calls = Round(TASKS[task].contenders(size)[name], call_bytes)
    benchmark.group = f"{task}, {size.model} block of {size.ranks} ranks"
    benchmark.pedantic(calls, setup=calls.hold_the_device, rounds=ROUNDS, warmup_rounds=1)
    assert benchmark.stats is not None
    call_s = benchmark.stats.stats.median / calls.count
    benchmark.extra_info |= {
        "task": task,
        "model": size.model,
        "ranks": size.ranks,
        "contender": name,
        "call_bytes": call_bytes,
        "calls": calls.count,
        "call_us": call_s * 1e6,
        "copy_bytes_per_s": bytes_per_s,
        "of_copy_bandwidth": call_bytes / call_s / bytes_per_s,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
    }
