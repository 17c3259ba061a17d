"""What is gathered is really freed when the program says so: bytes measured while it runs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import zgraph as zg
from tests.capture.steps import Passes, compiled, step, tied_tower, tower
from tests.passes.toys import Block
from tests.support.pool import run_ranks

BY_CLASS = zg.Group.by_class(Block)


class GatheredBytes(TorchDispatchMode):
    """Bytes of the results of all-gathers that are alive, at most.

    gloo's threads let go of a buffer a moment after its wait: what is above `limit` is looked at
    again for a while.
    """

    def __init__(self, limit: int = 0) -> None:
        super().__init__()
        self.storages: list[tuple[StorageWeakRef, int]] = []
        self.limit, self.peak = limit, 0

    def alive(self) -> int:
        for _ in range(100):
            total = sum(size for reference, size in self.storages if not reference.expired())
            if total <= self.limit:
                break
            time.sleep(0.002)
        return total

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay on while compiled code runs."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            storage = result.untyped_storage()
            self.storages.append((StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.alive())
        return result


@dataclass(frozen=True)
class Measured:
    """Of one step: bytes measured and planned, collectives measured and planned."""

    bytes: int
    planned_bytes: int
    gathers: int
    planned_gathers: int
    bytes_left: int


def measure(make: Callable[[], nn.Module], passes: Passes) -> Measured:
    """On a rank: a second step, watched."""
    model = compiled(make, (zg.Partition(), *passes))
    step(model)
    report = zg.inspect(model)
    with GatheredBytes(report.peak_gathered_bytes) as seen:
        step(model)
    seen.limit = 0
    return Measured(
        bytes=seen.peak,
        planned_bytes=report.peak_gathered_bytes,
        gathers=len(seen.storages),
        planned_gathers=report.gathers_per_step,
        bytes_left=seen.alive(),
    )


@pytest.mark.parametrize(
    ("make", "passes"),
    [
        (tower, (BY_CLASS,)),
        (tower, (BY_CLASS, zg.Prefetch(1))),
        (tower, (BY_CLASS, zg.Prefetch(2), zg.MixedPrecision("bf16"))),
        (tower, (BY_CLASS, zg.Persist(16), zg.Prefetch(1))),
        (tied_tower, (BY_CLASS, zg.Prefetch(1))),
        (tied_tower, (BY_CLASS, zg.Reshard(keep_between_uses=False), zg.Prefetch(1))),
        (tower, (BY_CLASS, zg.Reshard(False), zg.Prefetch(1))),
    ],
    ids=lambda value: value.__name__ if callable(value) else " ".join(map(str, value)),
)
def test_a_step_holds_the_gathered_bytes_that_its_graphs_promise(
    make: Callable[[], nn.Module], passes: Passes
) -> None:
    for measured in run_ranks(measure, 2, make, passes):
        assert measured.bytes == measured.planned_bytes > 0
        assert measured.gathers == measured.planned_gathers > 0
        assert measured.bytes_left == 0


def hold_an_output() -> tuple[int, bool]:
    """On a rank: gathered bytes that live on while an output waits for its backward."""
    model = compiled(tower, (zg.Partition(), BY_CLASS, zg.Reshard(True)))
    step(model)
    with GatheredBytes(zg.inspect(model).peak_gathered_bytes) as seen:
        output = model(torch.arange(8).view(2, 4))
    seen.limit = 0
    return seen.alive(), output.grad_fn is not None


def test_between_forward_and_backward_nothing_stays_gathered() -> None:
    assert run_ranks(hold_an_output, 2) == [(0, True)] * 2
