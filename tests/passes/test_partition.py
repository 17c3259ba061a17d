"""Partition chooses which parameters zgraph looks after."""

import pytest
from torch import nn

import zgraph as zg
from tests.passes.toys import Tower, planned
from zgraph.passes.partition import Ignore


def spared(model: nn.Module, ignore: Ignore) -> set[str]:
    plan = planned(model, zg.Partition(ignore=ignore))
    return {p.name for p in plan.parameters if not p.partitioned}


def test_every_parameter_is_partitioned_by_default() -> None:
    assert spared(Tower(), ()) == set()


def test_a_name_spares_a_parameter_or_everything_in_a_module() -> None:
    assert spared(Tower(), ["norm.weight"]) == {"norm.weight"}
    assert spared(Tower(), ["norm"]) == {"norm.weight", "norm.bias"}
    assert len(spared(Tower(), ["layers"])) == 16


def test_a_name_is_not_a_prefix() -> None:
    assert {n.split(".")[1] for n in spared(Tower(12), ["layers.1"])} == {"1"}


def test_a_predicate_is_asked_for_each_parameter() -> None:
    biases = {name for name, _ in Tower().named_parameters() if name.endswith("bias")}
    assert spared(Tower(), lambda name: name.endswith("bias")) == biases


def test_a_tied_parameter_is_spared_under_either_name() -> None:
    model = Tower()
    model.head.weight = model.embed.weight
    assert spared(model, ["head"]) == spared(model, ["embed.weight"]) == {"embed.weight"}


def test_a_name_that_matches_nothing_is_refused_with_the_nearest() -> None:
    with pytest.raises(zg.PassError, match=r"ignore=\['layers.0.upp'\].*nearest.*layers.0.up"):
        spared(Tower(), ["layers.0.upp"])


def test_a_bare_string_is_refused() -> None:
    with pytest.raises(zg.PassError, match="expected a list of names"):
        zg.Partition(ignore="norm")
