"""Wrong passes that break how parameters arrive: gathers, waits, views, and their memory."""

from dataclasses import dataclass

import torch

import zgraph as zg
from tests.verifier.faults import (
    HSDP,
    HSDP_PASSES,
    PERSISTENT,
    call_of,
    fault,
    first_wait,
    set_argument,
    swap_arguments,
    tied_and_split,
    view_of,
)
from zgraph.ir import ops

aten = torch.ops.aten


@fault("forward", "starts_are_waited_for_once")
def drops_a_wait(graph: zg.Graph) -> None:
    graph.replace(first_wait(graph), graph.gathers()[0])


@fault("joint", "starts_are_waited_for_once")
def drops_a_wait_in_the_joint_graph(graph: zg.Graph) -> None:
    graph.replace(first_wait(graph), graph.gathers()[0])


@fault("forward", "starts_are_waited_for_once")
def waits_twice(graph: zg.Graph) -> None:
    wait = first_wait(graph)
    again = graph.call(ops.wait, graph.gathers()[0], before=wait.next, role="wait")
    next(iter(wait.users)).replace_input_with(wait, again)


@fault("forward", "starts_are_waited_for_once")
def reads_what_is_still_under_way(graph: zg.Graph) -> None:
    wait = first_wait(graph)
    next(iter(wait.users)).replace_input_with(wait, graph.gathers()[0])


@fault("forward", "starts_are_waited_for_once")
def starts_a_gather_that_nobody_waits_for(graph: zg.Graph) -> None:
    gather = graph.gathers()[0]
    graph.copy_before([gather], first_wait(graph))


@fault("forward", "waits_wait_for_a_collective")
def waits_for_a_product(graph: zg.Graph) -> None:
    product = call_of(graph, "addmm")
    readers = list(product.users)
    wait = graph.call(ops.wait, product, before=product.next, role="wait")
    for reader in readers:
        reader.replace_input_with(product, wait)


@fault("forward", "waits_are_used")
def gathers_what_nobody_reads(graph: zg.Graph) -> None:
    gather = graph.gathers()[0]
    graph.copy_before([gather, first_wait(graph)], first_wait(graph).next)


@fault("forward", "nodes_are_in_order")
def waits_before_the_start(graph: zg.Graph) -> None:
    graph.move_before(first_wait(graph), graph.gathers()[0])


@fault("forward", "nodes_are_in_order")
def moves_a_gather_past_its_use(graph: zg.Graph) -> None:
    item = graph.gathered(graph.gathers()[1])
    for node in reversed((item.gather, item.wait, *item.views)):
        graph.move_after(node, item.uses[0])


@fault("forward", "nodes_are_in_order")
def moves_a_view_behind_what_reads_it(graph: zg.Graph) -> None:
    view = view_of(graph, "norm.bias")
    graph.move_after(view, next(iter(view.users)))


@fault("forward", "nodes_are_in_order")
def makes_a_cycle(graph: zg.Graph) -> None:
    relu = call_of(graph, "relu")
    product = call_of(graph, "addmm")  # relu reads it, and now it reads relu
    set_argument(product, 1, relu)


@fault("forward", "nodes_are_in_order")
def puts_a_node_behind_the_output(graph: zg.Graph) -> None:
    graph.move_after(first_wait(graph).next, graph.output())


@fault("forward", "shards_stay_with_their_buffers")
def gathers_the_shard_of_another_unit(graph: zg.Graph) -> None:
    one, other = graph.gathers()[1:3]  # two blocks, of one size
    set_argument(one, 0, other.args[0])


@fault("forward", "shards_stay_with_their_buffers")
def swaps_the_shards_of_two_units(graph: zg.Graph) -> None:
    one, other = graph.gathers()[1:3]
    swap_arguments(one, other, 0)


@fault("forward", "names_are_unique")
def gives_two_nodes_one_name(graph: zg.Graph) -> None:
    one, other = graph.waits()[:2]
    other.name = one.name


@fault("forward", "gathers_fit_the_plan", mesh=HSDP, passes=HSDP_PASSES)
def gathers_over_the_other_axis(graph: zg.Graph) -> None:
    set_argument(graph.gathers()[0], 4, graph.groups.replicate)


@fault("forward", "gathers_fit_the_plan")
def gathers_in_another_dtype(graph: zg.Graph) -> None:
    gather = graph.gathers()[0]
    set_argument(gather, 3, torch.float16)
    for node in (gather, first_wait(graph)):
        node.meta["val"] = node.meta["val"].to(torch.float16)


@fault("forward", "gathers_fit_the_plan")
def gathers_half_of_a_unit(graph: zg.Graph) -> None:
    gather = graph.gathers()[0]
    set_argument(gather, 2, gather.args[2] // 2)  # type: ignore[operator]


@fault("joint", "gathers_fit_the_plan", passes=PERSISTENT)
def reads_a_persistent_buffer_in_another_dtype(graph: zg.Graph) -> None:
    set_argument(graph.nodes(ops.whole)[0], 2, torch.float16)


@fault("forward", "gathered_buffers_stay_in_their_graph")
def keeps_a_view_past_forward(graph: zg.Graph) -> None:
    graph.set_outputs([*graph.outputs(), view_of(graph, "layers.0.up.weight")])


@fault("forward", "gathered_memory_is_only_read")
def scales_a_parameter_in_place(graph: zg.Graph) -> None:
    view = view_of(graph, "norm.weight")
    graph.call(aten.mul_.Tensor, view, 2.0, before=view.next, role="oops")


@fault("forward", "buffers_are_freed_between_uses", **tied_and_split())
def reads_a_buffer_that_was_freed(graph: zg.Graph) -> None:
    first, *_, second = [g for g in graph.gathers() if graph.unit_of(g) == graph.units()[0]]
    early, late = graph.gathered(first).wait, graph.gathered(second).wait
    late.replace_all_uses_with(early)
    graph.finish()  # nothing reads the second gather any more


@fault("forward", "captured_ops_are_replaced")
def leaves_a_read_of_a_parameter(graph: zg.Graph) -> None:
    view = view_of(graph, "norm.bias")
    buffer = next(b for b, slot in graph.layout.slots() if slot.name == "norm.bias")
    (slot,) = [slot for slot in buffer.slots if slot.name == "norm.bias"]
    gather = next(g for g in graph.gathers() if graph.buffer_of(g) is buffer)
    read = graph.call(
        ops.parameter,
        gather.args[0],
        slot.name,
        buffer.name,
        list(slot.shape),
        slot.offset,
        buffer.param_dtype,
        buffer.reduce_dtype,
        graph.groups.shard,
        [],
        before=view,
        role="read",
    )
    graph.replace(view, read)


@dataclass(frozen=True)
class AtMost(zg.Pass):
    """Sets the plan's limit of gathered bytes."""

    name = "at_most"
    limit: int = 0

    def plan(self, plan: zg.Plan) -> zg.Plan:
        return plan.changed(max_live_bytes=self.limit)


# A block is 1,120 bytes; without prefetch no more than that is alive.
@fault("forward", "live_bytes_stay_under_the_limit", passes=(AtMost(1200), zg.Partition()))
def gathers_everything_first(graph: zg.Graph) -> None:
    first, *others = graph.gathers()
    for gather in reversed(others):
        graph.move_after(gather, first)


@fault("forward", "gathers_fit_the_plan")
def reads_a_shard_as_if_it_were_whole(graph: zg.Graph) -> None:
    gather = graph.gathers()[1]
    part = view_of(graph, "layers.0.up.weight").all_input_nodes[0]  # it lies in the first shard
    shard, buffer, _, dtype, _ = gather.args
    whole = graph.call(ops.whole, shard, buffer, dtype, before=part, role="whole")
    part.replace_input_with(graph.gathered(gather).wait, whole)


@fault("forward", "waits_are_used")
def gathers_for_a_view_that_nobody_reads(graph: zg.Graph) -> None:
    item = graph.gathered(graph.gathers()[0])
    graph.copy_before([item.gather, item.wait, item.views[0]], item.gather)


@fault("forward", "nodes_are_in_order")
def waits_for_its_own_view(graph: zg.Graph) -> None:
    wait = first_wait(graph)
    set_argument(wait, 0, next(iter(wait.users)))


@fault("forward", "dialect_nodes_are_complete")
def gathers_a_buffer_that_does_not_exist(graph: zg.Graph) -> None:
    set_argument(graph.gathers()[0], 1, "layers.9")


@fault("forward", "dialect_nodes_are_complete")
def gathers_nothing(graph: zg.Graph) -> None:
    set_argument(graph.gathers()[0], 0, None)


@fault("forward", "dialect_nodes_are_complete")
def waits_without_saying_for_what(graph: zg.Graph) -> None:
    first_wait(graph).args = ()


@fault("forward", "dialect_nodes_are_complete")
def gathers_over_a_group_by_keyword(graph: zg.Graph) -> None:
    gather = graph.gathers()[0]
    gather.kwargs = {"group": gather.args[4]}
    gather.args = gather.args[:4]


@fault("forward", "inputs_are_unchanged")
def swaps_two_inputs_of_one_shape(graph: zg.Graph) -> None:
    one, other = (gather.all_input_nodes[0] for gather in graph.gathers()[1:3])
    graph.move_before(other, one)


@fault("forward", "gathered_memory_is_only_read")
def scales_a_list_of_parameters_in_place(graph: zg.Graph) -> None:
    view = view_of(graph, "norm.weight")
    graph.call(aten._foreach_mul_.Scalar, [view], 2.0, before=view.next, role="oops")


@fault("joint", "gathered_memory_is_only_read", says_so=True, passes=PERSISTENT)
def scales_a_persistent_parameter_in_place(graph: zg.Graph) -> None:
    view = view_of(graph, "norm.weight")
    graph.call(aten.mul_.Tensor, view, 2.0, before=view.next, role="oops")


@fault("joint", "gathered_memory_is_only_read", says_so=True)
def scales_a_flat_shard_in_place(graph: zg.Graph) -> None:
    gather = graph.gathers()[0]
    graph.call(aten.mul_.Tensor, gather.args[0], 2.0, before=gather, role="oops")
