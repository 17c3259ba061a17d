"""Report: what a compiled model holds and does, from its plan and its captured graphs."""

from collections import Counter
from dataclasses import dataclass

from rich.table import Table
from torch import nn

from zgraph.errors import ModelError
from zgraph.frames import Frame, GraphRecord
from zgraph.layout import Layout
from zgraph.plan import Plan


@dataclass(frozen=True)
class UnitReport:
    """One unit: elements, bytes a rank keeps and bytes gathered, and collectives in one step."""

    name: str
    parameters: int
    numel: int
    shard_bytes: int
    gathered_bytes: int
    gathers: int
    scatters: int
    reduces: int


@dataclass(frozen=True)
class Report:
    """What `inspect` returns. Graphs are those captured so far.

    Attributes:
        plan, layout: what was decided.
        frames: captured frames; each has the records of its graphs.
    """

    plan: Plan
    layout: Layout
    frames: tuple[Frame, ...]

    def graphs(self, stage: str) -> list[GraphRecord]:
        """Records of the graphs at "forward", "backward" or "inference"."""
        return [g for frame in self.frames for g in frame.graphs if g.stage == stage]

    @property
    def shard_bytes(self) -> int:
        """Bytes of parameters that this rank keeps."""
        return sum(buffer.shard_bytes for buffer in self.layout.buffers)

    @property
    def peak_gathered_bytes(self) -> int:
        """Most gathered bytes alive at once in any captured graph.

        With `Reshard(False)` what forward leaves for backward counts, since it is alive at its end.
        """
        records = [g for frame in self.frames for g in frame.graphs]
        return max((g.peak_gathered_bytes for g in records), default=0)

    @property
    def gathers_per_step(self) -> int:
        """All-gathers in all captured forward and backward graphs.

        A frame that was captured again, for other shapes say, counts each time.
        """
        return sum(unit.gathers for unit in self.units())

    @property
    def scatters_per_step(self) -> int:
        """Reduce-scatters in all captured backward graphs, counted as gathers are."""
        return sum(unit.scatters for unit in self.units())

    def units(self) -> list[UnitReport]:
        """One row a unit, in the order of the plan."""
        step = self.graphs("forward") + self.graphs("backward")
        gathers = Counter(name for g in step for name in g.gathers)
        scatters = Counter(name for g in step for name in g.scatters)
        reduces = Counter(name for g in step for name in g.reduces)
        rows = []
        for unit in self.plan.units:
            buffers, size = self.layout.unit(unit.name), self.layout.size(unit.name)
            rows.append(
                UnitReport(
                    name=unit.name,
                    parameters=len(unit.parameters),
                    numel=size.numel,
                    shard_bytes=size.shard_bytes,
                    gathered_bytes=size.gathered_bytes,
                    gathers=sum(gathers[b.name] for b in buffers),
                    scatters=sum(scatters[b.name] for b in buffers),
                    reduces=sum(reduces[b.name] for b in buffers),
                )
            )
        return rows

    def table(self) -> Table:
        """The units as a table for a terminal."""
        table = Table(title="plan: " + " ".join(self.plan.passes))
        table.add_column("unit")
        headings = (
            "parameters",
            "bytes per rank",
            "bytes gathered",
            "gathers",
            "scatters",
            "reduces",
        )
        for heading in headings:
            table.add_column(heading, justify="right")
        for row in self.units():
            table.add_row(
                row.name,
                f"{row.numel:,}",
                f"{row.shard_bytes:,}",
                f"{row.gathered_bytes:,}",
                str(row.gathers),
                str(row.scatters),
                str(row.reduces),
            )
        return table


def inspect(model: nn.Module) -> Report:
    """The report of a model that `zg.compile` returned.

    Raises:
        ModelError: the model was not compiled by zgraph.
    """
    state = model.__dict__.get("_zgraph")
    if state is None:
        raise ModelError("zg.inspect: this model was not compiled; call zg.compile first")
    return Report(state.plan, state.layout, tuple(state.capture.frames))
