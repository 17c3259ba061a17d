"""Random small models and random pass lists for property tests, as plain values.

A `Stack` is described by layers, a `Schedule` by choices: both are sent to every rank and built
there, and hypothesis can shrink them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import zgraph as zg
from tests.support.models import BATCH, Batch

WIDTH = 5
ROWS = BATCH


@dataclass(frozen=True)
class Layer:
    """One layer of a block.

    Attributes:
        kind: "linear", or "norm", whose width is the width it meets.
        tied: share the weight of the first earlier linear layer of the same shape, if there is one.
    """

    kind: str
    width: int
    bias: bool
    frozen: bool
    tied: bool


Blocks = tuple[tuple[Layer, ...], ...]


class StackBlock(nn.Module):
    """Layers with tanh behind each."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Stack(nn.Module):
    """A model as described. x [B, 5], y [B] -> mean squared error []."""

    def __init__(self, described: Blocks) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList()
        weights: dict[torch.Size, nn.Parameter] = {}
        width = WIDTH
        for layers in described:
            built = []
            for layer in layers:
                built.append(_build_layer(layer, width, weights))
                width = layer.width if layer.kind == "linear" else width
            self.blocks.append(StackBlock(built))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return (x.float().sum(dim=-1) - y.float()).square().mean()


def _build_layer(layer: Layer, width: int, weights: dict[torch.Size, nn.Parameter]) -> nn.Module:
    if layer.kind == "norm":
        built: nn.Module = nn.LayerNorm(width, elementwise_affine=True, bias=layer.bias)
        built.weight.requires_grad_(not layer.frozen)
        return built
    linear = nn.Linear(width, layer.width, bias=layer.bias)
    held = weights.setdefault(linear.weight.shape, linear.weight)
    if layer.tied:
        linear.weight = held
    elif layer.frozen:
        linear.weight.requires_grad_(False)
    return linear


def build_stack(described: Blocks) -> Stack:
    """The same model in every process."""
    torch.manual_seed(3)
    return Stack(described)


def stack_batches(count: int, rank: int, ranks: int) -> list[Batch]:
    """This rank's rows of the same batches everywhere."""
    generator = torch.Generator().manual_seed(4)
    drawn = [
        (torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, generator=generator))
        for _ in range(count)
    ]
    return [(x.chunk(ranks)[rank], y.chunk(ranks)[rank]) for x, y in drawn]


# ------------------------------------------------------------------ drawing

layers = st.builds(
    Layer,
    kind=st.sampled_from(["linear", "linear", "norm"]),
    width=st.sampled_from([3, 5, 8]),
    bias=st.booleans(),
    frozen=st.integers(0, 3).map(lambda number: number == 3),
    tied=st.integers(0, 2).map(lambda number: number == 2),
)
blocks = st.lists(st.lists(layers, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(
    tuple
)


@st.composite
def schedules(draw: st.DrawFn, described: Blocks) -> list[zg.Pass]:
    """A legal pass list for this model that says nothing about dtypes, in any order."""
    persist = st.builds(
        zg.Persist,
        max_numel=st.sampled_from([0, 5, 30]),
        max_total=st.none() | st.sampled_from([0, 40]),
    )
    reshard = st.builds(zg.Reshard, after_forward=st.booleans(), keep_between_uses=st.booleans())
    prefetch = st.builds(
        zg.Prefetch, units=st.integers(0, 3), backward_units=st.none() | st.integers(0, 3)
    )
    drawn = [draw(st.none() | one) for one in (_groups(described), persist, reshard, prefetch)]
    chosen = [one for one in drawn if one is not None]
    return [zg.Partition(), *draw(st.permutations(chosen))]


def _groups(described: Blocks) -> st.SearchStrategy[zg.Pass]:
    parameters = dict(build_stack(described).named_parameters())
    total = sum(p.numel() for p in parameters.values())
    return st.one_of(
        st.sampled_from(
            [
                zg.Group.auto(),
                zg.Group.whole(),
                zg.Group.by_class("StackBlock"),
                zg.Group.by_class("Linear"),
                zg.Group.by_class("StackBlock", nn.Linear),
            ]
        ),
        st.integers(1, total).map(zg.Group.by_numel),
        st.lists(st.integers(-1, 2), min_size=len(parameters), max_size=len(parameters)).map(
            lambda numbers: _by_name(list(parameters), numbers)
        ),
    )


def _by_name(names: Sequence[str], numbers: Sequence[int]) -> zg.Pass:
    """Parameters with one number form one group, wherever they lie; -1 is in no group."""
    found: dict[int, list[str]] = {}
    for name, number in zip(names, numbers, strict=True):
        if number >= 0:
            found.setdefault(number, []).append(name)
    return zg.Group.by_name(found.values())
