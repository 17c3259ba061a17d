"""What the demo prints: tables on rank 0."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

BAR_WIDTH = 32


def loss_table(plain: Sequence[float], sharded: Sequence[float], rows: int = 11) -> Table:
    """Both loss curves at about `rows` evenly spaced steps; the bar is the sharded loss."""
    table = Table(title="loss", title_justify="left")
    for heading in ("step", "one process", "sharded", "difference"):
        table.add_column(heading, justify="right")
    table.add_column("")
    last, top = len(plain) - 1, max(*plain, *sharded)
    for step in sorted({round(i * last / (rows - 1)) for i in range(rows)}):
        bar = "█" * round(BAR_WIDTH * sharded[step] / top)
        difference = abs(plain[step] - sharded[step])
        table.add_row(
            str(step + 1),
            f"{plain[step]:.4f}",
            f"{sharded[step]:.4f}",
            f"{difference:.1e}",
            Text(bar, style="cyan"),
        )
    return table


def largest_difference(plain: Sequence[float], sharded: Sequence[float]) -> tuple[float, int]:
    """The largest absolute difference between two loss curves, and its step counted from 1."""
    return max(
        (abs(a - b), step) for step, (a, b) in enumerate(zip(plain, sharded, strict=True), 1)
    )


def memory_table(all_bytes: int, shard_bytes: int, gathered_bytes: int) -> Table:
    """Parameter memory of one process against that of one rank, in bytes."""
    table = Table(title="parameter memory", title_justify="left")
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("of one process", justify="right")
    rows = {
        "one process, all parameters": all_bytes,
        "a rank, its shards": shard_bytes,
        "a rank, gathered at once at most": gathered_bytes,
        "a rank, peak": shard_bytes + gathered_bytes,
    }
    for name, size_bytes in rows.items():
        table.add_row(name, f"{size_bytes:,}", f"{size_bytes / all_bytes:.0%}")
    return table
