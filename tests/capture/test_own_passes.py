"""A user's pass sees the graphs at its stage; what it breaks is named."""

from collections.abc import Callable

import pytest
import torch

import zgraph as zg
from tests.capture.steps import compiled, small_tower, step
from tests.passes.toys import Block
from tests.support.pool import RankFailed, run_ranks
from zgraph.ir import ops

BY_CLASS = zg.Group.by_class(Block)
Seen = list[tuple[str, tuple[int, int, int], list[str]]]


def look(stage: str, before_partition: bool = False) -> Seen:
    """On a rank: what a pass at `stage` sees in one step with gradients and one call without."""
    seen: Seen = []

    @zg.graph_pass(stage=stage)  # type: ignore[arg-type]
    def record(graph: zg.Graph, plan: zg.Plan) -> None:
        counts = len(graph.gathers()), len(graph.scatters()), len(graph.waits())
        seen.append((graph.stage, counts, [unit.name for unit in plan.units]))

    passes = (
        (record, zg.Partition(), BY_CLASS)
        if before_partition
        else (zg.Partition(), BY_CLASS, record)
    )
    model = compiled(small_tower, passes)
    step(model)
    with torch.no_grad():
        model(torch.arange(8).view(2, 4))
    return seen


def test_a_joint_pass_sees_forward_and_backward_in_one_graph() -> None:
    (stage, counts, units), inference = run_ranks(look, 2, "joint")[0]
    assert units == ["embed", "layers.0", "layers.1", "norm..head"]
    assert (stage, counts) == ("joint", (4, 4, 8))
    # Without gradients the joint graph is all there is, and has no scatters.
    assert inference[:2] == ("joint", (4, 0, 4))


def test_a_schedule_pass_sees_forward_and_backward_one_at_a_time() -> None:
    seen = run_ranks(look, 2, "schedule")[0]
    assert [(stage, counts) for stage, counts, _ in seen] == [
        ("forward", (4, 0, 4)),
        ("backward", (3, 4, 7)),
        ("inference", (4, 0, 4)),
    ]


def test_a_pass_in_front_of_partition_sees_parameters_not_yet_gathered() -> None:
    seen = run_ranks(look, 2, "joint", True)[0]
    assert seen[0][:2] == ("joint", (0, 0, 0))


def read_a_unit() -> list[tuple[str, bool, bool, int]]:
    """On a rank: what the handle says about each unit of a forward graph."""
    found: list[tuple[str, bool, bool, int]] = []

    @zg.graph_pass(stage="schedule")
    def read(graph: zg.Graph, plan: zg.Plan) -> None:
        if graph.stage != "forward":
            return
        for gather in graph.gathers():
            unit, uses = graph.unit_of(gather), graph.uses(graph.unit_of(gather))
            first, last = graph.first_use(unit), graph.last_use(unit)
            in_order = gather < graph.gathered(gather).wait < uses[0]
            found.append((unit, first is uses[0] and last is uses[-1], in_order, len(uses)))

    step(compiled(small_tower, (zg.Partition(), BY_CLASS, read)))
    return found


def test_the_handle_names_a_units_uses_in_program_order() -> None:
    # An embedding; two linear layers a block; a layer norm and a product.
    assert run_ranks(read_a_unit, 2)[0] == [
        ("embed", True, True, 1),
        ("layers.0", True, True, 2),
        ("layers.1", True, True, 2),
        ("norm..head", True, True, 2),
    ]


def own_prefetch() -> tuple[list[str], list[str]]:
    """On a rank: statements of a forward graph, before and after a pass of a few lines."""
    texts: list[list[str]] = []

    def statements(graph: zg.Graph) -> list[str]:
        return [line.split(" #")[0].rstrip() for line in graph.text().splitlines()]

    @zg.graph_pass(stage="schedule")
    def all_gathers_first(graph: zg.Graph, plan: zg.Plan) -> None:
        if graph.stage == "forward":
            texts.append(statements(graph))
            first = graph.gathers()[0]
            for gather in reversed(graph.gathers()[1:]):
                graph.move_after(gather, first)

    model = compiled(small_tower, (zg.Partition(), BY_CLASS, all_gathers_first))
    step(model)
    (record,) = zg.inspect(model).graphs("forward")
    return texts[0], [line.split(" #")[0].rstrip() for line in record.text.splitlines()]


def test_an_own_pass_moves_nodes_and_the_record_shows_it() -> None:
    before, after = run_ranks(own_prefetch, 2)[0]
    assert sorted(before) == sorted(after)
    places = [index for index, line in enumerate(after) if "zgraph.gather" in line]
    assert places == list(range(places[0], places[0] + 4))
    assert before != after


# ---------------------------------------------------------------------- the verifier


def drop_a_wait(graph: zg.Graph) -> None:
    gather = graph.gathers()[0]
    graph.replace(graph.gathered(gather).wait, gather)


def wait_twice(graph: zg.Graph) -> None:
    gather = graph.gathers()[0]
    wait = graph.gathered(gather).wait
    again = graph.call(ops.wait, gather, before=wait.next, role="wait")
    (reader, *_) = list(wait.users)
    reader.replace_input_with(wait, again)


def wait_for_nothing(graph: zg.Graph) -> None:
    (addmm, *_) = graph.nodes(torch.ops.aten.addmm.default)
    wait = graph.call(ops.wait, addmm, before=addmm.next, role="wait")
    for reader in list(addmm.users):
        if reader is not wait:
            reader.replace_input_with(addmm, wait)


def read_too_early(graph: zg.Graph) -> None:
    gather = graph.gathers()[0]
    graph.move_after(gather, graph.gathered(gather).wait)


def drop_a_scatters_wait(graph: zg.Graph) -> None:
    (scatter, *_) = graph.scatters()
    (wait,) = scatter.users
    graph.replace(wait, scatter)


BREAKING: dict[str, tuple[Callable[[zg.Graph], None], str, str]] = {
    "a dropped wait": (drop_a_wait, "forward", "read by exactly one wait"),
    "a second wait": (wait_twice, "forward", "read by exactly one wait"),
    "a wait for no collective": (wait_for_nothing, "forward", "A wait reads the start"),
    "a read before its definition": (read_too_early, "forward", "before it has been defined"),
    "a scatter without wait": (drop_a_scatters_wait, "backward", "read by exactly one wait"),
    "a dropped wait in the joint graph": (drop_a_wait, "joint", "read by exactly one wait"),
}


def break_rule(name: str) -> None:
    """On a rank: a step with a pass that breaks a rule."""
    edit, stage, _ = BREAKING[name]

    @zg.graph_pass(stage="joint" if stage == "joint" else "schedule")
    def clumsy(graph: zg.Graph, plan: zg.Plan) -> None:
        if graph.stage == stage:
            edit(graph)

    step(compiled(small_tower, (zg.Partition(), BY_CLASS, clumsy)))


@pytest.mark.parametrize("name", BREAKING)
def test_the_verifier_names_pass_graph_and_rule(name: str) -> None:
    _, stage, rule = BREAKING[name]
    with pytest.raises(RankFailed) as caught:
        run_ranks(break_rule, 2, name)
    for message in caught.value.tracebacks.values():
        assert "GraphError" in message
        assert "clumsy@" in message and f"in the {stage} graph" in message
        assert rule in message


def save_a_gathered_buffer() -> None:
    """On a rank: a pass that lets the partitioner save what Reshard(True) would free."""

    @zg.graph_pass(stage="joint")
    def forget_the_tags(graph: zg.Graph, plan: zg.Plan) -> None:
        for node in graph.fx.nodes:
            node.meta.pop("recompute", None)
            node.meta.pop("ac_graph_id", None)

    step(compiled(small_tower, (zg.Partition(), BY_CLASS, zg.Reshard(True), forget_the_tags)))


def test_a_gathered_buffer_that_crosses_to_backward_against_the_plan_is_named() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(save_a_gathered_buffer, 2)
    assert "No gathered buffer is saved from forward for backward" in str(caught.value)
