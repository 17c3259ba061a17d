"""Memory of one step on one rank, followed through the lowered graphs.

Every tensor that a node computes lives from that node to the last node that reads it or a view of
it. What forward saves lives on until backward has read it. Inputs of a collective live until its
wait. Beside the program lie the flat shards, the optimizer's states, and the gradients as they
appear.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch.fx import Node

from zgraph.ir.graph import Graph, Stage
from zgraph.ir.nodes import bytes_in, is_cast, is_view
from zgraph.layout import Layout
from zgraph.lowering import Kernels, lower
from zgraph.plan import ParameterPlan

Kind = Literal["gathered", "activations", "gradients", "temporary"]
_wait = torch.ops._c10d_functional.wait_tensor.default
_full = torch.ops.aten.full.default
_all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default


@dataclass(frozen=True)
class Moment:
    """Bytes alive while one node of one graph runs.

    Attributes:
        graph: which of the step's graphs, in the order in which they were given.
        node: name of the node in the lowered graph.
        gathered: gathered parameters.
        activations: what forward saves for backward.
        gradients: flat gradients of this rank.
        temporary: everything else that the program computes.
    """

    graph: int
    stage: Stage
    node: str
    gathered: int
    activations: int
    gradients: int
    temporary: int

    @property
    def total(self) -> int:
        """Bytes of the four together."""
        return self.gathered + self.activations + self.gradients + self.temporary


@dataclass(frozen=True)
class Memory:
    """Memory of one step, in bytes on one rank.

    Attributes:
        parameters: flat shards in their master dtype, and whole parameters that are not split.
        gradients: flat gradients after backward.
        optimizer_states: of the parameters that are trained.
        buffers, inputs: the model's buffers, and the arguments of the call; these are counted for
            captures, and 0 for a model that has run.
        saved_activations: what forward leaves for backward, beside parameters and inputs.
        moments: what else is alive, node by node through forward and backward.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    buffers: int
    inputs: int
    saved_activations: int
    moments: tuple[Moment, ...] = field(repr=False)

    @property
    def resident(self) -> int:
        """Bytes that lie there throughout: parameters, optimizer states, buffers, inputs."""
        return self.parameters + self.optimizer_states + self.buffers + self.inputs

    @property
    def peak(self) -> Moment:
        """The moment at which most is alive."""
        nothing = Moment(0, "forward", "", 0, 0, 0, 0)
        return max(self.moments, key=lambda moment: moment.total, default=nothing)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return self.resident + self.peak.total


def memory(
    graphs: Sequence[Graph],
    layout: Layout,
    optimizer_states: int,
    buffer_bytes: int = 0,
    input_bytes: int = 0,
    fused: bool = False,
    ignored: Iterable[ParameterPlan] = (),
    kernels: Kernels = "torch",
) -> Memory:
    """Follow one step through its scheduled graphs: forwards in order, then backwards in reverse.

    Args:
        graphs: each backward directly behind its forward.
        optimizer_states: states of a parameter's size that the optimizer keeps: 2 for Adam.
        buffer_bytes, input_bytes: memory of the model's buffers and of the call's arguments.
        fused: whether pointwise results that only pointwise nodes and reductions read stay in
            registers, as Inductor lets them; else every node's result lies in memory.
        ignored: parameters that no buffer holds, and that every rank has whole.
        kernels: what the graphs are lowered to.
    """
    indices = range(len(graphs))
    forwards = [index for index in indices if graphs[index].stage != "backward"]
    backwards = [index for index in reversed(indices) if graphs[index].stage == "backward"]
    walk = _Walk(fused, kernels)
    for index in (*forwards, *backwards):
        walk.run(index, graphs[index])
    trained = {name for graph in graphs for name in graph.trained}
    wholes = [(p.numel * p.dtype.itemsize, p.requires_grad) for p in ignored]
    learnt = sum(size for size, trains in wholes if trains)
    states = sum(b.shard_bytes for b in layout.buffers if b.requires_grad) + learnt
    return Memory(
        parameters=sum(b.shard_bytes for b in layout.buffers) + sum(size for size, _ in wholes),
        gradients=sum(b.shard_bytes for b in layout.buffers if b.name in trained) + learnt,
        optimizer_states=states * optimizer_states,
        buffers=buffer_bytes,
        inputs=input_bytes,
        saved_activations=walk.saved_bytes,
        moments=tuple(walk.moments),
    )


@dataclass(eq=False)
class _Block:
    """One piece of memory, in which one tensor and its views lie."""

    size: int
    kind: Kind


Blocks = tuple[_Block, ...]


class _Walk:
    """Runs graphs one after the other, and writes down what is alive."""

    def __init__(self, fused: bool, kernels: Kernels) -> None:
        self.moments: list[Moment] = []
        self.saved_bytes = 0
        self._fused = fused
        self._kernels: Kernels = kernels
        self._alive: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        # What each forward left for its backward, by the name that both give it.
        self._left: dict[int, dict[str, Blocks]] = {}
        # What calls returned: the caller holds it.
        self._returned: set[_Block] = set()

    def run(self, index: int, graph: Graph) -> None:
        """Follow one scheduled graph."""
        lowered = graph.copy()
        lower(lowered, self._kernels)
        left = self._left.get(index - 1, {}) if graph.stage == "backward" else {}
        blocks = self._blocks(lowered, left)
        if graph.stage != "backward":
            results = [node for node in lowered.outputs() if isinstance(node, Node)]
            own = results[: len(results) - len(graph.saved())]
            self._returned |= {block for node in own for block in blocks[node]}
        last = _last_reads(lowered, blocks)
        seen = {block for kept in left.values() for block in kept}
        for node in lowered.fx.nodes:
            for block in blocks[node]:
                if block not in seen:
                    seen.add(block)
                    self._alive[block.kind] += block.size
            self.moments.append(Moment(index, graph.stage, node.name, **self._alive))
            for block in last.get(node, ()):
                self._alive[block.kind] -= 0 if block in self._returned else block.size
        # Lowering renamed what it replaced; backward goes by the scheduled graph's names.
        saved = zip(graph.saved(), lowered.saved(), strict=True)
        kept = {scheduled.name: blocks[node] for scheduled, node in saved}
        self._left[index] = kept
        saved_blocks = {block for name in kept for block in kept[name]}
        self.saved_bytes += sum(b.size for b in saved_blocks if b.kind == "activations")

    def _blocks(self, graph: Graph, left: dict[str, Blocks]) -> dict[Node, Blocks]:
        """The memory in which each node's value lies; none for what is resident anyway."""
        kinds = _kinds(graph)
        blocks: dict[Node, Blocks] = {}
        for node in graph.fx.nodes:
            sources = [block for source in node.all_input_nodes for block in blocks[source]]
            if node.op == "placeholder":
                tangent = graph.stage == "backward" and node.name.startswith("tangents")
                blocks[node] = _new(node, kinds) if tangent else left.get(node.name, ())
            elif node.op == "output" or node.op == "get_attr":
                blocks[node] = ()
            elif node.target is operator.getitem and not is_view(node):
                # Results without memory of their own, such as a random seed, take no place.
                several = blocks[node.all_input_nodes[0]]
                at = node.args[1]
                blocks[node] = several[at : at + 1] if isinstance(at, int) else ()
            elif is_view(node) or node.target is _wait:
                blocks[node] = blocks[node.all_input_nodes[0]]
            elif self._fused and _stays_in_registers(node):
                blocks[node] = tuple(dict.fromkeys(sources))
            else:
                blocks[node] = _new(node, kinds)
        return blocks


def _new(node: Node, kinds: dict[Node, Kind]) -> Blocks:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return tuple(_Block(bytes_in(t), kinds.get(node, "temporary")) for t in tensors)


def _kinds(graph: Graph) -> dict[Node, Kind]:
    """What the memory is for that nodes compute and the graph keeps, or gathers."""
    kinds: dict[Node, Kind] = {}
    kept: Kind = "gradients" if graph.stage == "backward" else "activations"
    for output in graph.outputs():
        if isinstance(output, Node):
            kinds[_owner(output)] = kept
    kinds |= dict.fromkeys(graph.nodes(_all_gather), "gathered")
    return kinds


def _owner(node: Node) -> Node:
    """The node whose memory a view, a wait or one of several results lies in."""
    while is_view(node) or node.target in (_wait, operator.getitem):
        node = node.all_input_nodes[0]
    return node


def _last_reads(graph: Graph, blocks: dict[Node, Blocks]) -> dict[Node, list[_Block]]:
    """The memory that is free after each node; what the graph returns is not."""
    last: dict[_Block, Node] = {}
    for node in graph.fx.nodes:
        read = {block for source in node.all_input_nodes for block in blocks[source]}
        if node.target is _wait:
            # Its collective has read its own inputs until now.
            start = node.all_input_nodes[0]
            read |= {block for source in start.all_input_nodes for block in blocks[source]}
        for block in (*blocks[node], *read):
            last[block] = node
    free: dict[Node, list[_Block]] = {}
    for block, node in last.items():
        if node.op != "output":
            free.setdefault(node, []).append(block)
    return free


def _stays_in_registers(node: Node) -> bool:
    """Whether a compiler that fuses pointwise work never writes the node's result to memory."""
    return _is_pointwise(node) and all(_fuses(user) for user in node.users)


def _fuses(node: Node) -> bool:
    if is_view(node):
        return bool(node.users) and all(_fuses(user) for user in node.users)
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    return _is_pointwise(node) or name in _READS_FUSED


_READS_FUSED = ("sum", "mean", "amax", "amin", "var_mean", "cat", "_softmax", "_log_softmax")


def _is_pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or is_cast(node) or node.target is _full
