"""State dicts keep their keys and take whole plain values."""

import copy

import pytest
import torch
from torch import nn

import zgraph as zg
from tests.runtime.ranks import Shapes, assert_equal, build, on_ranks, shard, whole


class Net(nn.Module):
    """Parameters, a tied one, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 9)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)


@on_ranks(2)
def test_keys_and_values_are_those_of_the_plain_model() -> None:
    plain, model = build(Net).state_dict(), shard(build(Net)).state_dict()
    assert list(model) == list(plain)
    assert_equal(list(model.values()), list(plain.values()))
    assert isinstance(model["embed.weight"], zg.ShardedParameter)
    assert not model["embed.weight"].requires_grad
    assert type(model["norm.running_mean"]) is torch.Tensor


@on_ranks(2, 3)
def test_a_plain_whole_state_dict_can_be_loaded() -> None:
    for make in (Net, Shapes):
        given = build(make, seed=7).state_dict()
        for passes in ((), (zg.Persist(9),), (zg.MixedPrecision("bf16"),)):
            model = shard(build(make), *passes)
            assert str(model.load_state_dict(given)) == "<All keys matched successfully>"
            assert_equal([model.state_dict()[key] for key in given], list(given.values()))


@on_ranks(2)
def test_a_tied_parameter_stays_tied() -> None:
    model = shard(build(Net))
    named = dict(model.named_parameters(remove_duplicate=False))
    assert named["head.weight"] is named["embed.weight"]
    given = build(Net, seed=7).state_dict()
    model.load_state_dict(given)
    assert whole(model.state_dict()["head.weight"]).equal(given["embed.weight"])


@on_ranks(2)
def test_loading_refuses_what_plain_pytorch_refuses() -> None:
    model = shard(build(Net))
    given = build(Net, seed=7).state_dict()
    missing = {key: value for key, value in given.items() if key != "norm.bias"}
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.bias"):
        model.load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.bias"):
        model.load_state_dict({**given, "head.bias": torch.ones(8)})
    result = model.load_state_dict({"norm.weight": given["norm.weight"]}, strict=False)
    assert "embed.weight" in result.missing_keys
    assert whole(model.state_dict()["norm.weight"]).equal(given["norm.weight"])


@on_ranks(2)
def test_loading_by_assignment_is_refused_and_changes_nothing() -> None:
    model = shard(build(Shapes))
    with pytest.raises(RuntimeError, match=r"matrix is sharded.*load_state_dict"):
        model.load_state_dict(build(Shapes, seed=7).state_dict(), assign=True)
    assert_equal(list(model.parameters()), list(build(Shapes).parameters()))


@on_ranks(2)
def test_a_models_own_state_dict_restores_it() -> None:
    model = shard(build(Shapes))
    saved = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert not whole(model.state_dict()["matrix"]).any()
    model.load_state_dict(saved)
    assert_equal(list(model.parameters()), list(build(Shapes).parameters()))


@on_ranks(2)
def test_loading_values_reaches_the_compiled_graph() -> None:
    x = torch.randn(4, 5)
    model = shard(build(Shapes))
    first = model(x)
    model.load_state_dict(build(Shapes, seed=7).state_dict())
    second = model(x)
    torch.testing.assert_close(first, build(Shapes)(x))
    torch.testing.assert_close(second, build(Shapes, seed=7)(x))
    assert len(zg.inspect(model).frames) == 1
