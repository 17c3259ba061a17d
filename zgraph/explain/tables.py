"""Tables of an explanation, for a terminal."""

from collections.abc import Sequence

from rich.table import Table

from zgraph.explain.collectives import Collective
from zgraph.explain.memory import Memory
from zgraph.layout import Layout
from zgraph.plan import Plan


def mesh(plan: Plan) -> str:
    """The mesh of a plan: "replicate=4 × shard=8"."""
    return " × ".join(map(str, plan.axes)) or "one rank"


def units(plan: Plan, layout: Layout) -> Table:
    """Units with the bytes that a rank keeps and gathers."""
    table = _table(
        f"plan: {' '.join(plan.passes)}, over {mesh(plan)}",
        ["unit"],
        ["elements", "bytes per rank", "bytes gathered"],
    )
    for unit in plan.units:
        size = layout.size(unit.name)
        table.add_row(
            unit.name,
            f"{size.numel:,}",
            f"{size.shard_bytes:,}",
            f"{size.gathered_bytes:,}",
        )
    return table


def collectives(entries: Sequence[Collective]) -> Table:
    """Collectives of a step, with what a rank sends over each axis."""
    table = _table(
        "collectives of one step", ["stage", "unit", "collective", "axis"], ["count", "bytes sent"]
    )
    for entry in entries:
        axis = f"{entry.axis}={entry.ranks}"
        row = entry.stage, entry.unit, entry.kind, axis, f"{entry.count}", f"{entry.sent_bytes:,}"
        table.add_row(*row)
    table.add_section()
    for axis in dict.fromkeys(entry.axis for entry in entries):
        found = [entry for entry in entries if entry.axis == axis]
        count, sent = sum(e.count for e in found), sum(e.sent_bytes for e in found)
        table.add_row("all", "", "", f"{axis}={found[0].ranks}", f"{count}", f"{sent:,}")
    return table


def memory(found: Memory) -> Table:
    """Memory of one rank by what it is for."""
    table = _table("memory of one rank", ["what", "when"], ["bytes"])
    for label, when, count in rows(found):
        table.add_row(label, when, f"{count:,}")
    peak = found.peak
    table.add_section()
    table.add_row("peak", f"{peak.stage}, at {peak.node}", f"{found.peak_bytes:,}")
    return table


def rows(found: Memory) -> list[tuple[str, str, int]]:
    """(what, when, bytes): first what lies there throughout, then what is alive at the peak."""
    peak = found.peak
    return [
        ("parameters", "always", found.parameters),
        ("optimizer states", "always", found.optimizer_states),
        ("buffers", "always", found.buffers),
        ("inputs", "always", found.inputs),
        ("gradients", "at the peak", peak.gradients),
        ("gathered parameters", "at the peak", peak.gathered),
        ("saved activations", "at the peak", peak.activations),
        ("temporary tensors", "at the peak", peak.temporary),
        ("gradients", "after backward", found.gradients),
        ("saved activations", "after forward", found.saved_activations),
    ]


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in words:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
