"""Train a byte-level Llama in one process, then sharded over all ranks, and compare the two.

Run by `scripts/demo`, which starts it on every rank with `torch.distributed.run`.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

import zgraph as zg
from experiments.byte_llama.data import Batch, batches, corpus, slice_of_rank
from experiments.byte_llama.model import Block, Llama, LlamaConfig, parameter_count
from experiments.byte_llama.show import largest_difference, loss_table, memory_table
from experiments.ranks import Ranks, process_group

FP32_TOLERANCE = 1e-4
"""Two fp32 runs sum in different orders: over 120 steps the losses stay within 1e-6 on CPU. A wrong
gradient is far above this within a few steps."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16, help="windows per step, over all ranks")
    parser.add_argument("--length", type=int, default=128, help="bytes per window")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--backend", choices=("auto", "inductor", "aot_eager"), default="auto")
    parser.add_argument("--bf16", action="store_true", help="bf16 parameters, fp32 reductions")
    return parser.parse_args()


def build_model(options: argparse.Namespace, device: torch.device) -> Llama:
    """The same initial weights wherever it is called: they are drawn on the CPU from one seed."""
    torch.manual_seed(options.seed)
    return Llama(LlamaConfig.demo()).to(device)


def build_passes(options: argparse.Namespace) -> list[zg.Pass]:
    """ZeRO-3 with one unit a block, gathered again in the backward, one unit ahead of its use."""
    precision = zg.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return [
        zg.Partition(),
        zg.Group.by_class(Block),
        *([precision] if options.bf16 else []),
        zg.Reshard(after_forward=True),
        zg.Prefetch(units=1),
    ]


def training_steps(
    model: nn.Module,
    data: Iterator[Batch],
    options: argparse.Namespace,
    device: torch.device,
    precision: AbstractContextManager[object],
) -> Iterator[torch.Tensor]:
    """Train without end, yielding each step's loss, fp32 []."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for tokens, targets in data:
        with precision:
            loss = model(tokens.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def train_in_one_process(
    options: argparse.Namespace, ranks: Ranks, progress: Progress
) -> list[float]:
    """The reference: plain PyTorch over the whole global batch, on rank 0 while the rest wait."""
    losses: list[float] = []
    if ranks.rank == 0:
        model = build_model(options, ranks.device)
        data = batches(options.seed, options.batch, options.length)
        autocast = torch.autocast(ranks.device.type, torch.bfloat16, enabled=options.bf16)
        steps = training_steps(model, data, options, ranks.device, autocast)
        for _ in progress.track(range(options.steps), description="one process"):
            losses.append(next(steps).item())
    ranks.wait_for_all()
    return losses


def train_sharded(
    options: argparse.Namespace, ranks: Ranks, progress: Progress
) -> tuple[list[float], zg.Report]:
    """The same training with every parameter split over the ranks."""
    model = zg.compile(
        build_model(options, ranks.device),
        passes=build_passes(options),
        mesh=ranks.mesh,
        backend=options.backend,
    )
    everything = batches(options.seed, options.batch, options.length)
    mine = (slice_of_rank(batch, ranks.rank, ranks.world) for batch in everything)
    steps = training_steps(model, mine, options, ranks.device, nullcontext())
    losses: list[float] = []
    for step in progress.track(range(options.steps), description=f"sharded over {ranks.world}"):
        losses.append(ranks.mean(next(steps)))
        if step == 0:
            # The graphs exist from here on: the first step captured them.
            progress.console.print(zg.inspect(model).table())
    return losses, zg.inspect(model)


def differs_too_much(difference: float, options: argparse.Namespace) -> bool:
    return not options.bf16 and not difference <= FP32_TOLERANCE  # NaN differs too


def main() -> int:
    options = parse_arguments()
    with process_group(options.device) as ranks:
        # The global batch is made a multiple of the ranks, for both runs alike.
        options.batch = -(-options.batch // ranks.world) * ranks.world
        console = Console(quiet=ranks.rank != 0)
        size = parameter_count(Llama(LlamaConfig.demo()))
        console.print(
            f"[bold]byte Llama[/bold]: {size:,} parameters, {corpus().numel():,} bytes of text, "
            f"{options.batch} × {options.length} bytes a step; {ranks.world} × {ranks.device.type}"
        )
        columns = (
            TextColumn("{task.description:>16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
        )
        start = time.perf_counter()
        with Progress(*columns, console=console) as progress:
            plain = train_in_one_process(options, ranks, progress)
            sharded, report = train_sharded(options, ranks, progress)
        if ranks.rank != 0:
            return 0
        difference, step = largest_difference(plain, sharded)
        console.print(loss_table(plain, sharded))
        console.print(memory_table(4 * size, report.shard_bytes, report.peak_gathered_bytes))
        console.print(
            f"largest loss difference {difference:.1e} at step {step}; "
            f"{time.perf_counter() - start:.0f} s for both"
        )
    if differs_too_much(difference, options):
        console.print(f"[red]the losses differ by more than {FP32_TOLERANCE}[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
