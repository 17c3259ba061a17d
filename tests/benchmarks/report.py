"""Table and picture of kernels/README.md, from what tests/benchmarks/test_kernels.py measured.

scripts/kernel_report kernels.json    keeps its figures in kernels/results, then writes both
scripts/kernel_report                 writes both from the figures that are kept
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
RESULTS = KERNELS / "results" / "bandwidth.json"
README, PICTURE = KERNELS / "README.md", KERNELS / "bandwidth.svg"
BEGIN, END = "<!-- made by scripts/kernel_report -->", "<!-- end -->"
OURS = "zgraph"


@dataclass(frozen=True)
class Figure:
    """One contender on one size.

    Attributes:
        call_us, spread_us: median and interquartile range of the rounds, a call.
        of_copy_bandwidth: bytes that the task must move, over the time that copying them takes.
    """

    task: str
    model: str
    ranks: int
    contender: str
    call_us: float
    spread_us: float
    of_copy_bandwidth: float

    @property
    def size(self) -> tuple[str, int]:
        return self.model, self.ranks

    @property
    def is_ours(self) -> bool:
        return self.contender.startswith(OURS)


def condensed(benchmark: dict[str, Any]) -> dict[str, Any]:
    """What is kept of pytest-benchmark's own file."""
    figures = []
    for entry in benchmark["benchmarks"]:
        info, stats = entry["extra_info"], entry["stats"]
        figures.append(
            Figure(
                info["task"],
                info["model"],
                info["ranks"],
                info["contender"],
                round(info["call_us"], 2),
                round(stats["iqr"] / info["calls"] * 1e6, 2),
                round(info["of_copy_bandwidth"], 4),
            )
        )
    first = benchmark["benchmarks"][0]
    names = ("gpu", "torch", "triton", "copy_bytes_per_s")
    machine = {name: first["extra_info"][name] for name in names}
    machine["rounds"] = first["stats"]["rounds"]
    machine["date"] = benchmark["datetime"][:10]
    return {"machine": machine, "figures": [asdict(figure) for figure in figures]}


def figures_of(results: dict[str, Any]) -> list[Figure]:
    return [Figure(**entry) for entry in results["figures"]]


def distinct(values: Iterable[Any]) -> list[Any]:
    """In the order in which they come first."""
    return list(dict.fromkeys(values))


def markdown(results: dict[str, Any]) -> str:
    """Machine, then one table a task."""
    machine, figures = results["machine"], figures_of(results)
    speed = machine["copy_bytes_per_s"] / 1e12
    lines = [
        f"{machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}, "
        f"{machine['date']}. Copy bandwidth in this run: {speed:.2f} TB/s, bytes read and written. "
        f"Median of {machine['rounds']} rounds; the interquartile range of every figure is in "
        "`results/bandwidth.json`, "
        f"at most {_largest_spread(figures):.1%} of zgraph's.",
        "",
    ]
    for task in distinct(figure.task for figure in figures):
        lines += [*_table([figure for figure in figures if figure.task == task]), ""]
    return "\n".join(lines)


def _largest_spread(figures: list[Figure]) -> float:
    return max(figure.spread_us / figure.call_us for figure in figures if figure.is_ours)


def _table(figures: list[Figure]) -> Iterator[str]:
    sizes = distinct(figure.size for figure in figures)
    heads = [f"{model} of {ranks}" for model, ranks in sizes]
    yield f"| {figures[0].task} | {' | '.join(heads)} |"
    yield f"|---|{'---|' * len(sizes)}"
    for contender in distinct(figure.contender for figure in figures):
        mine = {figure.size: figure for figure in figures if figure.contender == contender}
        cells = [_cell(mine.get(size)) for size in sizes]
        name = f"**{contender}**" if contender.startswith(OURS) else contender
        yield f"| {name} | {' | '.join(cells)} |"
    ratios = [_ratio([figure for figure in figures if figure.size == size]) for size in sizes]
    yield f"| best other / zgraph, in time | {' | '.join(ratios)} |"


def _cell(figure: Figure | None) -> str:
    return "" if figure is None else f"{figure.of_copy_bandwidth:.0%} ({figure.call_us:.1f} µs)"


def _ratio(figures: list[Figure]) -> str:
    """How much faster ours is, the one that does what the others do, than the best of them."""
    ours = next(figure.call_us for figure in figures if figure.is_ours)
    others = min(figure.call_us for figure in figures if not figure.is_ours)
    return f"{others / ours:.2f}×"


def draw(results: dict[str, Any], size: tuple[str, int] = ("8B", 2)) -> None:
    """Bars for every task on one size, with copy bandwidth as the roof."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("svg")
    # Without a date and with fixed names, so that the same figures give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "zgraph", "svg.fonttype": "none"})
    figures = [figure for figure in figures_of(results) if figure.size == size]
    tasks = distinct(figure.task for figure in figures)
    rows = [[f for f in figures if f.task == task] for task in tasks]
    picture, axes = pyplot.subplots(
        len(tasks),
        figsize=(9, 0.28 * len(figures) + 0.42 * len(tasks)),
        sharex=True,
        gridspec_kw={"height_ratios": [len(row) for row in rows], "hspace": 0.45},
    )
    for axis, task, row in zip(axes, tasks, rows, strict=True):
        names = [figure.contender for figure in row]
        heights = [100 * figure.of_copy_bandwidth for figure in row]
        colors = ["#c2410c" if figure.is_ours else "#94a3b8" for figure in row]
        bars = axis.barh(names, heights, color=colors, height=0.72)
        axis.axvline(100, color="#334155", linewidth=1, linestyle="--", zorder=3)
        free = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axis.bar_label(bars, fmt="%.0f %%", padding=4, fontsize=8, bbox=free, zorder=4)
        axis.set_title(task, loc="left", fontsize=9, fontweight="bold", pad=3)
        axis.tick_params(labelsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, 112)
        axis.spines[["top", "right"]].set_visible(False)
    machine = results["machine"]
    axes[-1].set_xlabel(
        f"% of copy bandwidth ({machine['copy_bytes_per_s'] / 1e12:.2f} TB/s), one block of a "
        f"{size[0]} Llama on one of {size[1]} ranks, {machine['gpu']}",
        fontsize=8,
    )
    picture.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})


def with_report(text: str, report: str) -> str:
    """`text` with what stands between the marks replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{report}{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/kernel_report", description=__doc__)
    parser.add_argument("benchmark", nargs="?", type=Path, help="what --benchmark-json wrote")
    chosen = parser.parse_args().benchmark
    if chosen is not None:
        RESULTS.parent.mkdir(exist_ok=True)
        kept = condensed(json.loads(chosen.read_text()))
        RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    results = json.loads(RESULTS.read_text())
    README.write_text(with_report(README.read_text(), markdown(results)))
    draw(results)


if __name__ == "__main__":
    main()
