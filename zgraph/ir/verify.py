"""Verifier: rules that hold after every pass.

A rule is a small function that yields the nodes which break it; its docstring is the error's text.
Rules of one graph look at the graph alone; rules of a change compare it with what it was before
the pass.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from zgraph.errors import GraphError
from zgraph.ir import ops, show
from zgraph.ir.graph import Graph
from zgraph.ir.nodes import arguments, fake_result, is_cast, is_view, schema_of, written_by
from zgraph.ir.values import Change, Snapshot, gradients_in
from zgraph.layout import Buffer
from zgraph.plan import Plan

GraphRule = Callable[[Graph, Plan], Iterator[Node]]
ChangeRule = Callable[[Change], Iterator[Node]]


# -------------------------------------------------------------------------- rules of one graph


def nodes_are_in_order(graph: Graph, plan: Plan) -> Iterator[Node]:
    """A node reads only what earlier nodes computed, and the output comes last."""
    seen: set[Node] = set()
    for node in graph.fx.nodes:
        if not seen.issuperset(node.all_input_nodes):
            yield node
        if (node.op == "output") != (node.next.op == "root"):
            yield node
        seen.add(node)


def names_are_unique(graph: Graph, plan: Plan) -> Iterator[Node]:
    """Every node has a name of its own: the code that is generated from the graph goes by names."""
    seen: set[str] = set()
    for node in graph.fx.nodes:
        if node.name in seen:
            yield node
        seen.add(node.name)


def dialect_nodes_are_complete(graph: Graph, plan: Plan) -> Iterator[Node]:
    """A node of the dialect has all its arguments by position: the nodes that it reads, and what
    names a buffer of the layout."""
    buffers = {buffer.name for buffer in graph.layout.buffers}
    for node in graph.nodes(*ops.BUFFER_ARGUMENT, ops.wait):
        if not _is_complete(node, buffers):
            yield node


def _is_complete(node: Node, buffers: set[str]) -> bool:
    if node.kwargs or len(node.args) != len(schema_of(node).arguments):
        return False
    reads, offsets = arguments(node)[:2] if node.target is ops.pack else (node.args[:1], ())
    if not reads or not all(isinstance(read, Node) for read in reads):
        return False
    if node.target is ops.pack and len(reads) != len(offsets):
        return False
    return node.target is ops.wait or node.args[ops.BUFFER_ARGUMENT[node.target]] in buffers


def starts_are_waited_for_once(graph: Graph, plan: Plan) -> Iterator[Node]:
    """The result of a collective is read by exactly one wait, and by nothing else."""
    for node in graph.starts():
        if [user.target for user in node.users] != [ops.wait]:
            yield node


def waits_wait_for_a_collective(graph: Graph, plan: Plan) -> Iterator[Node]:
    """A wait reads the start of a collective."""
    for node in graph.waits():
        if node.all_input_nodes[0].target not in ops.STARTS:
            yield node


def waits_are_used(graph: Graph, plan: Plan) -> Iterator[Node]:
    """What a wait gives is read, if through views; what nothing reads is not started."""
    return (node for node in graph.waits() if not graph.aliases(node)[1])


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
        fits = fits and (buffer.persistent or node.target is ops.gather)
        if node.args[2:] != wanted or not fits:
            yield node


def scatters_fit_the_plan(graph: Graph, plan: Plan) -> Iterator[Node]:
    """Gradients are packed at their parameters' offsets, in the order of these, and reduced in
    their buffer's dtype."""
    for node in graph.nodes(ops.pack, ops.scatter, ops.reduce):
        buffer = graph.buffer_of(node)
        if node.target is ops.pack:
            fits = arguments(node)[3:] == (buffer.numel, buffer.reduce_dtype)
            fits = fits and _packs_in_order(node, buffer)
        else:
            value: Tensor = arguments(node)[0].meta["val"]
            numel = buffer.numel if node.target is ops.scatter else buffer.shard_numel
            fits = (value.numel(), value.dtype) == (numel, buffer.reduce_dtype)
        if not fits:
            yield node


def _packs_in_order(pack: Node, buffer: Buffer) -> bool:
    slots = {(slot.offset, slot.numel) for slot in buffer.slots}
    end = 0
    for grad, offset in zip(*arguments(pack)[:2], strict=True):
        numel = grad.meta["val"].numel()
        if (offset, numel) not in slots or offset < end:
            return False
        end = offset + numel
    return True


def gradients_are_averaged_once(graph: Graph, plan: Plan) -> Iterator[Node]:
    """A packed gradient is averaged once over each group of its buffer, then cast to the master
    dtype if that is another, and reaches the output."""
    outputs = {node for node in graph.outputs() if isinstance(node, Node)}
    for pack in graph.packs():
        buffer = graph.buffer_of(pack)
        shard = graph.groups.gather_group(buffer)
        wanted: list[Any] = [(ops.scatter, buffer.name, shard)] if shard else []
        wanted += [(ops.reduce, buffer.name, group) for group in graph.groups.sum_groups(buffer)]
        if buffer.reduce_dtype != buffer.master_dtype:
            wanted.append(buffer.master_dtype)
        found: list[Any] = []
        tail = graph.tail(pack)
        for node in tail:
            if node.target in (ops.scatter, ops.reduce):
                found.append((node.target, *node.args[1:]))
            elif is_cast(node):
                found.append(node.meta["val"].dtype)
        if found != wanted or [pack, *tail][-1] not in outputs:
            yield pack


def trained_parameters_have_gradients(graph: Graph, plan: Plan) -> Iterator[Node]:
    """The gradient of every parameter that was captured reaches the output, once a buffer."""
    if graph.stage not in ("joint", "backward"):
        return
    expected = {name: 1 for names in graph.trained.values() for name in names}
    # What is packed reaches the output, by the rule above. Before that, reads are not yet summed.
    found = Counter(name for pack in graph.packs() for name in _names_in(graph, pack))
    found.update({str(node.args[1]) for node in graph.nodes(ops.gradient)})
    if found != expected:
        yield graph.output()


def _names_in(graph: Graph, flat: Node) -> set[str]:
    return {name for name, _ in gradients_in(graph, flat)}


def gathered_buffers_stay_in_their_graph(graph: Graph, plan: Plan) -> Iterator[Node]:
    """No gathered buffer is saved from forward for backward, unless Reshard(False) says so."""
    if plan.reshard_after_forward:
        saved = set(graph.saved())
        for gather in graph.gathers():
            item = graph.gathered(gather)
            yield from (node for node in (item.wait, *item.views) if node in saved)


def gathered_memory_is_only_read(graph: Graph, plan: Plan) -> Iterator[Node]:
    """Nothing writes to gathered memory, which others read too, nor to the flat shards."""
    reads = graph.nodes(ops.parameter, ops.gather, ops.whole)
    memory = {*reads, *(read.all_input_nodes[0] for read in reads)}
    for node in graph.fx.nodes:
        if node.target is ops.wait or is_view(node):
            if node.all_input_nodes[0] in memory:
                memory.add(node)
        elif not memory.isdisjoint(written_by(node)):
            yield node


def live_bytes_stay_under_the_limit(graph: Graph, plan: Plan) -> Iterator[Node]:
    """No more gathered bytes are alive at once than the plan's max_live_bytes."""
    if plan.max_live_bytes is not None and graph.stage != "joint":
        over = (n for n, alive in graph.live_bytes() if alive > (plan.max_live_bytes or 0))
        yield from list(over)[:1]


# --------------------------------------------------------------------- rules of what a pass did


def inputs_are_unchanged(change: Change) -> Iterator[Node]:
    """A graph keeps its inputs, in their order: it is called with them by position."""
    before = [node for node in change.before.calls if node.op == "placeholder"]
    now = [node for node in change.graph.fx.nodes if node.op == "placeholder"]
    if now != before:
        moved = (node for node, was in zip(now, before, strict=False) if node is not was)
        yield next(moved, change.graph.output())


def new_nodes_have_values(change: Change) -> Iterator[Node]:
    """A new node has a fake value in node.meta["val"], where graph.call puts it; an old one keeps
    its own."""
    before = change.before.results
    for node in change.graph.fx.nodes:
        missing = node.op == "call_function" and "val" not in node.meta
        if missing and before.get(node, node) is not None:
            yield node


def new_nodes_are_what_they_say(change: Change) -> Iterator[Node]:
    """A new or changed node has a fake value of the shape, strides and dtype that its op gives."""
    before, after = change.before, change.after
    for node, call in after.calls.items():
        same = _same_call(before.calls.get(node), call)
        same = same and before.results[node] is after.results[node]
        if node.op != "call_function" or same:
            continue
        if _described(after.results[node]) != _described(_computed(node)):
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
        strides = value.stride() if value.layout == torch.strided else ()
        return (*map(str, (*value.shape, *strides)), value.dtype, value.device)
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
    equal = _stand_for_the_same if change.computes else operator.eq
    nodes = change.graph.outputs()
    for was, now, node in zip(before, after, nodes, strict=False):
        if not equal(was, now):
            yield node if isinstance(node, Node) else change.graph.output()
    if len(before) != len(after):
        yield change.graph.output()


def _stand_for_the_same(before: Any, after: Any) -> bool:
    """Whether two outputs are nothing, gradients of the same parameters, or any other result."""
    if isinstance(before, tuple) and isinstance(after, tuple):
        return {name for name, _ in before} == {name for name, _ in after}
    return (before is None) == (after is None)


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


# In order: what breaks several rules is named by the first of them.
RULES: tuple[tuple[tuple[GraphRule, ...], tuple[ChangeRule, ...]], ...] = (
    # The other rules read graphs that obey these.
    (
        (nodes_are_in_order, names_are_unique, dialect_nodes_are_complete),
        (inputs_are_unchanged, new_nodes_have_values),
    ),
    (
        (
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
        ),
        (
            new_nodes_are_what_they_say,
            shards_stay_with_their_buffers,
            compute_is_unchanged,
            outputs_are_unchanged,
            effects_keep_their_order,
            buffers_are_freed_between_uses,
        ),
    ),
    ((live_bytes_stay_under_the_limit,), ()),
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
    change = Change(graph, plan, before, computes)
    for graph_rules, change_rules in RULES:
        for rule in graph_rules:
            _check(graph, pass_name, rule, rule(graph, plan))
        for rule in change_rules:
            _check(graph, pass_name, rule, rule(change))
    return change.after


def verify_graph(graph: Graph, plan: Plan, made_by: str) -> None:
    """Check the rules of one graph alone. Raises as `verify` does, with `made_by` for the pass."""
    for graph_rules, _ in RULES:
        for rule in graph_rules:
            _check(graph, made_by, rule, rule(graph, plan))


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
    seen: set[Node] = set()  # in a broken graph they may read each other
    while node.target not in ops.BUFFER_ARGUMENT:
        seen.add(node)
        source = next(iter(node.all_input_nodes), node)
        if source in seen or not (node.target is ops.wait or is_view(node)):
            return ""
        node = source
    units = {buffer.name: buffer.unit for buffer in graph.layout.buffers}
    at = ops.BUFFER_ARGUMENT[node.target]
    return next((units.get(str(name), "") for name in node.args[at : at + 1]), "")
