"""Wrong passes that change what is computed, returned or drawn at random."""

import torch

import zgraph as zg
from tests.verifier.faults import (
    Attention,
    Dropouts,
    call_of,
    fault,
    first_wait,
    set_argument,
    swap_arguments,
    view_of,
)
from zgraph.ir import ops

aten = torch.ops.aten


def insert_behind(graph: zg.Graph, node: torch.fx.Node, new: torch.fx.Node) -> None:
    for reader in list(node.users):
        if reader is not new:
            reader.replace_input_with(node, new)


@fault("forward", "compute_is_unchanged")
def computes_something_else(graph: zg.Graph) -> None:
    call_of(graph, "relu").target = aten.sigmoid.default


@fault("forward", "compute_is_unchanged")
def changes_a_constant(graph: zg.Graph) -> None:
    set_argument(call_of(graph, "native_layer_norm"), 4, 1e-3)


@fault("forward", "compute_is_unchanged")
def reads_the_weight_of_another_block(graph: zg.Graph) -> None:
    one, other = (view_of(graph, f"layers.{n}.up.bias") for n in (0, 1))
    early = graph.gathered(graph.gathers()[2])
    for node in reversed((early.gather, early.wait, *early.views)):
        graph.move_after(node, first_wait(graph))
    for use in list(one.users):
        use.replace_input_with(one, other)


@fault("forward", "compute_is_unchanged")
def adds_a_computation(graph: zg.Graph) -> None:
    relu = call_of(graph, "relu")
    twice = graph.call(aten.mul.Tensor, relu, 1.0, before=relu.next, role="extra")
    insert_behind(graph, relu, twice)


@fault("forward", "outputs_are_unchanged")
def leaves_a_residual_out(graph: zg.Graph) -> None:
    last = graph.compute()[-1]
    add = [n for n in graph.compute() if n.target is aten.add.Tensor][-1]
    kept = add.args[0]
    assert isinstance(kept, torch.fx.Node) and last is not add
    graph.set_outputs([kept if node is add else node for node in graph.outputs()])


@fault("forward", "compute_is_unchanged")
def removes_a_computation(graph: zg.Graph) -> None:
    relu = call_of(graph, "relu")
    graph.replace(relu, relu.all_input_nodes[0])


@fault("forward", "compute_is_unchanged")
def computes_a_product_twice(graph: zg.Graph) -> None:
    relu = call_of(graph, "relu")
    copy = graph.copy_before([relu], relu)[relu]
    next(iter(relu.users)).replace_input_with(relu, copy)


@fault("joint", "compute_is_unchanged")
def changes_compute_without_saying_so(graph: zg.Graph) -> None:
    relu = call_of(graph, "relu")
    doubled = graph.call(aten.mul.Tensor, relu, 2.0, before=relu.next, role="scale")
    insert_behind(graph, relu, doubled)


@fault("joint", "compute_is_unchanged")
def reads_another_parameter_of_one_shape(graph: zg.Graph) -> None:
    weight, bias = (view_of(graph, f"norm.{name}") for name in ("weight", "bias"))
    if bias < weight:
        weight, bias = bias, weight
    for use in list(bias.users):
        use.replace_input_with(bias, weight)


@fault("forward", "outputs_are_unchanged")
def swaps_two_saved_values(graph: zg.Graph) -> None:
    outputs = graph.outputs()
    outputs[-1], outputs[-2] = outputs[-2], outputs[-1]
    graph.set_outputs(outputs)


@fault("forward", "outputs_are_unchanged")
def saves_less(graph: zg.Graph) -> None:
    graph.set_outputs(graph.outputs()[:-1])


@fault("forward", "outputs_are_unchanged")
def returns_a_result_twice(graph: zg.Graph) -> None:
    outputs = graph.outputs()
    graph.set_outputs([outputs[0], *outputs])


@fault("forward", "new_nodes_are_what_they_say")
def claims_another_shape(graph: zg.Graph) -> None:
    relu = call_of(graph, "relu")
    view = graph.call(aten.alias.default, relu, before=relu.next, role="view")
    view.meta["val"] = relu.meta["val"].new_empty(3, 3)
    insert_behind(graph, relu, view)


@fault("forward", "new_nodes_are_what_they_say")
def claims_another_dtype(graph: zg.Graph) -> None:
    wait = first_wait(graph)
    view = next(iter(wait.users))
    copy = graph.copy_before([view], view)[view]
    copy.meta["val"] = copy.meta["val"].to(torch.float16)
    insert_behind(graph, view, copy)


@fault("joint", "new_nodes_have_values", says_so=True)
def inserts_a_node_without_a_value(graph: zg.Graph) -> None:
    relu = call_of(graph, "relu")
    with graph.fx.inserting_after(relu):
        doubled = graph.fx.call_function(aten.mul.Tensor, (relu, 2.0))
    insert_behind(graph, relu, doubled)


@fault("joint", "new_nodes_are_what_they_say", says_so=True)
def adds_what_cannot_be_added(graph: zg.Graph) -> None:
    relu = call_of(graph, "relu")
    total = graph.call(aten.add.Tensor, relu, relu, before=relu.next, role="extra")
    set_argument(total, 1, view_of(graph, "layers.0.up.weight"))
    insert_behind(graph, relu, total)


@fault("forward", "effects_keep_their_order", model=Dropouts)
def draws_random_numbers_in_another_order(graph: zg.Graph) -> None:
    draws = [node for node in graph.compute() if node.is_impure()]
    first, second = draws[0], draws[-1]
    assert first is not second
    needed, stack = {second}, [second]
    while stack:
        for source in stack.pop().all_input_nodes:
            if first < source and source not in needed:
                needed.add(source)
                stack.append(source)
    for node in sorted(needed):
        graph.move_before(node, first)


@fault("forward", "new_nodes_are_what_they_say")
def claims_another_shape_for_an_old_node(graph: zg.Graph) -> None:
    relu = call_of(graph, "relu")
    relu.meta["val"] = relu.meta["val"].new_empty(3, 3)


@fault("forward", "new_nodes_have_values")
def forgets_the_value_of_an_old_node(graph: zg.Graph) -> None:
    del call_of(graph, "relu").meta["val"]


@fault("forward", "nodes_are_in_order")
def returns_nothing(graph: zg.Graph) -> None:
    graph.fx.erase_node(graph.output())


# That -1 became -2 shows in nothing but the number: the scores are square.
@fault("forward", "compute_is_unchanged", model=Attention)
def takes_the_softmax_over_queries(graph: zg.Graph) -> None:
    set_argument(call_of(graph, "_softmax"), 1, -2)


@fault("forward", "compute_is_unchanged", model=Attention)
def swaps_queries_and_keys(graph: zg.Graph) -> None:
    queries, keys = graph.nodes(aten.mm.default)[:2]
    source = keys.args[1]
    assert isinstance(source, torch.fx.Node)
    chain = [source]
    while chain[-1].all_input_nodes[0].target is not ops.wait:
        chain.append(chain[-1].all_input_nodes[0])
    for node in reversed(chain):
        graph.move_before(node, queries)
    swap_arguments(queries, keys, 1)


@fault("forward", "compute_is_unchanged", model=Attention)
def drops_a_product_with_one(graph: zg.Graph) -> None:
    (product,) = [n for n in graph.nodes(aten.mul.Tensor) if n.args[1] == 1.0]
    graph.replace(product, product.all_input_nodes[0])


@fault("forward", "compute_is_unchanged", model=Attention)
def swaps_two_draws_of_one_shape(graph: zg.Graph) -> None:
    one, other = (node for node in graph.compute() if node.is_impure())
    graph.move_before(other, one)


@fault("forward", "compute_is_unchanged", model=Attention)
def draws_once_for_two(graph: zg.Graph) -> None:
    one, other = (node for node in graph.compute() if node.is_impure())
    graph.replace(other, one)


@fault("forward", "effects_keep_their_order", model=Dropouts)
def draws_once_more(graph: zg.Graph) -> None:
    draw = next(node for node in graph.compute() if node.is_impure())
    graph.copy_before([draw], draw.next)


@fault("forward", "compute_is_unchanged")
def overwrites_an_activation(graph: zg.Graph) -> None:
    relu = call_of(graph, "relu")
    graph.call(aten.mul_.Tensor, relu, 2.0, before=relu.next, role="oops")


def writes_an_input(graph: zg.Graph) -> None:
    """As Inductor's captures do at their end, for buffers such as BatchNorm's."""
    draws = [node for node in graph.compute() if node.is_impure()]
    x = next(node for node in graph.fx.nodes if node.op == "placeholder" and len(node.users) > 1)
    graph.call(aten.copy_.default, x, draws[0], before=graph.output(), role="write")


@fault("forward", "compute_is_unchanged", model=Attention, given=writes_an_input)
def reads_an_input_after_it_was_written(graph: zg.Graph) -> None:
    (write,) = graph.nodes(aten.copy_.default)
    graph.move_after(write, write.all_input_nodes[1])
