"""The models that tests train: small, and between them everything that a layout can stumble over.

Each takes a batch and returns the mean loss over it, so the mean of the ranks' losses and gradients
is the whole batch's. `ZOO` knows how to build each and what it is trained on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.byte_llama.model import Llama, LlamaConfig

BATCH = 12
"""Rows of a whole batch: every world size up to 4 divides it."""


class MlpBlock(nn.Module):
    """Norm, two layers and a residual; optionally with a graph break in the middle."""

    def __init__(self, width: int, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(hidden)


class Mlp(nn.Module):
    """A stack of `MlpBlock`s between two linear layers. x [B, 10], y [B, 3] -> loss []."""

    def __init__(self, depth: int = 2, width: int = 12, breaks: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(10, width)
        self.blocks = nn.ModuleList(MlpBlock(width, breaks) for _ in range(depth))
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.leave(x).float(), y.float())


class ConvNet(nn.Module):
    """Convolutions with BatchNorm. x [B, 3, 8, 8], y [B] -> loss [].

    The convolutions have no bias: BatchNorm takes it out again, so that its gradient is exactly
    zero, and Adam would blow up the rounding that is left of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(5)
        self.second = nn.Conv2d(5, 7, 3, stride=2, bias=False)
        self.second_norm = nn.BatchNorm2d(7)
        self.leave = nn.Linear(7, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.silu(self.first_norm(self.first(x)))
        x = F.silu(self.second_norm(self.second(x)))
        return F.cross_entropy(self.leave(x.mean(dim=(2, 3))), y)


class Odd(nn.Module):
    """What a layout can stumble over. x [B, 7], y [B, 5] -> loss [].

    Sizes that no world size divides, a parameter of one element, an empty one, tied weights used
    far apart, frozen parameters (one bf16, one of integers), fp64 next to fp32, one never used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 11)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.tied = nn.Linear(11, 11, bias=False)
        self.wide = nn.Linear(11, 13, dtype=torch.float64)
        self.back = nn.Linear(13, 11)
        self.tied_again = nn.Linear(11, 11)
        self.tied_again.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.randn(11).to(torch.bfloat16), requires_grad=False)
        self.order = nn.Parameter(torch.randperm(11), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3, 5))
        self.leave = nn.Linear(11, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x)) * self.scale + self.empty.sum()
        x = torch.tanh(self.tied(x))[:, self.order]
        x = self.back(torch.tanh(self.wide(x.double())).float())
        x = torch.tanh(self.tied_again(x)) * self.frozen.float()
        return F.mse_loss(self.leave(x), y)


class Tagger(nn.Module):
    """A label for each token, after one attention. tokens, labels [B, L] -> loss []."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 12)
        self.qkv = nn.Linear(12, 36, bias=False)
        self.blocks = nn.ModuleList(MlpBlock(12) for _ in range(2))
        self.leave = nn.Linear(12, 40)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.leave(x).flatten(0, 1), labels.flatten())


def small_llama(layers: int = 2, tied: bool = False) -> Llama:
    """A Llama of some 8,000 parameters."""
    config = LlamaConfig(vocab=40, dim=24, layers=layers, heads=2, ffn=40, max_length=16, tied=tied)
    return Llama(config)


Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Attributes:
        build: makes the model; draws from torch's generator.
        draw: makes one batch of `BATCH` rows; draws from the generator it is given.
        whole: every rank gets the whole batch. For BatchNorm: a part's statistics are not the
            whole's, by nature.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    whole: bool = False


def _mlp_batch(generator: torch.Generator) -> Batch:
    x = torch.randn(BATCH, 10, generator=generator)
    return x, torch.randn(BATCH, 3, generator=generator)


def _images(generator: torch.Generator) -> Batch:
    x = torch.randn(BATCH, 3, 8, 8, generator=generator)
    return x, torch.randint(4, (BATCH,), generator=generator)


def _tokens(generator: torch.Generator) -> Batch:
    text = torch.randint(40, (BATCH, 9), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _odd_batch(generator: torch.Generator) -> Batch:
    x = torch.randn(BATCH, 7, generator=generator)
    return x, torch.randn(BATCH, 5, generator=generator)


ZOO: dict[str, Entry] = {
    "mlp": Entry(Mlp, _mlp_batch),
    "broken_mlp": Entry(lambda: Mlp(breaks=True), _mlp_batch),
    "deep_mlp": Entry(lambda: Mlp(depth=12), _mlp_batch),
    "deep_broken_mlp": Entry(lambda: Mlp(depth=12, breaks=True), _mlp_batch),
    "convnet": Entry(ConvNet, _images, whole=True),
    "llama": Entry(small_llama, _tokens),
    "tied_llama": Entry(lambda: small_llama(tied=True), _tokens),
    "tagger": Entry(Tagger, _tokens),
    "odd": Entry(Odd, _odd_batch),
}


def build(name: str) -> nn.Module:
    """The model called `name`, the same in every process."""
    torch.manual_seed(1)
    return ZOO[name].build()


def batches(name: str, count: int, rank: int = 0, ranks: int = 1) -> list[Batch]:
    """What rank `rank` of `ranks` trains on: its rows of the same `count` batches everywhere."""
    entry, generator = ZOO[name], torch.Generator().manual_seed(2)
    drawn = [entry.draw(generator) for _ in range(count)]
    if entry.whole:
        return drawn
    return [tuple(part.chunk(ranks)[rank] for part in batch) for batch in drawn]
