"""A user's pass sees the graphs at its stage; what it breaks is named."""

import pytest
import torch

import zgraph as zg
from tests.capture.steps import compiled, small_tower, step
from tests.passes.toys import Block
from tests.support.pool import RankFailed, run_ranks

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


def statements(text: str) -> list[str]:
    """The statements of a graph's text, without module headings and live bytes."""
    return [line.rpartition(" | ")[0].rstrip() for line in text.splitlines() if " | " in line][1:]


def own_prefetch() -> tuple[list[str], list[str]]:
    """On a rank: statements of a forward graph, before and after a pass of a few lines."""
    texts: list[str] = []

    @zg.graph_pass(stage="schedule")
    def all_gathers_first(graph: zg.Graph, plan: zg.Plan) -> None:
        if graph.stage == "forward":
            texts.append(graph.text())
            first = graph.gathers()[0]
            for gather in reversed(graph.gathers()[1:]):
                graph.move_after(gather, first)

    model = compiled(small_tower, (zg.Partition(), BY_CLASS, all_gathers_first))
    step(model)
    (record,) = zg.inspect(model).graphs("forward")
    return statements(texts[0]), statements(record.text)


def test_an_own_pass_moves_nodes_and_the_record_shows_it() -> None:
    before, after = run_ranks(own_prefetch, 2)[0]
    assert sorted(before) == sorted(after)
    places = [index for index, line in enumerate(after) if " = gather(" in line]
    assert places == list(range(places[0], places[0] + 4))
    assert before != after


def break_a_rule() -> None:
    """On a rank: a step with a pass that forgets to wait for a scatter."""

    @zg.graph_pass(stage="schedule")
    def clumsy(graph: zg.Graph, plan: zg.Plan) -> None:
        for scatter in graph.scatters():
            (wait,) = scatter.users
            graph.replace(wait, scatter)

    step(compiled(small_tower, (zg.Partition(), BY_CLASS, clumsy)))


def test_every_rank_is_told_which_own_pass_broke_which_rule() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(break_a_rule, 2)
    assert set(caught.value.tracebacks) == {0, 1}
    for message in caught.value.tracebacks.values():
        assert "GraphError" in message and "clumsy@schedule broke the rule" in message
        assert "starts_are_waited_for_once in the backward graph" in message
        assert "read by exactly one wait" in message
        assert "scatter_norm_head of unit norm..head" in message
        assert "> scatter_norm_head: f32[40] = scatter(pack_norm_head)" in message
