"""Device time for pytest-benchmark: between two CUDA events, while the host is far ahead.

Note [Rotation]
A kernel that runs again on the same buffers finds part of them in the cache. So each contender gets
several sets of buffers, together several times the cache, and goes through them in turn; results
that it allocates live until their set's next turn. A round goes through all sets at least once. It
is queued behind a kernel that only waits, so that the device never waits for the host.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

CALLS_BYTES = 1_000_000_000
"""A round moves at least this much, well above the 60 MB of an H200's L2 cache."""

CYCLES_PER_S = 2.0e9
"""At least as many as a GPU has: `torch.cuda._sleep` counts cycles."""


class Stamp:
    """A point in a stream's time. Differences are in seconds, and wait for the device."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, start: "Stamp") -> float:
        self._event.synchronize()
        return start._event.elapsed_time(self._event) * 1e-3


class Round:
    """Calls of one contender, over all its sets of buffers. See Note [Rotation].

    Attributes:
        count: calls in a round.
    """

    def __init__(self, make: Callable[[], Callable[[], Any]], call_bytes: int) -> None:
        sets = min(32, CALLS_BYTES // call_bytes + 1)
        self._calls = [make() for _ in range(sets)]
        self._results: list[Any] = [None] * sets
        self.count = sets * max(1, 4 // sets)
        for _ in range(2):
            self()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self()
        self._host_s = time.perf_counter() - begin
        torch.cuda.synchronize()

    def __call__(self) -> None:
        for index in range(self.count):
            place = index % len(self._calls)
            self._results[place] = self._calls[place]()

    def hold_the_device(self) -> None:
        """Keep the device waiting until the host has queued a round."""
        torch.cuda._sleep(int((2 * self._host_s + 1e-3) * CYCLES_PER_S))


def copy_bandwidth(rounds: int = 20) -> float:
    """Bytes read and written a second by torch's copy of 1 GiB, the median of `rounds`."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(rounds):
        torch.cuda._sleep(int(1e-3 * CYCLES_PER_S))
        start = Stamp()
        target.copy_(source)
        target.copy_(source)
        seconds.append((Stamp() - start) / 2)
    return 2 * source.numel() / statistics.median(seconds)
