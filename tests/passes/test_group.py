"""Group passes form units; every partitioned parameter ends in exactly one."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

import zgraph as zg
from tests.passes.toys import Block, Tower, members, planned
from zgraph.passes import Pass
from zgraph.plan import ModulePlan

HEAD = ("norm.weight", "norm.bias", "head.weight")


def block_parameters(index: int) -> tuple[str, ...]:
    return tuple(f"layers.{index}.{name}" for name, _ in Block().named_parameters())


class Expert(nn.Linear):
    pass


class Mixture(nn.Module):
    """A block with blocks of another class inside, and parameters before, between and after."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(Expert(4, 4) for _ in range(2))
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)
        mixed = sum(gate[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))
        return self.out(mixed)


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_by_class_makes_each_module_of_the_class_a_unit() -> None:
    found = members(planned(Tower(), zg.Group.by_class(Block)))
    blocks = {f"layers.{i}": block_parameters(i) for i in range(4)}
    assert found == {"embed": ("embed.weight",), **blocks, "norm..head": HEAD}


def test_by_policy_makes_each_chosen_module_a_unit() -> None:
    policy = zg.Group.by_policy(lambda module: module.name in ("layers.1", "layers.3"))
    assert members(planned(Tower(), policy)) == members(
        planned(Tower(), zg.Group.by_name(["layers.1", "layers.3"]))
    )


def test_by_policy_gives_parameters_to_the_innermost_module_as_by_class_does() -> None:
    model = nn.Sequential(Mixture(), Mixture())
    policy = zg.Group.by_policy(lambda m: m.classes[0].rsplit(".", 1)[-1] in ("Mixture", "Expert"))
    assert members(planned(model, policy)) == members(
        planned(model, zg.Group.by_class(Mixture, Expert))
    )


def test_by_policy_prints_alike_in_every_process() -> None:
    def is_head(module: ModulePlan) -> bool:
        return module.name == "head"

    assert str(zg.Group.by_policy(is_head)).endswith("is_head}")
    assert " at 0x" not in str(zg.Group.by_policy(partial(is_head)))


def test_by_policy_says_when_it_chooses_nothing_or_is_no_function() -> None:
    with pytest.raises(zg.PassError, match="true for no module with parameters"):
        planned(Tower(), zg.Group.by_policy(lambda module: False))
    with pytest.raises(zg.PassError, match="expected a function of a ModulePlan"):
        zg.Group.by_policy("Block")  # type: ignore[arg-type]


def test_by_class_takes_a_name_for_a_class() -> None:
    by_name = planned(Tower(), zg.Group.by_class("Block"))
    assert by_name.units == planned(Tower(), zg.Group.by_class(Block)).units


def test_by_class_finds_subclasses() -> None:
    class Wider(Block):
        pass

    model = Tower(2)
    model.layers[1] = Wider()
    found = members(planned(model, zg.Group.by_class(Block)))
    assert {"layers.0", "layers.1"} <= found.keys()


def test_a_parameter_belongs_to_the_innermost_of_nested_classes() -> None:
    found = members(planned(Mixture(), zg.Group.by_class(Mixture, Expert)))
    expected = ("router.weight", "router.bias", "out.weight", "out.bias")
    assert found == {
        "model": expected,
        "experts.0": ("experts.0.weight", "experts.0.bias"),
        "experts.1": ("experts.1.weight", "experts.1.bias"),
    }


def test_several_group_passes_add_up() -> None:
    both = planned(Mixture(), zg.Group.by_class(Expert), zg.Group.by_name([["router", "out"]]))
    assert members(both)["router+out"] == ("router.weight", "router.bias", "out.weight", "out.bias")
    assert [u.name for u in both.units] == ["router+out", "experts.0", "experts.1"]


def test_by_name_joins_modules_without_a_common_parent() -> None:
    found = members(planned(Tower(), zg.Group.by_name([["embed", "layers.1", "head"]])))
    assert found["embed+layers.1+head"] == ("embed.weight", *block_parameters(1), "head.weight")


def test_consecutive_layers_are_named_as_a_range() -> None:
    groups = [["layers.0", "layers.1", "layers.2"], ["layers.3"]]
    found = members(planned(Tower(), zg.Group.by_name(groups)))
    assert list(found) == ["embed", "layers.0..2", "layers.3", "norm..head"]
    assert found["layers.0..2"] == tuple(n for i in range(3) for n in block_parameters(i))


def test_a_gap_between_numbers_makes_no_range() -> None:
    found = members(planned(Tower(), zg.Group.by_name([["layers.0", "layers.2"]])))
    assert "layers.0+layers.2" in found


def test_by_name_takes_a_parameter_and_a_bare_string() -> None:
    found = members(planned(Tower(1), zg.Group.by_name([["embed", "head.weight"], "norm.bias"])))
    assert found["embed+head.weight"] == ("embed.weight", "head.weight")
    assert found["norm.bias"] == ("norm.bias",)


def test_the_empty_name_is_the_model_itself() -> None:
    model = Tower(1)
    names = tuple(name for name, _ in model.named_parameters())
    assert members(planned(model, zg.Group.by_name([[""]]))) == {"model": names}


def test_members_stay_in_registration_order_however_they_were_named() -> None:
    forward = planned(Tower(), zg.Group.by_name([["layers.0", "head"]]))
    reverse = planned(Tower(), zg.Group.by_name([["head", "layers.0"]]))
    assert forward.units[1].parameters == reverse.units[1].parameters


def test_whole_is_one_unit() -> None:
    model = Tower()
    names = tuple(name for name, _ in model.named_parameters())
    assert members(planned(model, zg.Group.whole())) == {"model": names}


def test_auto_takes_the_repeated_blocks_and_what_lies_before_and_after() -> None:
    auto, by_class = planned(Tower(), zg.Group.auto()), planned(Tower(), zg.Group.by_class(Block))
    assert members(auto) == members(by_class)


def test_auto_finds_the_blocks_of_a_sequential() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(), Block()), nn.Linear(4, 2))
    assert list(members(planned(model, zg.Group.auto()))) == ["0", "1.0", "1.1", "2"]


def test_auto_ignores_lists_inside_blocks_and_lists_of_different_modules() -> None:
    model = nn.Module()
    model.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
    model.layers = nn.ModuleList(Mixture() for _ in range(2))
    assert list(members(planned(model, zg.Group.auto()))) == [
        "stem.0..stem.2",
        "layers.0",
        "layers.1",
    ]


def test_auto_without_repeated_blocks_is_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert members(planned(model, zg.Group.auto())) == members(planned(model, zg.Group.whole()))


class Marked(nn.Module):
    """Stands where FSDP's policy would wrap."""

    def __init__(self, inner: nn.Module, **_: object) -> None:
        super().__init__()
        self.inner = inner


def fsdp_units(model: nn.Module, min_numel: int) -> set[str]:
    """Names of the modules that torch's size-based policy wraps."""
    policy = partial(size_based_auto_wrap_policy, min_num_params=min_numel)
    wrapped, _ = _recursive_wrap(model, policy, Marked, set(), set())
    marked = [name for name, module in wrapped.named_modules() if isinstance(module, Marked)]
    return {".".join(part for part in name.split(".") if part != "inner") for name in marked}


def own_units(model: nn.Module, min_numel: int) -> set[str]:
    plan = planned(model, zg.Group.by_numel(min_numel))
    return {unit.modules[0] for unit in plan.units if unit.modules}


@pytest.mark.parametrize("min_numel", [1, 20, 33, 36, 40, 41, 76, 77, 150, 300])
def test_by_numel_wraps_what_fsdps_size_policy_wraps(min_numel: int) -> None:
    assert own_units(Tower(), min_numel) == fsdp_units(Tower(), min_numel)


def test_by_numel_never_makes_a_list_a_unit_and_leaves_its_rest_to_the_parent() -> None:
    model = nn.Module()
    model.list = nn.ModuleList([nn.Linear(4, 4), nn.Linear(8, 8)])
    model.last = nn.Linear(8, 8)
    found = members(planned(model, zg.Group.by_numel(70)))
    assert found["list.1"] == ("list.1.weight", "list.1.bias")
    assert found["last"] == ("last.weight", "last.bias")
    assert found["list.0"] == ("list.0.weight", "list.0.bias")
    assert planned(model, zg.Group.by_numel(70)).units[0].modules == ()  # a rest, no module


def test_two_rests_of_one_module_have_two_names() -> None:
    model = nn.Module()
    model.part = nn.Module()
    for name in "abc":
        model.part.register_parameter(name, nn.Parameter(torch.ones(3)))
    found = members(planned(model, zg.Group.by_name([["part.b"]])))
    assert list(found.values()) == [("part.a",), ("part.b",), ("part.c",)]


def test_a_submodule_called_model_and_the_model_itself_have_two_names() -> None:
    class Inner(nn.Linear):
        pass

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner(2, 2)
            self.head = nn.Linear(2, 2)

    found = members(planned(Outer(), zg.Group.by_class(Inner, Outer)))
    assert sorted(found.values()) == [("head.weight", "head.bias"), ("model.weight", "model.bias")]


def test_a_tied_parameter_is_one_member_under_its_first_name() -> None:
    found = members(planned(Tied(), zg.Group.by_class(Block)))
    assert found["embed"] == ("embed.weight",)
    assert not any("head.weight" in names for names in found.values())


def test_a_tied_parameter_can_be_grouped_by_its_second_name() -> None:
    found = members(planned(Tied(), zg.Group.by_name([["head.weight", "layers.1"]])))
    assert found["head.weight+layers.1"] == ("embed.weight", *block_parameters(1))


def group_passes() -> Iterator[Pass]:
    """Every kind of group pass, on a `Tower` of four layers."""
    yield zg.Group.whole()
    yield zg.Group.auto()
    yield zg.Group.by_class(Block)
    yield zg.Group.by_class(nn.Linear, "Block")
    yield zg.Group.by_name([["layers.0.up.bias"], ["layers.2", "norm.weight"]])
    yield zg.Group.by_numel(30)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(st.data())
def test_units_cover_every_partitioned_parameter_once(data: st.DataObject) -> None:
    model = Tower()
    names = [name for name, _ in model.named_parameters()]
    group = data.draw(st.sampled_from(list(group_passes())))
    spared = ["layers.0.up.bias", "layers.2", "norm.weight"] if "by_name" in str(group) else []
    candidates = [n for n in names if not n.startswith(tuple(spared))] if spared else names[:6]
    ignored = data.draw(st.lists(st.sampled_from(candidates), unique=True, max_size=3))
    plan = planned(model, zg.Partition(ignore=ignored), group)
    covered = [name for unit in plan.units for name in unit.parameters]
    assert sorted(covered) == sorted(set(names) - set(ignored))
    for unit in plan.units:
        assert list(unit.parameters) == sorted(unit.parameters, key=names.index)
    assert len({unit.name for unit in plan.units}) == len(plan.units)
