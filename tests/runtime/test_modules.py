"""Modules that read their parameters in unusual ways compute what plain ones do."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zgraph as zg
from tests.runtime.ranks import build, on_ranks, shard, whole


class Recurrent(nn.Module):
    """Keeps its weights in a list of its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(8, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0]


class Attending(nn.Module):
    """Hands its output projection's parameters to a function, without calling the module."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.MultiheadAttention(5, 1, batch_first=True)
        self.other = nn.MultiheadAttention(5, 5, kdim=5, vdim=5, batch_first=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.same(x, x, x, need_weights=False)[0]
        return self.other(x, x, x)[0]


class Listing(nn.Module):
    """Parameters in a list, in a dictionary, and in a list inside."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.randn(5), torch.randn(5)])
        self.dict = nn.ParameterDict({"a": torch.randn(5), "b": torch.randn(1)})
        self.inner = nn.ModuleDict({"c": nn.ParameterList([torch.randn(5)])})

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.list:
            x = torch.sin(x * parameter)
        return x * self.dict["a"] + self.dict["b"] * self.inner["c"][0] + self.list[1]


class Twice(nn.Module):
    """Uses one layer twice, and a parameter by two of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.gain = nn.Parameter(torch.randn(5))
        self.again = self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x * self.gain))) * self.again


class Getting(nn.Module):
    """Reads parameters by name, and through `parameters()`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_a, self.weight_b = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        for letter in "ab":
            x = torch.tanh(x * getattr(self, f"weight_{letter}"))
        return x


class Bilingual(nn.Module):
    """A layer of each of a few other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(5, 5, 5)
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.prelu = nn.PReLU()
        self.encoder = nn.TransformerEncoderLayer(5, 1, 7, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.prelu(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return self.encoder(self.bilinear(x, x))


class Normed(nn.Module):
    """Weights that are computed from others whenever they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(5, 5))
        self.second = parametrizations.orthogonal(nn.Linear(5, 5), "weight", "householder")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Checkpointed(nn.Module):
    """Computes its first half again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))
        self.second = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


MODELS: dict[str, type[nn.Module]] = {
    "lstm and gru": Recurrent,
    "attention": Attending,
    "lists and dictionaries": Listing,
    "one layer twice": Twice,
    "getattr": Getting,
    "weight norm": Normed,
    "checkpointing": Checkpointed,
    "other layers": Bilingual,
}


@dataclass
class Step:
    """What one step gives: the output, and each parameter's gradient."""

    output: Tensor
    gradients: dict[str, Tensor]


def step(model: nn.Module, x: Tensor) -> Step:
    output = model(x)
    output.square().mean().backward()
    pairs = model.named_parameters()
    return Step(output.detach(), {name: whole(p.grad) for name, p in pairs if p.grad is not None})


def assert_close(one: Step, other: Step) -> None:
    torch.testing.assert_close(one.output, other.output)
    assert one.gradients.keys() == other.gradients.keys()
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(
            gradient, other.gradients[name], msg=lambda t, n=name: f"{n}: {t}"
        )


def compare(make: Callable[[], nn.Module], *passes: zg.Pass) -> None:
    """Twice: captured code must not hold on to what it has seen."""
    plain, model = build(make), shard(build(make), *passes)
    assert type(model).__name__ == type(plain).__name__ and isinstance(model, type(plain))
    for seed in (1, 2):
        x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(seed))
        assert_close(step(model, x), step(plain, x))
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
            for both in (model, plain):
                for p in both.parameters():
                    p.mul_(0.5)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_training_equals_the_plain_model(name: str) -> None:
    compare(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_so_it_does_with_persistent_parameters_in_one_unit(name: str) -> None:
    compare(MODELS[name], zg.Group.whole(), zg.Persist(10))


@on_ranks(2)
def test_modules_keep_their_class_name_and_module() -> None:
    model, plain = shard(build(Bilingual)), build(Bilingual)
    for (name, one), (other_name, other) in zip(
        model.named_modules(), plain.named_modules(), strict=True
    ):
        assert name == other_name and isinstance(one, type(other))
        assert type(one).__qualname__ == type(other).__qualname__
        assert type(one).__module__ == type(other).__module__
    assert repr(model) == repr(plain)
