"""Models and captures that the tests of `zg.capture` share."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

import zgraph as zg
from tests.passes.toys import Block
from zgraph.ir.graph import Stage

STAGES: tuple[Stage, ...] = ("joint", "forward", "backward")
TOKENS = torch.arange(8).view(2, 4)
PASSES = (zg.Partition(), zg.Group.by_class(Block), zg.Prefetch(1))
HSDP = (zg.Partition(replicate="replicate"), *PASSES[1:])


@cache
def offline(make: Callable[[], nn.Module], *passes: zg.Pass) -> zg.Captured:
    """One capture of a model of tokens, on two planned ranks, for all tests that only read it."""
    return zg.capture(make(), (TOKENS,), passes=passes, world_size=2)


class Single(nn.Module):
    """One layer: the shortest program that has a gather and a scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Broken(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Remembering(nn.Module):
    """Tensors outside of buffers, also in containers, and state that a call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0
        self.scale = torch.full((4,), 2.0)
        self.tables = {"shift": [torch.ones(4)]}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        return self.layer(x) * self.scale + self.tables["shift"][0]


class Normed(nn.Module):
    """A layer, BatchNorm, whose buffers a call changes in place, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x)))


class Mixing(nn.Module):
    """Adds what it is given, by position and by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, y: Tensor, *, scale: Tensor | None = None, double: bool = False
    ) -> dict[str, Tensor]:
        out = self.layer(x) + y
        out = out if scale is None else out * scale
        return {"out": 2 * out if double else out}
