"""Graph: the handle through which passes read and edit one `torch.fx.Graph`.

It knows the dialect of `zgraph.ir.ops`: which node gathers which buffer, who reads it, how many
gathered bytes are alive. Everything else is reachable as `graph.fx`.
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from zgraph._torch import OpOverload, detect_fake_mode, pytree
from zgraph.ir import ops
from zgraph.layout import Layout

Stage = Literal["joint", "forward", "backward", "inference"]

_CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
# Ops that return a view of their input without saying so in their schema.
_UNMARKED_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)


def is_view(node: Node) -> bool:
    """Whether the node's result shares memory with its first input."""
    target = node.target
    if node.op != "call_function":
        return False
    if target is operator.getitem:  # one of the views that a split returns
        return is_view(node.all_input_nodes[0])
    return target in _UNMARKED_VIEWS or (isinstance(target, OpOverload) and target.is_view)


def is_cast(node: Node) -> bool:
    """Whether the node only changes its input's dtype."""
    return node.op == "call_function" and node.target in _CASTS


def arguments(node: Node) -> tuple[Any, ...]:
    """The node's positional arguments, of the types that the op's schema says."""
    return node.args


def bytes_of(node: Node) -> int:
    """Bytes of the node's result, a tensor of static size."""
    value: Tensor = node.meta["val"]
    return int(value.numel()) * value.dtype.itemsize


@dataclass(frozen=True)
class Gathered:
    """One gather with its wait and the views of what it gathered."""

    gather: Node
    wait: Node
    views: tuple[Node, ...]
    uses: tuple[Node, ...]


class Graph:
    """One graph at one stage.

    Attributes:
        module: the graph module that owns `fx`.
        stage: "joint" before the partition; "forward" and "backward" after it; "inference" for
            the whole of a graph captured without gradients, once its joint passes have run.
        layout: buffers, for names, sizes and units.
        user_outputs: how many of a forward graph's first outputs the model returns; the rest is
            saved for backward. None where nothing is saved.
    """

    def __init__(self, module: GraphModule, stage: Stage, layout: Layout) -> None:
        self.module = module
        self.stage: Stage = stage
        self.layout = layout
        self.user_outputs: int | None = None
        self._stamp = ""
        self._units = {buffer.name: buffer.unit for buffer in layout.buffers}

    @property
    def fx(self) -> FxGraph:
        """The graph itself, for whatever this handle does not offer."""
        return self.module.graph

    @contextmanager
    def edited_by(self, pass_name: str) -> Iterator[None]:
        """Stamp nodes created inside with the name of the pass that creates them."""
        self._stamp, before = pass_name, self._stamp
        try:
            yield
        finally:
            self._stamp = before

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

    def waits(self) -> list[Node]:
        """Waits for any of these, in program order."""
        return self.nodes(ops.wait)

    def unit_of(self, node: Node) -> str:
        """Unit of a node of the dialect that names a buffer."""
        later = node.target in (ops.pack, ops.parameter, ops.gradient)
        return self._units[str(node.args[2 if later else 1])]

    def gathered(self, gather: Node) -> Gathered:
        """What belongs to one gather. Its wait must exist (a verifier rule)."""
        (wait,) = gather.users
        views, uses = self.aliases(wait)
        return Gathered(gather, wait, tuple(views), tuple(uses))

    def aliases(self, node: Node) -> tuple[list[Node], list[Node]]:
        """(views of the node's memory, the other nodes that read it), in program order."""
        views: list[Node] = []
        uses: dict[Node, None] = {}
        seen = {node}
        for candidate in self._from(node):
            if not any(source in seen for source in candidate.all_input_nodes):
                continue
            if is_view(candidate):
                seen.add(candidate)
                views.append(candidate)
            else:
                uses[candidate] = None
        return views, list(uses)

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

    def live_bytes(self) -> list[tuple[Node, int]]:
        """Gathered bytes alive after each node of the program, on this rank.

        A gathered buffer lives from the start of its gather to the last read of any view of it;
        one that is a graph output, saved for backward, lives to the end.
        """
        order = self.positions()
        change = [0] * (len(order) + 1)
        for gather in self.gathers():
            item = self.gathered(gather)
            last = max([order[node] for node in (item.wait, *item.views, *item.uses)])
            change[order[gather]] += bytes_of(gather)
            change[last] -= bytes_of(gather)
        alive, total = [], 0
        for node, index in order.items():
            # A buffer whose last read is this node is still alive while the node runs.
            freed = min(change[index], 0)
            total += change[index] - freed
            alive.append((node, total))
            total += freed
        return alive

    def peak_live_bytes(self) -> int:
        """Most gathered bytes alive at any node."""
        return max((total for _, total in self.live_bytes()), default=0)

    def text(self) -> str:
        """The program, one statement a line, with the live gathered bytes at the right."""
        live = dict(self.live_bytes())
        lines = []
        for node in self.fx.nodes:
            statement = node.format_node()
            if statement is not None:
                lines.append(f"{statement:<120} # live {live[node]:,} B")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    # ------------------------------------------------------------------ editing

    def call(self, target: Any, *args: Any, before: Node, role: str) -> Node:
        """A new call of `target` in front of `before`, with its fake value computed and stamped."""
        with self.fx.inserting_before(before):
            node = self.fx.call_function(target, args)
        node.meta["val"] = self._fake(target, args)
        node.meta["zgraph"] = {"role": role, "pass": self._stamp}
        return node

    def move_before(self, node: Node, anchor: Node) -> None:
        """Move `node` directly in front of `anchor`."""
        if node is not anchor:
            anchor.prepend(node)

    def move_after(self, node: Node, anchor: Node) -> None:
        """Move `node` directly behind `anchor`."""
        if node is not anchor:
            anchor.append(node)

    def replace(self, old: Node, new: Node) -> None:
        """Let every reader of `old` read `new`, and erase `old`."""
        old.replace_all_uses_with(new, propagate_meta=False)
        self.fx.erase_node(old)

    def finish(self) -> None:
        """Drop what nothing reads, check the program order, and recompile the module."""
        self.fx.eliminate_dead_code()
        self.fx.lint()
        self.module.recompile()

    def _from(self, node: Node) -> Iterator[Node]:
        current = node.next
        while current.op != "root":
            yield current
            current = current.next

    def _fake(self, target: Any, args: Sequence[Any]) -> Any:
        values = pytree.tree_map_only(Node, lambda node: node.meta["val"], tuple(args))
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        mode = detect_fake_mode(tensors)
        if mode is None:
            raise AssertionError(f"{target} was called on values without a fake tensor mode")
        with mode:
            return target(*values)
