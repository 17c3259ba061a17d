"""A pass list whose contracts do not hold is refused, and told what to move, add or keep."""

import pytest
import torch
from torch import nn

import zgraph as zg
from zgraph.ir.graph import Graph


def compiled(*passes: object) -> nn.Module:
    return zg.compile(nn.Linear(2, 2), list(passes), backend="aot_eager")  # type: ignore[arg-type]


NEEDS_GATHERS = [
    zg.Persist(max_numel=2),
    zg.MixedPrecision(),
    zg.Reshard(),
    zg.Prefetch(1),
    zg.Group.whole(),
    zg.Group.auto(),
    zg.Group.by_class("Linear"),
    zg.Group.by_name(["weight"]),
    zg.Group.by_numel(1),
]


@pytest.mark.parametrize("item", NEEDS_GATHERS, ids=str)
def test_a_pass_before_partition_is_told_to_move_it(item: zg.Pass) -> None:
    with pytest.raises(zg.PassError) as caught:
        compiled(item, zg.Partition())
    assert str(item) in str(caught.value)
    assert "requires gathers" in str(caught.value)
    assert "move partition before it" in str(caught.value)


@pytest.mark.parametrize("item", NEEDS_GATHERS, ids=str)
def test_partition_may_be_left_out_with_its_defaults(item: zg.Pass) -> None:
    assert zg.inspect(compiled(item)).plan.passes[0] == "partition"


def test_a_pass_that_requires_what_no_pass_provides_is_told_to_add_one() -> None:
    with pytest.raises(zg.PassError, match=r"prefetch.* requires gathers.*add zg.Partition\(\)"):
        zg.passes.Pipeline([zg.Prefetch(1)])


ONLY_ONE = [
    (zg.Partition(), zg.Partition(ignore=["bias"]), "gathers"),
    (zg.Persist(max_numel=1), zg.Persist(max_numel=2), "persistence"),
    (zg.MixedPrecision(), zg.MixedPrecision("bf16"), "precision"),
    (zg.Reshard(), zg.Reshard(False), "reshard"),
    (zg.Prefetch(1), zg.Prefetch(2), "prefetch"),
]


@pytest.mark.parametrize(("first", "second", "word"), ONLY_ONE, ids=lambda value: str(value))
def test_two_passes_that_decide_the_same_are_refused(
    first: zg.Pass, second: zg.Pass, word: str
) -> None:
    before = [] if isinstance(first, zg.Partition) else [zg.Partition()]
    with pytest.raises(zg.PassError) as caught:
        compiled(*before, first, second)
    message = str(caught.value)
    assert str(first) in message and str(second) in message and word in message
    assert "keep one" in message


@pytest.mark.parametrize("entry", [None, zg.Partition, "partition", len], ids=repr)
def test_an_entry_that_is_no_pass_is_shown(entry: object) -> None:
    with pytest.raises(zg.PassError, match=r"expected passes such as zg\.Partition\(\)") as caught:
        compiled(zg.Partition(), entry)
    assert repr(entry) in str(caught.value)


def test_an_empty_list_means_the_defaults() -> None:
    assert zg.inspect(compiled()).plan.passes == ("partition", "group_auto", "reshard")


def test_defaults_stand_directly_behind_partition_and_only_where_nothing_was_chosen() -> None:
    listed = zg.inspect(compiled(zg.Partition(), zg.Reshard(False), zg.Prefetch(1))).plan.passes
    assert listed == ("partition", "group_auto", "reshard{after_forward=False}", "prefetch")


def test_the_plan_hook_of_an_own_pass_runs_in_its_place() -> None:
    seen: list[bool] = []

    class Look(zg.Pass):
        name = "look"
        requires = frozenset({"persistence"})

        def plan(self, plan: zg.Plan) -> zg.Plan:
            seen.append(any(p.persistent for p in plan.parameters))
            return plan

    compiled(zg.Partition(), zg.Persist(max_numel=2), Look())
    assert seen == [True]
    with pytest.raises(zg.PassError, match=r"look requires persistence.*move persist"):
        compiled(zg.Partition(), Look(), zg.Persist(max_numel=2))


def test_an_own_word_that_nothing_provides_is_named() -> None:
    class Needy(zg.Pass):
        name = "needy"
        requires = frozenset({"sunshine"})

    with pytest.raises(zg.PassError, match="needy requires sunshine; no earlier pass provides"):
        compiled(zg.Partition(), Needy())


@pytest.mark.parametrize("stage", ["forward", "", None])
def test_graph_pass_refuses_an_unknown_stage(stage: object) -> None:
    with pytest.raises(zg.PassError, match='expected "joint" or "schedule"'):
        zg.graph_pass(stage=stage)  # type: ignore[arg-type]


@zg.graph_pass(stage="schedule")
def leave(graph: Graph, plan: zg.Plan) -> None:
    """Changes nothing."""


def test_passes_print_as_one_would_write_them() -> None:
    shown = {
        zg.Partition(replicate="node", ignore=["a", "b"]): "partition{replicate=node,ignore=[a b]}",
        zg.Group.by_name([["a", "b"], "c"]): "group_by_name{groups=[[a b] [c]]}",
        zg.Group.by_class(nn.Linear, "Block"): "group_by_class{classes=[Linear Block]}",
        zg.MixedPrecision(torch.bfloat16): "mixed_precision{param_dtype=bfloat16}",
        zg.Prefetch(2, backward_units=0): "prefetch{units=2,backward_units=0}",
        zg.Reshard(False): "reshard{after_forward=False}",
    }
    for item, text in shown.items():
        assert str(item) == text
    assert str(leave).endswith("test_contracts.leave@schedule")
