"""Step time and memory of zgraph beside FSDP2's, on one Llama, in one process group.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        -m experiments.fsdp2_comparison.run --out result.json
"""

import argparse
import json
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.cuda.nccl
from rich.console import Console
from rich.table import Table

from experiments.byte_llama.model import Llama, LlamaConfig, parameter_count
from experiments.fsdp2_comparison.measure import Result, Sizes, free_memory, measure
from experiments.fsdp2_comparison.variants import variants
from experiments.ranks import Ranks, process_group

GIB = 2**30
TINY = LlamaConfig(vocab=264, dim=64, layers=3, heads=4, ffn=128)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", default="zgraph,fsdp2_compile", help="in this order")
    parser.add_argument("--batch", type=int, default=2, help="sequences per GPU")
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--warmup", type=int, default=10, help="steps after the first")
    parser.add_argument("--steps", type=int, default=30, help="measured steps")
    parser.add_argument("--repeats", type=int, default=1, help="every second one in reverse order")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zgraph-backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--machine", default=platform.node(), help="its name in the result")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few steps, to test")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    parser.add_argument(
        "--profile", type=Path, help="write profiles too: FILE.zgraph, FILE.fsdp2, ..."
    )
    return parser.parse_args()


def sizes_from(options: argparse.Namespace) -> Sizes:
    if options.tiny:
        return Sizes(TINY, batch=2, length=64, warmup=2, steps=4, seed=options.seed)
    return Sizes(
        LlamaConfig.benchmark(max_length=options.length),
        batch=options.batch,
        length=options.length,
        warmup=options.warmup,
        steps=options.steps,
        seed=options.seed,
    )


def schedule(names: list[str], repeats: int) -> list[tuple[int, str]]:
    """(repeat, variant) in the order of running. Alternating the order evens out what drifts."""
    return [
        (repeat, name)
        for repeat in range(repeats)
        for name in (names if repeat % 2 == 0 else reversed(names))
    ]


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_machine(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """What a reader needs to know to judge the figures."""
    on_gpu = ranks.device.type == "cuda"
    return {
        "machine": options.machine,
        "device": torch.cuda.get_device_name(ranks.device) if on_gpu else platform.machine(),
        "ranks": ranks.world,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
    }


def describe_sizes(sizes: Sizes) -> dict[str, Any]:
    with torch.device("meta"):
        parameters = parameter_count(Llama(sizes.model))
    return {**asdict(sizes), "parameters": parameters, "batch_and_length_are": "per rank"}


def describe_run(variant: str, repeat: int, result: Result) -> dict[str, Any]:
    """One run's figures, with its distribution of step times in milliseconds."""
    times = torch.tensor(result.step_ms, dtype=torch.float64)
    low, middle, high = times.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return {
        "variant": variant,
        "repeat": repeat,
        "median_ms": middle,
        "min_ms": times.min().item(),
        "p10_ms": low,
        "p90_ms": high,
        **asdict(result),
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Per variant, its median over the repeats and their spread; then zgraph against the rest."""
    by_variant: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_variant.setdefault(run["variant"], []).append(run)
    summary: dict[str, Any] = {}
    for variant, repeats in by_variant.items():
        medians = [run["median_ms"] for run in repeats]
        summary[variant] = {
            "median_ms": median(medians),
            "spread_ms": [min(medians), max(medians)],
            "first_step_s": median(run["first_step_s"] for run in repeats),
            "peak_allocated": repeats[0]["peak_allocated"],
            "first_peak_allocated": repeats[0]["first_peak_allocated"],
        }
    if "zgraph" in by_variant:
        for other in by_variant.keys() - {"zgraph"}:
            summary[f"zgraph/{other}"] = compare(by_variant["zgraph"], by_variant[other])
    return summary


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """Ratio of the median step times, and how far the first losses lie apart."""

    def middle(runs: list[dict[str, Any]]) -> float:
        return median(run["median_ms"] for run in runs)

    losses = zip(ours[0]["losses"], theirs[0]["losses"], strict=True)
    return {
        "time_ratio": middle(ours) / middle(theirs),
        "largest_loss_difference": max(abs(a - b) for a, b in losses),
    }


def runs_table(runs: list[dict[str, Any]]) -> Table:
    """One row a run: ms of a step, s of the first, GiB of the fullest rank."""
    table = Table()
    for heading in ("variant", "median", "min", "p10–p90", "first", "GiB", "GiB first"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for run in runs:
        memory = (run["peak_allocated"], run["first_peak_allocated"])
        table.add_row(
            run["variant"],
            f"{run['median_ms']:.2f}",
            f"{run['min_ms']:.2f}",
            f"{run['p10_ms']:.1f}–{run['p90_ms']:.1f}",
            f"{run['first_step_s']:.1f} s",
            *("-" if size_bytes is None else f"{size_bytes / GIB:.2f}" for size_bytes in memory),
        )
    return table


def main() -> None:
    options = parse_arguments()
    known = variants(options.zgraph_backend)
    names = options.variants.split(",")
    if unknown := set(names) - known.keys():
        raise SystemExit(f"--variants: no {', '.join(unknown)}; there are {', '.join(known)}")
    sizes = sizes_from(options)
    with process_group(options.device) as ranks:
        console = Console(quiet=ranks.rank != 0)
        runs: list[dict[str, Any]] = []
        for repeat, name in schedule(names, options.repeats):
            console.print(f"{name}, repeat {repeat}")
            profile_to = None
            if options.profile and repeat == 0:
                profile_to = options.profile.with_name(f"{options.profile.name}.{name}")
            result = measure(known[name], sizes, ranks, profile_to)
            torch.compiler.reset()
            free_memory(ranks.device)
            runs.append(describe_run(name, repeat, result))
        summary = summarise(runs)
        console.print(runs_table(runs))
        console.print_json(data=summary)
        if options.out and ranks.rank == 0:
            record = {
                **describe_machine(options, ranks),
                "sizes": describe_sizes(sizes),
                "repeats": options.repeats,
                "summary": summary,
                "runs": runs,
            }
            options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
