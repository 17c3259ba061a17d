"""Partition: parameters become shards; reading one becomes a gather, its gradient a scatter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from zgraph.errors import PassError, nearest
from zgraph.ir import ops
from zgraph.ir.graph import Graph
from zgraph.ir.nodes import arguments, is_cast, summands
from zgraph.layout import Buffer
from zgraph.passes.base import Pass
from zgraph.plan import Plan

Ignore = Sequence[str] | Callable[[str], bool]


@dataclass(frozen=True)
class Partition(Pass):
    """Split every parameter over a mesh axis.

    With one axis this is ZeRO-3 or FULL_SHARD; with `replicate` too it is HSDP: shards are split
    over `shard` and repeated over `replicate`, and gradients are averaged over both.

    In the joint graph, the reads of one buffer's parameters become one `gather`, its `wait` and
    views; their gradients become one `pack`, `scatter` (then a `reduce` over `replicate`) and
    `wait`. Persistent buffers are read whole, and their gradients are only reduced. In the
    schedule, a gather stands directly before its first use, a scatter directly after its last
    gradient, and a scatter is waited for when the next one starts.

    Args:
        shard: name of the mesh axis to split over.
        replicate: name of the mesh axis to repeat over, or None.
        ignore: names of parameters or modules, or a predicate on parameter names. These stay
            ordinary parameters: not split, not moved, not reduced.

    Raises:
        PassError: the mesh has no such axis, or `ignore` names nothing.
    """

    name: ClassVar[str] = "partition"
    provides: ClassVar[frozenset[str]] = frozenset({"gathers"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"gathers"})

    shard: str = "shard"
    replicate: str | None = None
    ignore: Ignore = ()

    def __post_init__(self) -> None:
        if isinstance(self.ignore, str):
            raise PassError(f"Partition(ignore={self.ignore!r}): expected a list of names")
        if not callable(self.ignore):
            object.__setattr__(self, "ignore", tuple(self.ignore))

    def plan(self, plan: Plan) -> Plan:
        ignored = self._ignored(plan)
        marked = tuple(replace(p, partitioned=p.name not in ignored) for p in plan.parameters)
        return plan.changed(parameters=marked)

    def joint(self, graph: Graph, plan: Plan) -> None:
        for buffer in graph.layout.buffers:
            _insert_gather(graph, buffer)
        _insert_scatters(graph)
        graph.finish()

    def schedule(self, graph: Graph, plan: Plan) -> None:
        for node in graph.nodes(ops.whole):
            _sink(graph, [node, *graph.aliases(node)[0]])
        for gather in graph.gathers():
            item = graph.gathered(gather)
            _sink(graph, [item.gather, item.wait, *item.views])
        _pipeline_scatters(graph)
        graph.finish()

    def _ignored(self, plan: Plan) -> set[str]:
        if callable(self.ignore):
            return {p.name for p in plan.parameters if self.ignore(p.name)}
        chosen: set[str] = set()
        known = [*plan.canonical, *(m.name for m in plan.modules if m.name)]
        for wanted in self.ignore:
            found = {
                canonical
                for name, canonical in plan.canonical.items()
                if name == wanted or name.startswith(f"{wanted}.")
            }
            if not found:
                raise PassError(
                    f"Partition(ignore=[{wanted!r}]) matches nothing; {nearest(wanted, known)}"
                )
            chosen |= found
        return chosen


def _insert_gather(graph: Graph, buffer: Buffer) -> None:
    """One gather, or one read of a persistent buffer, for all reads of the buffer's parameters."""
    reads = [n for n in graph.nodes(ops.parameter) if n.args[2] == buffer.name]
    if not reads:
        return
    first, shard = reads[0], reads[0].args[0]
    if buffer.persistent:
        flat = graph.call(
            ops.whole,
            shard,
            buffer.name,
            buffer.param_dtype,
            before=first,
            role="whole",
            name=f"whole_{buffer.name}",
        )
    else:
        group = arguments(first)[7]
        pending = graph.call(
            ops.gather,
            shard,
            buffer.name,
            buffer.numel,
            buffer.param_dtype,
            group,
            before=first,
            role="gather",
            name=f"gather_{buffer.name}",
        )
        name = f"gathered_{buffer.name}"
        flat = graph.call(ops.wait, pending, before=first, role="wait", name=name)
    aten = torch.ops.aten
    for read in reads:
        name, _, shape, offset = arguments(read)[1:5]
        end = offset + torch.Size(shape).numel()
        part = graph.call(
            aten.slice.Tensor, flat, 0, offset, end, before=read, role="view", name=f"{name}_flat"
        )
        view = graph.call(
            aten.view.default, part, list(shape), before=read, role="view", name=str(name)
        )
        graph.replace(read, view)


def _insert_scatters(graph: Graph) -> None:
    """One pack and its collectives for all gradients of each flat shard."""
    outputs = graph.outputs()
    for index, node in enumerate(outputs):
        if not isinstance(node, fx.Node):
            continue
        gradients = _gradients_in(node)
        if not gradients:
            continue
        outputs[index] = _insert_scatter(graph, gradients)
    graph.set_outputs(outputs)


def _gradients_in(node: fx.Node) -> list[fx.Node]:
    """The `gradient` nodes whose sum `node` is; none if it is something else."""
    if node.target is ops.gradient:
        return [node]
    terms = [_gradients_in(term) for term in summands(node)]
    return [leaf for term in terms for leaf in term] if all(terms) else []


def _insert_scatter(graph: Graph, gradients: list[fx.Node]) -> fx.Node:
    """Pack these gradients of one buffer and average them; returns the flat piece gradient."""
    buffer = next(b for b in graph.layout.buffers if b.name == gradients[0].args[2])
    group, sum_groups = arguments(gradients[0])[7:9]
    before = max(gradients)
    whole: dict[str, fx.Node] = {}
    # Two uses of one parameter, tied or not, are summed in compute dtype, as autograd does.
    for node in sorted(gradients):
        grad, name = arguments(node)[:2]
        if name in whole:
            add = torch.ops.aten.add.Tensor
            grad = graph.call(add, whole[name], grad, before=before, role="sum")
        whole[name] = grad
    slots = [slot for slot in buffer.slots if slot.name in whole]
    flat = graph.call(
        ops.pack,
        [whole[slot.name] for slot in slots],
        [slot.offset for slot in slots],
        buffer.name,
        buffer.numel,
        buffer.reduce_dtype,
        before=before,
        role="pack",
        name=f"pack_{buffer.name}",
    )
    steps = [(ops.scatter, group)] if group else []
    steps += [(ops.reduce, other) for other in sum_groups]
    for op, name in steps:
        role = "scatter" if op is ops.scatter else "reduce"
        pending = graph.call(
            op, flat, buffer.name, name, before=before, role=role, name=f"{role}_{buffer.name}"
        )
        result = f"mean_{buffer.name}"
        flat = graph.call(ops.wait, pending, before=before, role="wait", name=result)
    if buffer.reduce_dtype != buffer.master_dtype:
        cast = torch.ops.prims.convert_element_type.default
        flat = graph.call(cast, flat, buffer.master_dtype, before=before, role="cast")
    return flat


def _sink(graph: Graph, chain: list[fx.Node]) -> None:
    """Move each node of a chain, last first, to directly before its first reader."""
    for node in reversed(chain):
        graph.move_before(node, min(node.users))


def _pipeline_scatters(graph: Graph) -> None:
    """Start each scatter after its last gradient; wait for it when the next one starts.

    So one packed gradient is in flight while the next unit's backward runs. An HSDP all-reduce
    follows one unit later still, by the same rule.
    """
    chains = [_segments(graph, pack) for pack in graph.packs()]
    for chain in chains:
        latest = max(chain[0][0].all_input_nodes)
        for node in reversed(chain[0]):
            graph.move_after(node, latest)
    chains.sort(key=lambda chain: chain[0][0])
    for index, chain in enumerate(chains):
        for later, segment in enumerate(chain[1:], start=1):
            ahead = index + later
            anchor = chains[ahead][0][0] if ahead < len(chains) else graph.output()
            for node in segment:
                graph.move_before(node, anchor)


def _segments(graph: Graph, pack: fx.Node) -> list[list[fx.Node]]:
    """The chain from a pack, cut before each wait: [[pack, scatter], [wait, reduce], [wait]]."""
    segments = [[pack]]
    for node in graph.tail(pack):
        if node.target is ops.wait:
            segments.append([node])
        elif node.target in (ops.scatter, ops.reduce) or is_cast(node):
            segments[-1].append(node)
        else:
            break
    return segments
