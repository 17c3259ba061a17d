"""Measuring one variant: seconds to the first step, then milliseconds and bytes of later steps."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from experiments.byte_llama.model import Llama, LlamaConfig
from experiments.fsdp2_comparison.variants import Prepare
from experiments.ranks import Ranks

COMPARED_LOSSES = 10
PROFILED_STEPS = 3
DIFFERENT_BATCHES = 4


@dataclass(frozen=True)
class Sizes:
    """What is trained, and how often. `batch` and `length` are those of one rank."""

    model: LlamaConfig
    batch: int
    length: int
    warmup: int
    steps: int
    seed: int


@dataclass(frozen=True)
class Result:
    """One measured run. Times and bytes are those of the slowest and of the fullest rank.

    Attributes:
        prepare_s: from the whole model to a sharded one with its optimizer, nothing compiled yet.
        first_step_s: the first step, compilation and communicator start-up included.
        step_ms: each measured step.
        peak_allocated, peak_reserved: bytes during the measured steps; None on CPU.
        first_peak_allocated, first_peak_reserved: bytes from the first step to the last warm-up
            step, so with what compiling took.
        losses: mean over the ranks, of the first steps.
    """

    prepare_s: float
    first_step_s: float
    step_ms: list[float]
    peak_allocated: int | None
    peak_reserved: int | None
    first_peak_allocated: int | None
    first_peak_reserved: int | None
    losses: list[float]


class Trainer:
    """A prepared model with its optimizer and its few batches of synthetic tokens."""

    def __init__(self, prepare: Prepare, sizes: Sizes, ranks: Ranks) -> None:
        torch.manual_seed(sizes.seed)
        with ranks.device:
            model = Llama(sizes.model)
        self.model: nn.Module = prepare(model, ranks.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.batches = synthetic_batches(sizes, ranks)
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """One training step. Nothing here waits for the device."""
        tokens = self.batches[len(self.losses) % len(self.batches)]
        loss = self.model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())


def synthetic_batches(sizes: Sizes, ranks: Ranks) -> list[Tensor]:
    """Random tokens, int64 [batch, length + 1] each, different on every rank."""
    generator = torch.Generator(ranks.device).manual_seed(sizes.seed + 1 + ranks.rank)
    shape = (sizes.batch, sizes.length + 1)
    return [
        torch.randint(sizes.model.vocab, shape, generator=generator, device=ranks.device)
        for _ in range(DIFFERENT_BATCHES)
    ]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_steps(step: Callable[[], None], count: int, device: torch.device) -> Tensor:
    """Milliseconds of each of `count` steps, fp64 [count] on the CPU.

    On a GPU from events recorded between the steps: the host may run ahead, as it does in training,
    and a step that waits for the host is as long as the host makes it.
    """
    synchronize(device)
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        synchronize(device)
        times = [start.elapsed_time(end) for start, end in pairwise(events)]
        return torch.tensor(times, dtype=torch.float64)
    marks = [time.perf_counter()]
    for _ in range(count):
        step()
        marks.append(time.perf_counter())
    return 1e3 * torch.tensor(marks, dtype=torch.float64).diff()


def peak_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Most bytes allocated and reserved since the last reset; (None, None) on CPU."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def free_memory(device: torch.device) -> None:
    """Drop garbage and cached device memory, and begin new peak counts."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def largest_of_ranks(values: Tensor, ranks: Ranks) -> Tensor:
    """The elementwise maximum over all ranks of a CPU tensor."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=ranks.idle_group)
    return values


def measure(prepare: Prepare, sizes: Sizes, ranks: Ranks, profile_to: Path | None) -> Result:
    """Prepare the variant, train with it and take its figures. All ranks call this together.

    With `profile_to`, rank 0 also writes a table of the kernels and operators of a few more steps.
    """
    device = ranks.device
    start = time.perf_counter()
    trainer = Trainer(prepare, sizes, ranks)
    synchronize(device)
    prepare_s = time.perf_counter() - start
    # The whole model lay on this device for a moment, alike in every variant: not to be counted.
    free_memory(device)
    ranks.wait_for_all()

    first_step_ms = timed_steps(trainer.step, 1, device)
    timed_steps(trainer.step, sizes.warmup, device)
    first_peaks = peak_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    ranks.wait_for_all()
    step_ms = timed_steps(trainer.step, sizes.steps, device)
    peaks = peak_bytes(device)

    if profile_to is not None:
        write_profile(trainer, profile_to, ranks)
    return Result(
        prepare_s=prepare_s,
        first_step_s=largest_of_ranks(first_step_ms, ranks).item() / 1e3,
        step_ms=largest_of_ranks(step_ms, ranks).tolist(),
        peak_allocated=fullest_rank(peaks[0], ranks),
        peak_reserved=fullest_rank(peaks[1], ranks),
        first_peak_allocated=fullest_rank(first_peaks[0], ranks),
        first_peak_reserved=fullest_rank(first_peaks[1], ranks),
        losses=[ranks.mean(loss) for loss in trainer.losses[:COMPARED_LOSSES]],
    )


def fullest_rank(size_bytes: int | None, ranks: Ranks) -> int | None:
    """The most bytes that any rank held."""
    if size_bytes is None:
        return None
    return int(largest_of_ranks(torch.tensor(size_bytes), ranks).item())


def write_profile(trainer: Trainer, path: Path, ranks: Ranks) -> None:
    """A few more steps; rank 0 profiles them and writes a table of where the time went."""
    if ranks.rank != 0:
        for _ in range(PROFILED_STEPS):
            trainer.step()
        synchronize(ranks.device)
        return
    activities = [ProfilerActivity.CPU]
    order = "self_cpu_time_total"
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        order = "self_device_time_total"
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            trainer.step()
        synchronize(ranks.device)
    table = profiler.key_averages().table(
        sort_by=order, row_limit=60, max_name_column_width=80, max_src_column_width=40
    )
    path.write_text(f"{PROFILED_STEPS} steps\n{table}\n")
