"""Persist keeps small parameters whole on every rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zgraph as zg
from tests.passes.toys import Tower, parameters, planned


def persistent(*passes: zg.Pass) -> set[str]:
    return {name for name, p in parameters(planned(Tower(2), *passes)).items() if p.persistent}


def test_parameters_up_to_the_limit_persist_and_larger_ones_do_not() -> None:
    sizes = {name: p.numel() for name, p in Tower(2).named_parameters()}
    assert 8 in sizes.values() and 32 in sizes.values()
    assert persistent(zg.Persist(max_numel=8)) == {n for n, size in sizes.items() if size <= 8}
    assert persistent(zg.Persist(max_numel=7)) == {n for n, size in sizes.items() if size <= 7}
    assert persistent(zg.Persist(max_numel=32)) == set(sizes)


def test_nothing_persists_without_the_pass_or_with_a_limit_of_zero() -> None:
    assert persistent() == persistent(zg.Persist()) == set()


def test_frozen_parameters_persist_too() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    plan = planned(model, zg.Persist(max_numel=2))
    assert parameters(plan)["bias"].persistent


def test_ignored_parameters_do_not_persist_or_count() -> None:
    partition = zg.Partition(ignore=["layers.0"])
    found = persistent(partition, zg.Persist(max_numel=8, max_total=12))
    assert found == {"layers.1.up.bias", "layers.1.down.bias"}


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    max_numel=st.integers(0, 12),
    max_total=st.none() | st.integers(0, 40),
)
def test_the_total_is_filled_in_registration_order(
    sizes: list[int], max_numel: int, max_total: int | None
) -> None:
    model = nn.ParameterList([torch.zeros(size) for size in sizes])
    plan = planned(model, zg.Persist(max_numel=max_numel, max_total=max_total))
    room = float("inf") if max_total is None else max_total
    for parameter in plan.parameters:
        expected = parameter.numel <= min(max_numel, room)
        assert parameter.persistent is expected, parameter.name
        room -= parameter.numel if expected else 0


@pytest.mark.parametrize("limit", [-1, 1.5, True, "10", None])
def test_a_limit_that_is_no_number_of_elements_is_refused(limit: object) -> None:
    with pytest.raises(zg.PassError, match=r"Persist\(max_numel=.*0 or more"):
        zg.Persist(max_numel=limit)  # type: ignore[arg-type]


def test_a_negative_total_is_refused() -> None:
    with pytest.raises(zg.PassError, match=r"Persist\(max_total=-1\)"):
        zg.Persist(max_numel=1, max_total=-1)
