"""Frames: a Dynamo backend that runs the passes on what AOTAutograd captures.

    Dynamo graph ─ AOTAutograd ─▶ joint graph ─ joint passes ─ min-cut ─▶ forward, backward
    both: schedule passes; ranks agree ─ lowering ─▶ the backend's compiler

Both graphs are scheduled before either is compiled, so that ranks compare them once a frame, at a
time when no rank waits for another's compiler.

A graph captured without gradients is its own forward graph and goes through the same hooks. Every
captured frame of a model gets a `Frame`, with its own gathers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor, fx, nn

from zgraph._torch import min_cut_rematerialization_partition
from zgraph.backends.base import Backend
from zgraph.config import config
from zgraph.errors import ModelError, RankError
from zgraph.ir import ops, show
from zgraph.ir.graph import Graph, Stage
from zgraph.ir.verify import Snapshot, verify, verify_graph
from zgraph.layout import Layout
from zgraph.lowering import Kernels, accumulation, lower
from zgraph.passes.base import Hook, Pass
from zgraph.plan import Plan
from zgraph.runtime.storage import FlatShard, Groups


class Agreement(Protocol):
    """How ranks compare the graphs of one frame; see `zgraph.runtime.agree`."""

    def compare(self, collectives: Sequence[str]) -> None:
        """Raise `RankError` on every rank if another's collectives differ."""
        ...

    def failed(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot compile the frame."""
        ...


@dataclass(frozen=True)
class Step:
    """A graph as one pass left it.

    Attributes:
        made_by: the pass, as it prints; "capture", "partition into forward and backward", or
            "lower".
        graph: the graph, a copy.
    """

    made_by: str
    graph: Graph


@dataclass
class GraphRecord:
    """What one scheduled graph does, counted in the graph.

    Attributes:
        stage: "forward", "backward" or "inference".
        gathers, scatters, reduces: buffer names, in program order.
        peak_gathered_bytes: most gathered bytes alive at once.
        text: the scheduled program.
    """

    stage: Stage
    gathers: tuple[str, ...]
    scatters: tuple[str, ...]
    reduces: tuple[str, ...]
    peak_gathered_bytes: int
    text: str

    @staticmethod
    def of(graph: Graph) -> "GraphRecord":
        """Count `graph`, which is scheduled and not yet lowered."""
        return GraphRecord(
            graph.stage,
            tuple(str(n.args[1]) for n in graph.gathers()),
            tuple(str(n.args[1]) for n in graph.scatters()),
            tuple(str(n.args[1]) for n in graph.reduces()),
            graph.peak_live_bytes(),
            graph.text(),
        )


@dataclass
class Frame:
    """One captured frame: its compiled callable, and which inputs are flat shards.

    Attributes:
        shards: (input position, shard) for each flat shard that the frame reads. Weak, since
            compiled code may outlive its model.
        trained: names of parameters that get a gradient from this frame, by buffer.
        graphs: records of the frame's scheduled graphs.
        scheduled: those graphs themselves, before lowering.
        history: every step on the way, if they are kept.
        kernels: what moves its gathered and scattered memory.
    """

    shards: list[tuple[int, ReferenceType[FlatShard]]] = field(default_factory=list)
    trained: dict[str, frozenset[str]] = field(default_factory=dict)
    graphs: list[GraphRecord] = field(default_factory=list)
    scheduled: list[Graph] = field(default_factory=list)
    history: list[Step] = field(default_factory=list)
    compiled: Callable[..., Any] = lambda *inputs: inputs
    kernels: Kernels = "torch"

    @property
    def stages(self) -> list[Stage]:
        """The stages of the kept steps, in order."""
        return list(dict.fromkeys(step.graph.stage for step in self.history))

    def __call__(self, *inputs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.trained):
            return self.compiled(*inputs)
        aliased = list(inputs)
        trained = self.trained_shards()
        aliases = _ReceiveGradients.apply(self, *(inputs[position] for position, _ in trained))
        for (position, _), alias in zip(trained, aliases, strict=True):
            aliased[position] = alias
        return self.compiled(*aliased)

    def trained_shards(self) -> list[tuple[int, FlatShard]]:
        """Those of `shards` that get a gradient from this frame."""
        alive = [(at, flat) for at, weak in self.shards if (flat := weak()) is not None]
        return [(at, flat) for at, flat in alive if flat.buffer.name in self.trained]


class _ReceiveGradients(torch.autograd.Function):
    """Identity on a frame's flat shards; their gradients go to the shards' own accumulators."""

    @staticmethod
    def forward(ctx: Any, frame: Frame, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.frame = frame
        ctx.set_materialize_grads(False)
        return tuple(shard.view_as(shard) for shard in shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        frame: Frame = ctx.frame
        accumulate = accumulation(frame.kernels)
        for (_, flat), grad in zip(frame.trained_shards(), grads, strict=True):
            if grad is not None:
                flat.receive(grad.detach(), frame.trained[flat.buffer.name], accumulate)
        return (None, *(None for _ in grads))


class Capture:
    """The Dynamo backend of one model.

    Attributes:
        kernels: what moves gathered and scattered memory.
        frames: one for each captured graph so far.
        keeps_history: whether frames keep every step of their graphs.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        plan: Plan,
        layout: Layout,
        groups: Groups,
        shards: dict[str, FlatShard],
        backend: Backend,
        kernels: Kernels = "torch",
        agreement: Agreement | None = None,
        keeps_history: bool = False,
    ) -> None:
        self.passes = tuple(passes)
        self.plan = plan
        self.layout = layout
        self.groups = groups
        self.shards = WeakValueDictionary(shards)
        self.backend = backend
        self.kernels: Kernels = kernels
        self.agreement = agreement
        self.keeps_history = keeps_history
        self.frames: list[Frame] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _refuse_writes(module)
        frame = Frame(self._find_shards(inputs), kernels=self.kernels)
        frame.compiled = self.backend.compile(module, inputs, FrameCompiler(self, frame))
        self.frames.append(frame)
        return torch.compiler.disable(frame, reason="a compiled graph is not traced again")

    def _find_shards(self, inputs: Sequence[Any]) -> list[tuple[int, ReferenceType[FlatShard]]]:
        """Which inputs are flat shards. Reads may lie in nested graphs, so inputs are compared."""
        shards = {flat.data: flat for flat in self.shards.values()}
        return [
            (position, ref(shards[value]))
            for position, value in enumerate(inputs)
            if isinstance(value, nn.Parameter) and value in shards
        ]


def _refuse_writes(module: fx.GraphModule) -> None:
    """Raise `ModelError` where a captured forward changes a parameter in place."""
    for node in module.graph.find_nodes(op="call_function", target=ops.parameter):
        for user in node.users:
            name = str(user.target)
            writes = user.op == "call_method" and name.endswith("_") and not name.endswith("__")
            if writes and user.args[0] is node:
                raise ModelError(
                    f"forward changes {node.args[1]} in place by {name}(); it would change a "
                    "gathered copy only. Change what model.named_parameters() gives, outside "
                    "forward and under torch.no_grad()"
                )


class FrameCompiler:
    """The hooks that a backend calls while it compiles one frame."""

    def __init__(self, capture: Capture, frame: Frame) -> None:
        self._capture = capture
        self._frame = frame

    def partition(
        self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Run the joint passes, cut the joint graph into forward and backward, schedule both."""
        with self._telling_others():
            self._joint(module)
            module.recompile()
            halves = min_cut_rematerialization_partition(module, inputs, **options)
            forward = self._graph(halves[0], "forward", options["num_fwd_outputs"])
            self._schedule(forward, self._graph(halves[1], "backward"))
        for half in halves:
            half.recompile()
        return halves

    def finish(self, module: fx.GraphModule, stage: Stage) -> None:
        """Lower one graph, in place; a graph without gradients goes through the passes first."""
        graph = self._graph(module, stage)
        if stage == "inference":
            with self._telling_others():
                self._joint(module)
                self._schedule(graph)
        lower(graph, self._capture.kernels)
        module.recompile()

    def _graph(
        self, module: fx.GraphModule, stage: Stage, user_outputs: int | None = None
    ) -> Graph:
        capture = self._capture
        trained = self._frame.trained
        return Graph(module.graph, stage, capture.layout, capture.groups, trained, user_outputs)

    def _joint(self, module: fx.GraphModule) -> None:
        graph = self._graph(module, "joint")
        self._frame.trained = graph.trained = _trained(graph)
        self._keep("capture", graph)
        self._run(graph, "joint")

    def _schedule(self, *graphs: Graph) -> None:
        for graph in graphs:
            if graph.stage != "inference":
                self._keep("partition into forward and backward", graph)
            self._run(graph, "schedule")
            self._frame.scheduled.append(graph.copy())
            self._frame.graphs.append(GraphRecord.of(graph))
        if self._capture.agreement is not None:
            self._capture.agreement.compare(
                [line for graph in graphs for line in show.collectives(graph)]
            )
        if self._capture.keeps_history:
            for graph in graphs:
                # A copy: torch may put off compiling, and so lowering, backward until it runs.
                lowered = graph.copy()
                lower(lowered, self._capture.kernels)
                self._frame.history.append(Step("lower", lowered))

    def _run(self, graph: Graph, hook: Hook) -> None:
        """Run one hook of every pass, and verify what each leaves."""
        plan = self._capture.plan
        before = Snapshot.of(graph) if config.verify else None
        if before is not None and graph.stage in ("forward", "backward"):
            # Tags of the joint graph say what is recomputed; here it shows whether they did.
            verify_graph(graph, plan, "the joint passes, once partitioned,")
        for item in self._capture.passes:
            if not item.has(hook):
                continue
            with graph.edited_by(str(item)):
                item.joint(graph, plan) if hook == "joint" else item.schedule(graph, plan)
            if before is not None:
                before = verify(graph, plan, str(item), before, item.changes_compute)
            self._keep(str(item), graph)

    def _keep(self, made_by: str, graph: Graph) -> None:
        if self._capture.keeps_history:
            self._frame.history.append(Step(made_by, graph.copy()))

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Whatever goes wrong here, ranks that wait to compare the frame learn of it."""
        try:
            yield
        except Exception as error:
            if self._capture.agreement is not None and not isinstance(error, RankError):
                self._capture.agreement.failed(error)
            raise


def _trained(graph: Graph) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for node in graph.nodes(ops.gradient):
        found.setdefault(str(node.args[2]), set()).add(str(node.args[1]))
    return {buffer: frozenset(names) for buffer, names in found.items()}
