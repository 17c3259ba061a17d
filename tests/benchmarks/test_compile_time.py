"""What passes and their verification add to a compilation.

scripts/test --benchmark-only tests/benchmarks/test_compile_time.py
"""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import zgraph as zg
from experiments.byte_llama.model import Block, Llama, LlamaConfig
from zgraph import frames
from zgraph.frames import FrameCompiler
from zgraph.ir.verify import Snapshot

PASSES = [
    zg.Partition(),
    zg.Group.by_class(Block),
    zg.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    zg.Reshard(),
    zg.Prefetch(1),
]


class Clock:
    """Seconds spent in functions, those that call one another counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - begin

        return timed


def llama(layers: int) -> Llama:
    """As wide as a Llama of 8 billion parameters, on the meta device."""
    with torch.device("meta"):
        return Llama(
            LlamaConfig(
                vocab=128_256, dim=4096, layers=layers, heads=32, ffn=14_336, max_length=4096
            )
        )


@pytest.mark.parametrize("layers", [8, 32])
def test_verifying_takes_less_than_a_twentieth_of_a_capture(
    benchmark: BenchmarkFixture, layers: int
) -> None:
    model = llama(layers)
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    verifying, running = Clock(), Clock()

    def capture() -> None:
        zg.capture(model, (tokens, tokens), passes=PASSES, world_size=8)

    patches = (
        mock.patch.object(frames, "verify", verifying.around(frames.verify)),
        mock.patch.object(Snapshot, "of", staticmethod(verifying.around(Snapshot.of))),
        mock.patch.object(FrameCompiler, "_run", running.around(FrameCompiler._run)),
    )
    with patches[0], patches[1], patches[2]:
        benchmark.pedantic(capture, rounds=2)
    total = sum(benchmark.stats.stats.data)
    benchmark.extra_info["verifier_share"] = verifying.seconds / total
    benchmark.extra_info["passes_share"] = running.seconds / total
    print(f"{layers} blocks: {verifying.seconds / total:.1%} verifying")
    # Of tracing alone: what a backend such as Inductor adds makes the share smaller.
    assert verifying.seconds < 0.05 * total
