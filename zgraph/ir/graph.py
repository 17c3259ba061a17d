"""Graph: the handle through which passes read and edit one `torch.fx.Graph`.

It knows the dialect of `zgraph.ir.ops`: which node gathers which buffer, who reads it, how many
gathered bytes are alive. Everything else is reachable as `graph.fx`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import Graph as FxGraph
from torch.fx import Node

from zgraph._torch import CheckpointPolicy
from zgraph.errors import GraphError, nearest
from zgraph.ir import ops, show
from zgraph.ir.nodes import arguments, bytes_of, fake_result, is_cast, is_view
from zgraph.layout import Buffer, Layout
from zgraph.plan import Axis
from zgraph.runtime.storage import Groups

Stage = Literal["joint", "forward", "backward", "inference"]

# The partitioner saves a recomputed node that a checkpointed region of a higher number reads, so
# that regions do not recompute each other. Parameters are read by regions of any number.
_REGION = 1 << 30


@dataclass(frozen=True)
class Gathered:
    """One gather with its wait, the views of what it gathered, and the nodes that read those."""

    gather: Node
    wait: Node
    views: tuple[Node, ...]
    uses: tuple[Node, ...]

    @property
    def last_read(self) -> Node:
        """Last node that reads the gathered memory; it is free after that node."""
        return max((self.wait, *self.views, *self.uses))


class Graph:
    """One graph at one stage.

    Passes read it through the methods below and edit it through `call`, the `move_…` and
    `replace` methods, which keep what a node says of itself (`node.meta`) true.

    Attributes:
        fx: the graph itself, for whatever this handle does not offer.
        stage: "joint" before the partition; "forward" and "backward" after it; "inference" for
            the whole of a graph captured without gradients, once its joint passes have run.
        layout: buffers, for names, sizes and units.
        groups: process groups by name, for which mesh axis a collective crosses.
        trained: names of the parameters whose gradients were captured, by buffer.
        user_outputs: how many of a forward graph's first outputs the model returns; the rest is
            saved for backward. None where nothing is saved.
    """

    def __init__(
        self,
        fx: FxGraph,
        stage: Stage,
        layout: Layout,
        groups: Groups | None = None,
        trained: Mapping[str, frozenset[str]] | None = None,
        user_outputs: int | None = None,
    ) -> None:
        self.fx = fx
        self.stage: Stage = stage
        self.layout = layout
        self.groups = groups or Groups()
        self.trained = dict(trained or {})
        self.user_outputs = user_outputs
        self._stamp = ""
        self._buffers = {buffer.name: buffer for buffer in layout.buffers}

    @contextmanager
    def edited_by(self, pass_name: str) -> Iterator[None]:
        """Stamp nodes created inside with the name of the pass that creates them."""
        self._stamp, before = pass_name, self._stamp
        try:
            yield
        finally:
            self._stamp = before

    def copy(self) -> "Graph":
        """A copy with nodes of its own: edits of one do not reach the other."""
        nodes = FxGraph()
        copied: Any = nodes.graph_copy(self.fx, {}, return_output_node=True)
        nodes.output(copied[0]).meta = dict(copied[1].meta)
        return Graph(nodes, self.stage, self.layout, self.groups, self.trained, self.user_outputs)

    # ------------------------------------------------------------------ reading

    def nodes(self, *targets: Any) -> list[Node]:
        """Calls of any of `targets`, in program order."""
        return [n for n in self.fx.nodes if n.op == "call_function" and n.target in targets]

    def gathers(self) -> list[Node]:
        """All-gather starts, in program order."""
        return self.nodes(ops.gather)

    def scatters(self) -> list[Node]:
        """Reduce-scatter starts, in program order."""
        return self.nodes(ops.scatter)

    def reduces(self) -> list[Node]:
        """All-reduce starts, in program order."""
        return self.nodes(ops.reduce)

    def packs(self) -> list[Node]:
        """Nodes that flatten a buffer's gradients, in program order."""
        return self.nodes(ops.pack)

    def starts(self) -> list[Node]:
        """Starts of any collective, in program order."""
        return self.nodes(*ops.STARTS)

    def waits(self) -> list[Node]:
        """Waits for any of these, in program order."""
        return self.nodes(ops.wait)

    def compute(self) -> list[Node]:
        """Nodes that compute: neither views nor nodes of the dialect, in program order."""
        calls = (node for node in self.fx.nodes if node.op == "call_function")
        return [node for node in calls if node.target not in ops.DIALECT and not is_view(node)]

    def units(self) -> list[str]:
        """Names of the units that the graph gathers, in order of their first gather."""
        return list(dict.fromkeys(self.unit_of(gather) for gather in self.gathers()))

    def buffer_of(self, node: Node) -> Buffer:
        """Buffer of a node of the dialect that names one (all but `wait`).

        Raises:
            GraphError: the node names none, or one that the layout does not have.
        """
        at = ops.BUFFER_ARGUMENT.get(node.target)
        if at is None:
            raise GraphError(f"{node.format_node()} names no buffer; it is not of the dialect")
        name = str(node.args[at])
        if name not in self._buffers:
            raise GraphError(
                f"{node.name} names the buffer {name!r}; {nearest(name, self._buffers)}"
            )
        return self._buffers[name]

    def unit_of(self, node: Node) -> str:
        """Unit of a node of the dialect that names a buffer. Raises as `buffer_of` does."""
        return self.buffer_of(node).unit

    def gathered(self, gather: Node) -> Gathered:
        """What belongs to one gather. Its wait must exist (a verifier rule).

        Raises:
            GraphError: the node is no gather, or is not read by one wait.
        """
        waits = list(gather.users)
        if gather.target is not ops.gather or [wait.target for wait in waits] != [ops.wait]:
            raise GraphError(f"{gather.format_node()} is not a gather that one wait reads")
        views, uses = self.aliases(waits[0])
        return Gathered(gather, waits[0], tuple(views), tuple(uses))

    def aliases(self, node: Node) -> tuple[list[Node], list[Node]]:
        """(views of the node's memory, the other nodes that read it), in program order."""
        views: dict[Node, None] = {}
        uses: dict[Node, None] = {}
        stack = [node]
        while stack:
            for user in stack.pop().users:
                if not is_view(user):
                    uses[user] = None
                elif user not in views:
                    views[user] = None
                    stack.append(user)
        return sorted(views), sorted(uses)

    def casts_and_views(self, root: Node) -> list[Node]:
        """Views and casts that are made of `root` alone, and of those again."""
        found, stack = [], [root]
        while stack:
            for user in stack.pop().users:
                if (is_view(user) or is_cast(user)) and len(user.all_input_nodes) == 1:
                    found.append(user)
                    stack.append(user)
        return found

    def tail(self, start: Node) -> list[Node]:
        """What follows a pack, or the start of a gradient's collective, to the output: waits,
        casts, and with HSDP a second collective. It ends before a node that is read twice."""
        found: list[Node] = []
        node = start
        while len(node.users) == 1 and (node := next(iter(node.users))).op != "output":
            found.append(node)
        return found

    def uses(self, unit: str) -> list[Node]:
        """Nodes that compute with the gathered parameters of `unit`, in program order."""
        found: dict[Node, None] = {}
        for gather in self.gathers():
            if self.unit_of(gather) == unit:
                found.update(dict.fromkeys(self.gathered(gather).uses))
        return sorted(found)

    def first_use(self, unit: str) -> Node | None:
        """First of `uses(unit)`, or None."""
        return next(iter(self.uses(unit)), None)

    def last_use(self, unit: str) -> Node | None:
        """Last of `uses(unit)`, or None."""
        uses = self.uses(unit)
        return uses[-1] if uses else None

    def positions(self) -> dict[Node, int]:
        """Program order of every node. Stale after any edit."""
        return {node: index for index, node in enumerate(self.fx.nodes)}

    def output(self) -> Node:
        """The output node."""
        return next(iter(reversed(self.fx.nodes)))

    def outputs(self) -> list[Any]:
        """What the graph returns: nodes, and None where there is nothing to return."""
        return list(arguments(self.output())[0])

    def saved(self) -> list[Node]:
        """What a forward graph saves for backward; empty at other stages."""
        if self.user_outputs is None or self.stage != "forward":
            return []
        return [node for node in self.outputs()[self.user_outputs :] if isinstance(node, Node)]

    def live_bytes(self) -> list[tuple[Node, int]]:
        """Gathered bytes alive at each node of the program, on this rank.

        A gathered buffer lives from the start of its gather to the last read of any view of it;
        one that is a graph output, saved for backward, lives to the end.
        """
        order = self.positions()
        change = [0] * (len(order) + 1)
        for gather in self.gathers():
            change[order[gather]] += bytes_of(gather)
            change[order[self.gathered(gather).last_read] + 1] -= bytes_of(gather)
        alive, total = [], 0
        for node, index in order.items():
            total += change[index]
            alive.append((node, total))
        return alive

    def peak_live_bytes(self) -> int:
        """Most gathered bytes alive at any node."""
        return max((total for _, total in self.live_bytes()), default=0)

    def axis_of(self, start: Node) -> Axis | None:
        """Mesh axis that a collective crosses; None for one rank."""
        return self.groups.axis(str(start.args[ops.GROUP_ARGUMENT[start.target]]))

    def moved_bytes(self, start: Node) -> int:
        """Bytes of the whole buffer that a collective gathers, or of the gradient it reduces."""
        return bytes_of(start if start.target is ops.gather else start.all_input_nodes[0])

    def text(self) -> str:
        """The program as Python-like code; see `zgraph.ir.show`."""
        return show.text(self)

    def __str__(self) -> str:
        return self.text()

    # ------------------------------------------------------------------ editing

    def call(
        self, target: Any, *args: Any, before: Node, role: str, name: str | None = None
    ) -> Node:
        """A new call of `target` in front of `before`, with its fake value computed and stamped.

        Args:
            role: what the node is for, in a word; kept in `node.meta["zgraph"]`.
            name: what to call the node; made unique, and by default named after `target`.
        """
        self._own(before)
        with self.fx.inserting_before(before):
            node = self.fx.create_node("call_function", target, args, name=name)
        node.meta["val"] = fake_result(target, args, {})
        node.meta["zgraph"] = {"role": role, "pass": self._stamp}
        return node

    def copy_before(self, nodes: Sequence[Node], anchor: Node) -> dict[Node, Node]:
        """Copies of `nodes`, given in program order, in front of `anchor`.

        Returns:
            The copy of each node. Copies read each other where the nodes read one another.
        """
        copies: dict[Node, Node] = {}
        for node in nodes:
            self._own(node, anchor)
            with self.fx.inserting_before(anchor):
                copies[node] = self.fx.node_copy(node, lambda source: copies.get(source, source))
        return copies

    def move_before(self, node: Node, anchor: Node) -> None:
        """Move `node` directly in front of `anchor`.

        Raises:
            GraphError: either is not a node of this graph, as after being erased.
        """
        self._own(node, anchor)
        if node is not anchor:
            anchor.prepend(node)

    def move_after(self, node: Node, anchor: Node) -> None:
        """Move `node` directly behind `anchor`. Raises as `move_before` does."""
        self._own(node, anchor)
        if node is not anchor:
            anchor.append(node)

    def replace(self, old: Node, new: Node) -> None:
        """Let every reader of `old` read `new`, and erase `old`. Raises as `move_before` does."""
        self._own(old, new)
        old.replace_all_uses_with(new, propagate_meta=False)
        self.fx.erase_node(old)

    def replace_input(self, reader: Node, old: Node, new: Node) -> None:
        """Let one reader of `old` read `new` instead. Raises as `move_before` does."""
        self._own(reader, new)
        reader.replace_input_with(old, new)

    def set_outputs(self, outputs: Sequence[Any]) -> None:
        """Return these nodes instead, None where there is nothing to return."""
        self.output().args = (tuple(outputs),)

    def recompute(self, nodes: Iterable[Node]) -> None:
        """In the joint graph: compute these nodes again in backward rather than save them."""
        _tag(nodes, CheckpointPolicy.MUST_RECOMPUTE)

    def save(self, nodes: Iterable[Node]) -> None:
        """In the joint graph: keep these nodes' results for backward."""
        _tag(nodes, CheckpointPolicy.MUST_SAVE)

    def finish(self) -> None:
        """Drop what nothing reads, and check the program order."""
        self.fx.eliminate_dead_code()
        self.fx.lint()

    def _own(self, *nodes: Node) -> None:
        for node in nodes:
            if node.graph is not self.fx or node._erased:
                raise GraphError(
                    f"{node.name} is not a node of this {self.stage} graph; nodes of an earlier "
                    "call, of another graph, or erased ones cannot be edited here"
                )


def _tag(nodes: Iterable[Node], policy: CheckpointPolicy) -> None:
    for node in nodes:
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = _REGION
