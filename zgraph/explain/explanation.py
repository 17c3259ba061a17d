"""explain: what a plan and its graphs cost, as tables for a terminal and as a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text
from torch import nn

from zgraph.capture import Captured, capture
from zgraph.errors import ModelError, PassError
from zgraph.explain import page, tables
from zgraph.explain.collectives import Collective, collectives
from zgraph.explain.data import data
from zgraph.explain.memory import Memory, memory
from zgraph.explain.timeline import Machine
from zgraph.frames import Frame, Step
from zgraph.ir import show
from zgraph.ir.graph import Graph
from zgraph.ir.nodes import bytes_in
from zgraph.layout import Layout
from zgraph.plan import Plan
from zgraph.runtime.storage import Groups

# States of a parameter's size that torch's optimizers keep of each parameter.
OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class Explanation:
    """What one step of one rank holds and sends, counted in its graphs.

    `print` it, or turn it into a page with `to_html`.

    Attributes:
        name: the model's class.
        plan, layout: what was decided.
        graphs: scheduled graphs, forward before backward, frame after frame.
        collectives: by unit, stage, kind and mesh axis.
        memory: by what it is for, with its peak.
        history: every step of every graph, where they were kept (`zg.capture`).
        machine: rates that the page's timeline assumes.
        outside: modules that read parameters outside the graphs; their gathers are not counted.
    """

    name: str
    plan: Plan
    layout: Layout
    graphs: tuple[Graph, ...] = field(repr=False)
    collectives: tuple[Collective, ...]
    memory: Memory
    history: tuple[tuple[Step, ...], ...] = field(repr=False, default=())
    machine: Machine = field(default_factory=Machine)
    outside: tuple[str, ...] = ()

    def sent_bytes(self, axis: str | None = None, stage: str | None = None) -> int:
        """Bytes that a rank sends in a step, over one mesh axis, in one stage, or in all."""
        return sum(
            entry.sent_bytes
            for entry in self.collectives
            if axis in (None, entry.axis) and stage in (None, entry.stage)
        )

    def tables(self) -> RenderableType:
        """Plan, collectives and memory, for a rich console."""
        found: list[RenderableType] = [
            tables.units(self.plan, self.layout),
            tables.collectives(self.collectives),
            tables.memory(self.memory),
        ]
        if self.outside:
            names = ", ".join(self.outside)
            found.append(Text(f"Not counted: what these gather outside captured graphs: {names}"))
        return Group(*found)

    def to_html(self, path: str | Path | None = None) -> str:
        """One page that needs nothing else: plan, timeline, memory, programs and diffs.

        Args:
            path: where to write it; None only returns it.

        Returns:
            The page.
        """
        text = page.render(data(self))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        # What passes print of themselves has brackets, which rich would take for its markup.
        console = Console(width=120, color_system=None, markup=False, emoji=False)
        with console.capture() as shown:
            console.print(self.tables())
        return shown.get()


def explain(
    model: nn.Module | Captured,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: str = "adamw",
    fused: bool | None = None,
    machine: Machine | None = None,
    **capture_options: Any,
) -> Explanation:
    """What a step costs on one rank: collectives by unit and axis, and memory with its peak.

    Args:
        model: what `zg.capture` returned; or a model that `zg.compile` returned and that has run a
            step, of which the latest graphs count; or any module, which is then captured with
            `args`, `kwargs` and `capture_options`, those of `zg.capture`.
        optimizer: whose states are counted: "adamw", "adam", "sgd", "momentum", "adagrad",
            "rmsprop".
        fused: whether memory counts no pointwise results that a fusing compiler keeps in
            registers; by default True for models compiled with Inductor.
        machine: rates that the page's timeline assumes.

    Raises:
        ModelError: the compiled model has not run, so it has no graphs; or as `zg.capture` does.
        PassError: an unknown optimizer, or options beside what was captured already.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise PassError(f"optimizer={optimizer!r}: expected one of {', '.join(OPTIMIZER_STATES)}")
    state = None if isinstance(model, Captured) else model.__dict__.get("_zgraph")
    if (state is not None or isinstance(model, Captured)) and (args or kwargs or capture_options):
        raise PassError("explain: this is captured already, so it takes no arguments and passes")
    if state is not None:
        assert isinstance(model, nn.Module)
        if not state.capture.frames:
            raise ModelError("explain: this model has not run yet; run a step first")
        fused = type(state.capture.backend).__name__ == "Inductor" if fused is None else fused
        frames = _one_step(state.capture.frames)
        outside = state.eager_reads.modules
        model = _captured(model, state.plan, state.layout, state.groups, frames, outside)
    elif not isinstance(model, Captured):
        model = capture(model, args, kwargs, **capture_options)
    return _explained(model, OPTIMIZER_STATES[optimizer], bool(fused), machine or Machine())


def _one_step(frames: Sequence[Frame]) -> list[Frame]:
    """The frames of one training step, of all that were captured so far; else of one call.

    Frames with the same collectives are one piece of the model, captured again for other shapes:
    the last one counts.
    """
    training = [frame for frame in frames if any(g.stage == "backward" for g in frame.scheduled)]
    latest: dict[tuple[str, ...], Frame] = {}
    for frame in training or frames:
        key = tuple(line for graph in frame.scheduled for line in show.collectives(graph))
        latest.pop(key, None)
        latest[key] = frame
    return list(latest.values())


def _captured(
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    groups: Groups,
    frames: Sequence[Frame],
    outside: tuple[str, ...],
) -> Captured:
    buffers = bytes_in(list(model.buffers()))
    return Captured(plan, layout, groups, tuple(frames), type(model).__name__, buffers, 0, outside)


def _explained(captured: Captured, states: int, fused: bool, machine: Machine) -> Explanation:
    graphs = tuple(graph for frame in captured.frames for graph in frame.scheduled)
    return Explanation(
        captured.name,
        captured.plan,
        captured.layout,
        graphs,
        tuple(collectives(graphs)),
        memory(
            graphs,
            captured.layout,
            states,
            captured.buffer_bytes,
            captured.input_bytes,
            fused,
            captured.plan.ignored(),
            captured.frames[0].kernels if captured.frames else "torch",
        ),
        tuple(tuple(frame.history) for frame in captured.frames),
        machine,
        captured.outside,
    )
