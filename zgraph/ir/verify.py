"""Verifier: rules that hold after every pass.

A rule is a small function that yields the nodes which break it; its docstring is the error's text.
Rules of one graph look at the graph alone; rules of a change compare it with what it was before
the pass.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.fx import Node

from zgraph.errors import GraphError
from zgraph.ir import ops, show
from zgraph.ir.graph import Graph, arguments, fake_result, is_view
from zgraph.ir.values import Values, gradients_in, values
from zgraph.plan import Plan


@dataclass(frozen=True)
class Snapshot:
    """What a graph was before a pass.

    Attributes:
        values: what it computed.
        calls: each node with what it called.
        shards: the graph input that each buffer is read from.
        late_reads: reads of a buffer after another unit was used.
    """

    values: Values
    calls: dict[Node, tuple[Any, Any, Any]]
    shards: dict[str, Node]
    late_reads: frozenset[Node]

    @staticmethod
    def of(graph: Graph, before: "Snapshot | None" = None) -> "Snapshot":
        """The snapshot of a graph that obeys the rules; `before` itself if nothing changed."""
        calls = {node: (node.target, node.args, node.kwargs) for node in graph.fx.nodes}
        if before is not None and list(calls.items()) == list(before.calls.items()):
            return before
        reads = graph.nodes(ops.parameter, ops.gather, ops.whole)
        shards = {graph.buffer_of(read).name: arguments(read)[0] for read in reads}
        return Snapshot(values(graph), calls, shards, frozenset(_late_reads(graph)))


@dataclass(frozen=True)
class Change:
    """A graph after a pass, and before it. `computes` is the pass's `changes_compute`."""

    graph: Graph
    plan: Plan
    before: Snapshot
    after: Snapshot
    computes: bool


GraphRule = Callable[[Graph, Plan], Iterator[Node]]
ChangeRule = Callable[[Change], Iterator[Node]]


# -------------------------------------------------------------------------- rules of one graph


def nodes_are_in_order(graph: Graph, plan: Plan) -> Iterator[Node]:
    """A node reads only what earlier nodes computed, and the output comes last."""
    seen: set[Node] = set()
    for node in graph.fx.nodes:
        if not seen.issuperset(node.all_input_nodes):
            yield node
        if node.op == "output" and node.next.op != "root":
            yield node
        seen.add(node)


def names_are_unique(graph: Graph, plan: Plan) -> Iterator[Node]:
    """Every node has a name of its own: the code that is generated from the graph goes by names."""
    seen: set[str] = set()
    for node in graph.fx.nodes:
        if node.name in seen:
            yield node
        seen.add(node.name)


def starts_are_waited_for_once(graph: Graph, plan: Plan) -> Iterator[Node]:
    """The result of a collective is read by exactly one wait, and by nothing else."""
    for node in graph.starts():
        if [user.target for user in node.users] != [ops.wait]:
            yield node


def waits_wait_for_a_collective(graph: Graph, plan: Plan) -> Iterator[Node]:
    """A wait reads the start of a collective."""
    for node in graph.waits():
        source = node.args[0]
        if not isinstance(source, Node) or source.target not in ops.STARTS:
            yield node


def waits_are_used(graph: Graph, plan: Plan) -> Iterator[Node]:
    """What a wait gives is read; a collective whose result nothing reads is not started."""
    return (node for node in graph.waits() if not node.users)


def captured_ops_are_replaced(graph: Graph, plan: Plan) -> Iterator[Node]:
    """Reads of parameters and their gradients became gathers and scatters in the joint graph."""
    if graph.stage != "joint":
        yield from graph.nodes(ops.parameter, ops.gradient)


def gathers_fit_the_plan(graph: Graph, plan: Plan) -> Iterator[Node]:
    """A gather, or a read of a persistent buffer, has its buffer's size, dtype and group."""
    for node in graph.nodes(ops.gather, ops.whole):
        buffer = graph.buffer_of(node)
        wanted: tuple[Any, ...] = (buffer.param_dtype,)
        if node.target is ops.gather:
            wanted = (buffer.numel, buffer.param_dtype, graph.groups.gather_group(buffer))
        shard: Node = arguments(node)[0]
        fits = shard.op == "placeholder" and shard.meta["val"].shape == (buffer.shard_numel,)
        if node.args[2:] != wanted or not fits:
            yield node


def scatters_fit_the_plan(graph: Graph, plan: Plan) -> Iterator[Node]:
    """Gradients are packed at their parameters' offsets and reduced in their buffer's dtype."""
    for node in graph.nodes(ops.pack, ops.scatter, ops.reduce):
        buffer = graph.buffer_of(node)
        if node.target is ops.pack:
            slots = {(slot.offset, slot.numel) for slot in buffer.slots}
            grads, offsets, _, numel, dtype = arguments(node)
            fits = (numel, dtype) == (buffer.numel, buffer.reduce_dtype) and all(
                (offset, grad.meta["val"].numel()) in slots
                for grad, offset in zip(grads, offsets, strict=True)
            )
        else:
            value: Tensor = arguments(node)[0].meta["val"]
            numel = buffer.numel if node.target is ops.scatter else buffer.shard_numel
            fits = (value.numel(), value.dtype) == (numel, buffer.reduce_dtype)
        if not fits:
            yield node


def gradients_are_averaged_once(graph: Graph, plan: Plan) -> Iterator[Node]:
    """A packed gradient is averaged once over each group of its buffer, and reaches the output."""
    outputs = {node for node in graph.outputs() if isinstance(node, Node)}
    for pack in graph.packs():
        buffer = graph.buffer_of(pack)
        shard = graph.groups.gather_group(buffer)
        wanted = [(ops.scatter, shard)] if shard else []
        wanted += [(ops.reduce, group) for group in graph.groups.sum_groups(buffer)]
        found, node = [], pack
        while len(node.users) == 1 and node not in outputs:
            (node,) = node.users
            if node.target in (ops.scatter, ops.reduce):
                found.append((node.target, node.args[2]))
        if found != wanted or node not in outputs:
            yield pack


def trained_parameters_have_gradients(graph: Graph, plan: Plan) -> Iterator[Node]:
    """The gradient of every parameter that was captured reaches the output, once a buffer."""
    if graph.stage not in ("joint", "backward"):
        return
    expected = {name: 1 for names in graph.trained.values() for name in names}
    found = Counter(name for output in graph.outputs() for name in _packed_upstream(graph, output))
    if found != expected:
        yield graph.output()


def _packed_upstream(graph: Graph, output: Any) -> set[str]:
    """Parameters whose packed gradients an output depends on."""
    names: set[str] = set()
    stack = [output] if isinstance(output, Node) else []
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node.target in (ops.pack, ops.gradient):
            names |= {name for name, _ in gradients_in(graph, node)}
            continue
        fresh = [source for source in node.all_input_nodes if source not in seen]
        seen.update(fresh)
        stack += fresh
    return names


def gathered_buffers_stay_in_their_graph(graph: Graph, plan: Plan) -> Iterator[Node]:
    """No gathered buffer is saved from forward for backward, unless Reshard(False) says so."""
    if plan.reshard_after_forward:
        saved = set(graph.saved())
        for gather in graph.gathers():
            item = graph.gathered(gather)
            yield from (node for node in (item.wait, *item.views) if node in saved)


def gathered_memory_is_only_read(graph: Graph, plan: Plan) -> Iterator[Node]:
    """Nothing writes to gathered memory: another reader would see it, and it is not the shard."""
    for gather in graph.gathers():
        item = graph.gathered(gather)
        memory = {item.wait, *item.views}
        yield from (node for node in item.uses if _writes(node, memory))


def _writes(node: Node, memory: set[Node]) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    written = (given.get(a.name) for a in schema.arguments if a.is_write)
    return any(isinstance(value, Node) and value in memory for value in written)


def live_bytes_stay_under_the_limit(graph: Graph, plan: Plan) -> Iterator[Node]:
    """No more gathered bytes are alive at once than the plan's max_live_bytes."""
    if plan.max_live_bytes is not None and graph.stage != "joint":
        over = (n for n, alive in graph.live_bytes() if alive > (plan.max_live_bytes or 0))
        yield from list(over)[:1]


# --------------------------------------------------------------------- rules of what a pass did


def new_nodes_are_what_they_say(change: Change) -> Iterator[Node]:
    """A new or changed node has a fake value of the shape and dtype that its op gives."""
    for node, call in change.after.calls.items():
        if node.op != "call_function" or _same_call(change.before.calls.get(node), call):
            continue
        value = node.meta.get("val")
        if value is None or _described(value) != _described(_computed(node)):
            yield node


def _same_call(before: Any, after: Any) -> bool:
    return before is not None and before[0] is after[0] and before[1:] == after[1:]


def _computed(node: Node) -> Any:
    try:
        return fake_result(node.target, node.args, node.kwargs)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        return error


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(map(str, value.shape)), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value)


def shards_stay_with_their_buffers(change: Change) -> Iterator[Node]:
    """A buffer is read from the flat shard from which it was read before."""
    shards = change.before.shards
    for node in change.graph.nodes(ops.gather, ops.whole):
        if shards.get(change.graph.buffer_of(node).name) is not node.args[0]:
            yield node


def compute_is_unchanged(change: Change) -> Iterator[Node]:
    """A schedule pass moves nodes and changes no computation; a joint pass that does says so by
    changes_compute=True."""
    if change.computes:
        return
    before, after = change.before.values.compute, change.after.values.compute
    for value, nodes in after.items():
        if len(nodes) > len(before.get(value, ())):
            yield nodes[-1]
    for value, nodes in before.items():
        # One that is still there is no longer needed: what became of the outputs says why.
        gone = all(change.after.values.of.get(node) != value for node in nodes)
        if gone and len(nodes) > len(after.get(value, ())):
            yield change.graph.output()


def outputs_are_unchanged(change: Change) -> Iterator[Node]:
    """A pass leaves what the graph returns as it was: results, saved values and gradients."""
    before, after = change.before.values.outputs, change.after.values.outputs
    if change.computes:
        fits = [value is None for value in before] == [value is None for value in after]
    else:
        fits = before == after
    if not fits:
        yield change.graph.output()


def effects_keep_their_order(change: Change) -> Iterator[Node]:
    """Random numbers are drawn, and memory is written, in the order of the captured program."""
    if change.computes:
        return
    before, after = change.before.values.effects, change.after.values.effects
    for (value, _), (now, node) in zip(before, after, strict=False):
        if value != now:
            yield node
            return
    if len(before) != len(after):
        yield after[-1][1] if len(after) > len(before) else change.graph.output()


def buffers_are_freed_between_uses(change: Change) -> Iterator[Node]:
    """With keep_between_uses=False nothing reads a buffer once another unit was used after it."""
    if not change.plan.keep_between_uses:
        # Reads that stood there before are split by Reshard, whose turn may come yet.
        yield from sorted(change.after.late_reads - change.before.late_reads)


def _late_reads(graph: Graph) -> Iterator[Node]:
    if graph.stage == "joint":
        return
    items = [graph.gathered(gather) for gather in graph.gathers()]
    firsts = sorted((item.uses[0], graph.unit_of(item.gather)) for item in items if item.uses)
    for item in items:
        unit = graph.unit_of(item.gather)
        for earlier, later in pairwise(item.uses):
            if any(earlier < first < later and other != unit for first, other in firsts):
                yield later


ORDER: GraphRule = nodes_are_in_order
GRAPH_RULES: tuple[GraphRule, ...] = (
    names_are_unique,
    starts_are_waited_for_once,
    waits_wait_for_a_collective,
    waits_are_used,
    captured_ops_are_replaced,
    gathers_fit_the_plan,
    scatters_fit_the_plan,
    gradients_are_averaged_once,
    gathered_buffers_stay_in_their_graph,
    gathered_memory_is_only_read,
    trained_parameters_have_gradients,
)
CHANGE_RULES: tuple[ChangeRule, ...] = (
    new_nodes_are_what_they_say,
    shards_stay_with_their_buffers,
    compute_is_unchanged,
    outputs_are_unchanged,
    effects_keep_their_order,
    buffers_are_freed_between_uses,
)


def verify(graph: Graph, plan: Plan, pass_name: str, before: Snapshot, computes: bool) -> Snapshot:
    """Check every rule after a pass.

    Args:
        before: the graph before the pass.
        computes: whether the pass says that it changes what is computed.

    Returns:
        The graph as it is now, for the next pass.

    Raises:
        GraphError: names the pass, the rule, the node and its unit, and shows the graph around it.
    """
    _check(graph, pass_name, ORDER, ORDER(graph, plan))
    for rule in GRAPH_RULES:
        _check(graph, pass_name, rule, rule(graph, plan))
    after = Snapshot.of(graph, before)
    change = Change(graph, plan, before, after, computes)
    for rule in CHANGE_RULES:
        _check(graph, pass_name, rule, rule(change))
    # Last: what breaks another rule too is better named by that one.
    limit = live_bytes_stay_under_the_limit
    _check(graph, pass_name, limit, limit(graph, plan))
    return after


def _check(graph: Graph, pass_name: str, rule: Callable[..., Any], broken: Iterator[Node]) -> None:
    node = next(broken, None)
    if node is None:
        return
    unit = _unit_around(graph, node)
    of_unit = f" of unit {unit}" if unit else ""
    text = " ".join(str(rule.__doc__).split())
    raise GraphError(
        f"{pass_name} broke the rule {rule.__name__} in the {graph.stage} graph: {text} "
        f"It is broken at {node.name}{of_unit}; the graph around it:\n{show.around(graph, node)}"
    )


def _unit_around(graph: Graph, node: Node) -> str:
    """Unit of a node, or of the gather or pack that it reads through views and waits; or ""."""
    while node.target not in ops.BUFFER_ARGUMENT:
        if not (node.target is ops.wait or is_view(node)) or not node.all_input_nodes:
            return ""
        node = node.all_input_nodes[0]
    return graph.unit_of(node)
