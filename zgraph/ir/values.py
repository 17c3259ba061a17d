"""Values: what a graph computes, told apart from when it computes it and how parameters arrive.

Each node gets a value: a hash of its op and of the values that it reads. Whatever gathers a
parameter has the value of the parameter itself, and a flat gradient is the gradients packed in it.
Draws of random numbers that are written alike are told apart by their order, and memory that is
written has another value from there on. So two graphs that differ in schedule, in what is gathered
together, or in the level of the dialect in which they are written, have the same values; one with
another operand somewhere has not.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from zgraph.ir import ops
from zgraph.ir.graph import Graph
from zgraph.ir.nodes import arguments, is_cast, is_view, summands, written_by
from zgraph.plan import Plan

_aten = torch.ops.aten


@dataclass(frozen=True)
class Values:
    """What one graph computes. Two of one process may be compared; hashes differ elsewhere.

    Attributes:
        of: value of each node.
        compute: nodes that compute something, by value. Neither views nor communication count,
            nor does what no output depends on.
        outputs: value of each output; of a flat gradient, the (parameter, gradient)s packed in it.
        effects: (value, node) of random and writing nodes, in program order.
    """

    of: dict[Node, int]
    compute: dict[int, list[Node]]
    outputs: tuple[Any, ...]
    effects: tuple[tuple[int, Node], ...]


def values(graph: Graph) -> Values:
    """The values of a graph whose nodes are in order."""
    of, impure = _number(graph)
    outputs: list[Any] = []
    needed: list[Node] = []
    for output in graph.outputs():
        packed = list(gradients_in(graph, output)) if isinstance(output, Node) else []
        if packed:
            outputs.append(tuple(sorted((name, of[grad]) for name, grad in packed)))
            needed += [grad for _, grad in packed]
        else:
            outputs.append(_key(of, output))
            needed += [output] if isinstance(output, Node) else []
    compute: dict[int, list[Node]] = {}
    for node in _upstream(needed):
        if node.op == "call_function" and node.target not in ops.DIALECT and not is_view(node):
            compute.setdefault(of[node], []).append(node)
    return Values(of, compute, tuple(outputs), tuple((of[node], node) for node in impure))


@dataclass(frozen=True)
class Snapshot:
    """What a graph was before a pass.

    Attributes:
        values: what it computed.
        calls: each node with what it called.
        results: the fake value of each node.
        shards: the graph input that each buffer is read from.
        late_reads: reads of a buffer after another unit was used.
    """

    values: Values
    calls: dict[Node, tuple[Any, Any, Any]]
    results: dict[Node, Any]
    shards: dict[str, Node]
    late_reads: frozenset[Node]

    @staticmethod
    def of(graph: Graph, before: "Snapshot | None" = None) -> "Snapshot":
        """The snapshot of a graph that obeys the rules; `before` itself if nothing changed."""
        calls = {node: (node.target, node.args, node.kwargs) for node in graph.fx.nodes}
        results = {node: node.meta.get("val") for node in graph.fx.nodes}
        if before is not None and list(calls.items()) == list(before.calls.items()):
            then = before.results
            if all(value is then[node] for node, value in results.items()):
                return before
        reads = graph.nodes(ops.parameter, ops.gather, ops.whole)
        shards = {graph.buffer_of(read).name: arguments(read)[0] for read in reads}
        return Snapshot(values(graph), calls, results, shards, frozenset(_late_reads(graph)))


@dataclass(frozen=True)
class Change:
    """A graph after a pass, and before it. `computes` is the pass's `changes_compute`."""

    graph: Graph
    plan: Plan
    before: Snapshot
    computes: bool

    @cached_property
    def after(self) -> Snapshot:
        """The graph as it is now. It obeys the rules of one graph."""
        return Snapshot.of(self.graph, self.before)


def gradients_in(graph: Graph, flat: Node) -> Iterator[tuple[str, Node]]:
    """(parameter, its gradient before packing) for all that reached a flat gradient.

    A gradient that is a sum over several reads of its parameter is given as its terms. Nothing is
    given for a node that is no flat gradient, or is one to which something else was done.
    """
    if flat.target is ops.gradient:
        yield str(flat.args[1]), flat.all_input_nodes[0]
    elif summands(flat):
        terms = [list(gradients_in(graph, term)) for term in summands(flat)]
        if all(terms):
            yield from (gradient for term in terms for gradient in term)
    elif flat.target is ops.pack:
        # An empty parameter has the offset of the one behind it.
        slots = {(slot.offset, slot.numel): slot.name for slot in graph.buffer_of(flat).slots}
        grads, offsets = arguments(flat)[:2]
        for grad, offset in zip(grads, offsets, strict=True):
            name = slots.get((offset, grad.meta["val"].numel()), f"offset {offset}")
            yield from ((name, term) for term in _terms(grad))
    elif flat.target in (ops.scatter, ops.reduce, ops.wait) or is_cast(flat):
        yield from gradients_in(graph, flat.all_input_nodes[0])


def _terms(grad: Node) -> Iterator[Node]:
    """What `Partition` added up to make one parameter's gradient; see its role "sum"."""
    if summands(grad) and grad.meta.get("zgraph", {}).get("role") == "sum":
        for term in summands(grad):
            yield from _terms(term)
    else:
        yield grad


def _number(graph: Graph) -> tuple[dict[Node, int], list[Node]]:
    """The value of each node; and the random and writing ones, in program order."""
    of: dict[Node, int] = {}
    impure: list[Node] = []
    drawn: Counter[Any] = Counter()
    impurity: dict[Any, tuple[bool, bool]] = {}  # by op: whether it draws or writes; it writes
    owner: dict[Node, Node] = {}  # the node that made the memory of a view, or of what is written
    alike: dict[Node, list[Node]] = {}  # by that node: all that share the memory
    slots = {
        (buffer.name, slot.offset, slot.offset + slot.numel): slot
        for buffer, slot in graph.layout.slots()
    }
    flats: dict[Node, str] = {}  # gathered or persistent memory: the buffer's name
    parts: dict[Node, Any] = {}  # the slot that a slice of such memory is
    for node in graph.fx.nodes:
        if node.op == "output":
            continue
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        if node.target in (ops.gather, ops.whole):
            flats[node] = str(node.args[1])
            key: Any = "flat", flats[node], arguments(node)[2 if node.target is ops.whole else 3]
        elif node.target is ops.wait and source in flats:
            flats[node] = flats[source]
            key = "flat", flats[source], of[source]
        elif node.target is ops.parameter:
            key = "parameter", node.args[1]
        elif node.target is _aten.slice.Tensor and source in flats and node.args[1] == 0:
            parts[node] = slots.get((flats[source], *node.args[2:4]))
            key = "slice", flats[source], _key(of, node.args[2:])
        elif node.target is _aten.view.default and _is_whole_slot(parts.get(source), node):
            key = "parameter", parts[source].name
        elif node.op in ("placeholder", "get_attr"):
            key = node.op, node.target
        else:
            key = str(node.target), _key(of, node.args), _key(of, node.kwargs)
        if node.op == "call_function" and node.target not in impurity:
            impurity[node.target] = node.is_impure(), bool(written_by(node))
        acts, writes = impurity.get(node.target, (False, False))
        if acts:
            impure.append(node)
            key = key, drawn[key]
            drawn[key[0]] += 1
        of[node] = value = hash(key)
        written = written_by(node) if writes else []
        shared: Node = written[0] if written else source if is_view(node) else node
        owner[node] = owner.get(shared) or node
        alike.setdefault(owner[node], []).append(node)
        for memory in written:
            for other in alike[owner[memory]]:
                of[other] = hash((of[other], "written", value))
    return of, impure


def _is_whole_slot(slot: Any, view: Node) -> bool:
    return slot is not None and tuple(arguments(view)[1]) == slot.shape


def _key(of: dict[Node, int], value: Any) -> Any:
    if isinstance(value, Node):
        return of.get(value)
    if isinstance(value, (list, tuple)):
        return tuple(_key(of, item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _key(of, item)) for key, item in value.items())
    return None if value is None else repr(value)  # numbers too: hash(-1) == hash(-2)


def _late_reads(graph: Graph) -> Iterator[Node]:
    if graph.stage == "joint":
        return
    at = graph.positions()
    items = [graph.gathered(gather) for gather in graph.gathers()]
    firsts = sorted((at[item.uses[0]], graph.unit_of(item.gather)) for item in items if item.uses)
    places = [place for place, _ in firsts]
    for item in items:
        unit = graph.unit_of(item.gather)
        for earlier, later in pairwise(item.uses):
            between = firsts[bisect_right(places, at[earlier]) : bisect_left(places, at[later])]
            if any(other != unit for _, other in between):
                yield later


def _upstream(roots: list[Node]) -> Iterator[Node]:
    """The roots and every node that they depend on."""
    seen = set(roots)
    stack = list(seen)
    while stack:
        node = stack.pop()
        yield node
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
