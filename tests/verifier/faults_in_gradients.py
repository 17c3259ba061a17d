"""Wrong passes that break how gradients leave: packs, scatters, all-reduces, outputs."""

import torch

import zgraph as zg
from tests.capture.steps import tied_tower
from tests.verifier.faults import HSDP, HSDP_PASSES, PERSISTENT, fault, set_argument, swap_arguments
from zgraph.ir import ops

aten = torch.ops.aten
BF16 = (zg.Partition(), zg.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32))
REDUCED_IN_BF16 = (zg.Partition(), zg.MixedPrecision(torch.bfloat16))


def block_packs(graph: zg.Graph) -> list[torch.fx.Node]:
    return [pack for pack in graph.packs() if graph.unit_of(pack).startswith("layers")]


@fault("backward", "starts_are_waited_for_once")
def returns_a_scatter_under_way(graph: zg.Graph) -> None:
    scatter = graph.scatters()[0]
    (wait,) = scatter.users
    graph.replace(wait, scatter)


@fault("backward", "nodes_are_in_order")
def scatters_before_the_gradient_is_there(graph: zg.Graph) -> None:
    pack = block_packs(graph)[0]
    graph.move_before(pack, min(pack.all_input_nodes))


@fault("joint", "waits_are_used")
def returns_none_for_a_gradient(graph: zg.Graph) -> None:
    outputs = graph.outputs()
    graph.set_outputs([*outputs[:-1], None])


@fault("joint", "trained_parameters_have_gradients")
def loses_a_gradient_with_all_that_makes_it(graph: zg.Graph) -> None:
    outputs = graph.outputs()
    graph.set_outputs([*outputs[:-1], None])
    graph.finish()


@fault("joint", "trained_parameters_have_gradients")
def leaves_a_parameter_out_of_the_pack(graph: zg.Graph) -> None:
    pack = block_packs(graph)[0]
    grads, offsets = pack.args[:2]
    set_argument(pack, 0, grads[1:])  # type: ignore[index]
    set_argument(pack, 1, offsets[1:])  # type: ignore[index]


@fault("joint", "outputs_are_unchanged")
def packs_the_gradient_of_another_block(graph: zg.Graph) -> None:
    one, other = block_packs(graph)
    late, early = (one, other) if other < one else (other, one)
    set_argument(late, 0, [early.args[0][0], *late.args[0][1:]])  # type: ignore[index]


@fault("joint", "compute_is_unchanged")
def packs_zeros(graph: zg.Graph) -> None:
    pack = block_packs(graph)[0]
    grad = pack.args[0][0]  # type: ignore[index]
    zeros = graph.call(aten.zeros_like.default, grad, before=pack, role="zeros")
    set_argument(pack, 0, [zeros, *pack.args[0][1:]])  # type: ignore[index]


@fault("joint", "scatters_fit_the_plan")
def packs_a_gradient_twice(graph: zg.Graph) -> None:
    pack = block_packs(graph)[0]
    grads, offsets = pack.args[:2]
    set_argument(pack, 0, [*grads, grads[0]])  # type: ignore[index,misc]
    set_argument(pack, 1, [*offsets, offsets[0]])  # type: ignore[index,misc]


@fault("joint", "outputs_are_unchanged")
def swaps_two_gradients_of_one_size(graph: zg.Graph) -> None:
    pack = block_packs(graph)[0]
    up, up_bias, down, down_bias = pack.args[0]  # type: ignore[misc]
    set_argument(pack, 0, [down, up_bias, up, down_bias])


@fault("backward", "outputs_are_unchanged")
def swaps_the_gradients_of_two_blocks(graph: zg.Graph) -> None:
    outputs = graph.outputs()
    ends = [graph.tail(start)[-1] for start in graph.scatters()[1:3]]
    one, other = (outputs.index(end) for end in ends)
    outputs[one], outputs[other] = outputs[other], outputs[one]
    graph.set_outputs(outputs)


@fault("joint", "scatters_fit_the_plan")
def packs_at_another_offset(graph: zg.Graph) -> None:
    pack = block_packs(graph)[0]
    first, *rest = pack.args[1]  # type: ignore[misc]
    set_argument(pack, 1, [first + 4, *rest])


@fault("joint", "scatters_fit_the_plan")
def packs_a_gradient_of_another_size(graph: zg.Graph) -> None:
    pack = block_packs(graph)[0]
    up, up_bias, down, down_bias = pack.args[0]  # type: ignore[misc]
    set_argument(pack, 0, [up, down_bias, down, up_bias])


@fault("joint", "scatters_fit_the_plan", passes=BF16)
def packs_in_another_dtype(graph: zg.Graph) -> None:
    set_argument(block_packs(graph)[0], 4, torch.bfloat16)


@fault("joint", "scatters_fit_the_plan", passes=BF16)
def scatters_in_another_dtype(graph: zg.Graph) -> None:
    scatter = graph.scatters()[0]
    cast = torch.ops.prims.convert_element_type.default
    low = graph.call(cast, scatter.args[0], torch.bfloat16, before=scatter, role="cast")
    set_argument(scatter, 0, low)


@fault("backward", "gradients_are_averaged_once")
def scatters_twice(graph: zg.Graph) -> None:
    scatter = graph.scatters()[0]
    (wait,) = scatter.users
    copies = graph.copy_before([scatter, wait], scatter)
    total = graph.call(aten.add.Tensor, wait, copies[wait], before=wait.next, role="sum")
    for reader in list(wait.users):
        if reader is not total:
            reader.replace_input_with(wait, total)


@fault("joint", "gradients_are_averaged_once", mesh=HSDP, passes=HSDP_PASSES)
def reduces_twice(graph: zg.Graph) -> None:
    reduce = graph.reduces()[0]
    (wait,) = reduce.users
    readers = list(wait.users)
    name, group = reduce.args[1:3]
    again = graph.call(ops.reduce, wait, name, group, before=wait.next, role="reduce")
    end = graph.call(ops.wait, again, before=again.next, role="wait")
    for reader in readers:
        reader.replace_input_with(wait, end)


@fault("joint", "gradients_are_averaged_once", mesh=HSDP, passes=HSDP_PASSES)
def leaves_out_the_all_reduce(graph: zg.Graph) -> None:
    reduce = graph.reduces()[0]
    (wait,) = reduce.users
    graph.replace(wait, reduce.all_input_nodes[0])
    graph.fx.erase_node(reduce)


@fault("joint", "gradients_are_averaged_once", passes=PERSISTENT)
def leaves_a_persistent_gradient_unreduced(graph: zg.Graph) -> None:
    reduce = graph.reduces()[0]
    (wait,) = reduce.users
    graph.replace(wait, reduce.all_input_nodes[0])
    graph.fx.erase_node(reduce)


@fault("joint", "gradients_are_averaged_once", mesh=HSDP, passes=HSDP_PASSES)
def scatters_over_the_other_axis(graph: zg.Graph) -> None:
    set_argument(graph.scatters()[0], 2, graph.groups.replicate)


@fault("backward", "compute_is_unchanged")
def scales_a_mean_once_more(graph: zg.Graph) -> None:
    (wait,) = graph.scatters()[0].users
    readers = list(wait.users)
    half = graph.call(aten.mul.Tensor, wait, 0.5, before=wait.next, role="mean")
    for reader in readers:
        reader.replace_input_with(wait, half)


@fault("joint", "outputs_are_unchanged", says_so=True)
def returns_less_and_says_it_changes_compute(graph: zg.Graph) -> None:
    graph.set_outputs([None, *graph.outputs()[1:]])


@fault("joint", "scatters_fit_the_plan")
def packs_in_another_order(graph: zg.Graph) -> None:
    pack = block_packs(graph)[0]
    grads, offsets = pack.args[:2]
    set_argument(pack, 0, [*reversed(grads)])  # type: ignore[call-overload]
    set_argument(pack, 1, [*reversed(offsets)])  # type: ignore[call-overload]


@fault("joint", "dialect_nodes_are_complete")
def packs_without_saying_where(graph: zg.Graph) -> None:
    pack = block_packs(graph)[0]
    set_argument(pack, 1, pack.args[1][:-1])  # type: ignore[index]


@fault("backward", "outputs_are_unchanged")
def doubles_a_gradient(graph: zg.Graph) -> None:
    pack = block_packs(graph)[0]
    grad, *rest = pack.args[0]  # type: ignore[misc]
    twice = graph.call(aten.add.Tensor, grad, grad, before=pack, role="sum")
    set_argument(pack, 0, [twice, *rest])


@fault("backward", "compute_is_unchanged", model=tied_tower)
def weighs_one_use_of_a_tied_parameter(graph: zg.Graph) -> None:
    adds = graph.nodes(aten.add.Tensor)
    (total,) = [add for add in adds if add.meta.get("zgraph", {}).get("role") == "sum"]
    total.kwargs = {"alpha": 2}


@fault("backward", "gradients_are_averaged_once", passes=REDUCED_IN_BF16)
def returns_a_gradient_in_the_dtype_of_reduction(graph: zg.Graph) -> None:
    (wait,) = graph.scatters()[0].users
    (cast,) = wait.users
    graph.replace(cast, wait)


@fault("backward", "gradients_are_averaged_once")
def rounds_a_mean(graph: zg.Graph) -> None:
    (wait,) = graph.scatters()[0].users
    (output,) = wait.users
    cast = torch.ops.prims.convert_element_type.default
    low = graph.call(cast, wait, torch.bfloat16, before=output, role="cast")
    output.replace_input_with(
        wait, graph.call(cast, low, torch.float32, before=output, role="cast")
    )


@fault("backward", "gradients_are_averaged_once")
def scatters_in_the_name_of_another_unit(graph: zg.Graph) -> None:
    one, other = graph.scatters()[1:3]
    swap_arguments(one, other, 1)


@fault("joint", "outputs_are_unchanged", says_so=True)
def swaps_gradients_and_says_it_changes_compute(graph: zg.Graph) -> None:
    *others, one, other = graph.outputs()
    graph.set_outputs([*others, other, one])
