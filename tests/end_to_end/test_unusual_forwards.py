"""Forwards that a capture could get wrong, trained sharded and compared with plain PyTorch.

Tolerance as in test_plain_pytorch.py: 1e-6 of each tensor's 2-norm after five steps, for rounding.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zgraph as zg
from tests.support.models import BATCH, Mlp
from tests.support.pool import run_ranks
from tests.support.training import (
    STEPS,
    Run,
    assert_close,
    assert_same_bits,
    mean_run,
    mesh_of,
    train,
)

RELATIVE = 1e-6
PASSES = [
    zg.Partition(),
    zg.Group.by_class("MlpBlock"),
    zg.Persist(max_numel=30),
    zg.Reshard(keep_between_uses=False),
    zg.Prefetch(units=2),
]


class Checkpointed(Mlp):
    """Each block's forward runs again in backward."""

    def forward(self, x: Tensor, y: Tensor, step: int) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.mse_loss(self.leave(x), y)


class Repeated(Mlp):
    """All blocks in turn, twice: each unit is used in two places."""

    def forward(self, x: Tensor, y: Tensor, step: int) -> Tensor:
        x = self.enter(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return F.mse_loss(self.leave(x), y)


class Skipping(Mlp):
    """The first block is left out of every other step: its parameters then have no gradient."""

    def forward(self, x: Tensor, y: Tensor, step: int) -> Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            if index or step % 2:
                x = block(x)
        return F.mse_loss(self.leave(x), y)


class ReturningWeights(Mlp):
    """Weights leave the graph, one of them as a view, and come back in the loss."""

    def forward(self, x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x, y), self.enter.weight, self.blocks[1].up.weight.t()


class Dropping(Mlp):
    """Dropout, differently on each rank."""

    def forward(self, x: Tensor, y: Tensor, step: int) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = F.dropout(block(x), 0.3)
        return F.mse_loss(self.leave(x), y)


class Penalised(nn.Module):
    """Makes one loss of all that a model returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> Tensor:
        result = self.model(*batch)
        if isinstance(result, Tensor):
            return result
        loss, *weights = result
        return loss + 0.1 * sum(weight.square().sum() for weight in weights)


def data(rank: int = 0, ranks: int = 1) -> list[tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(6)
    drawn = [
        (torch.randn(BATCH, 10, generator=generator), torch.randn(BATCH, 3, generator=generator))
        for _ in range(STEPS)
    ]
    return [(x.chunk(ranks)[rank], y.chunk(ranks)[rank], i) for i, (x, y) in enumerate(drawn)]


def build(kind: type[Mlp]) -> Mlp:
    torch.manual_seed(1)
    return kind()


def train_sharded(kind: type[Mlp], skipped: bool = False) -> Run:
    model = build(kind)
    if skipped:
        model.forward = torch.compiler.disable(model.forward)
    zg.compile(model, PASSES, mesh_of(), backend="aot_eager")
    torch.manual_seed(dist.get_rank())
    return train(Penalised(model), data(dist.get_rank(), dist.get_world_size()))


@pytest.mark.parametrize("kind", [Checkpointed, Repeated, Skipping, ReturningWeights])
def test_training_equals_plain_pytorch(kind: type[Mlp]) -> None:
    plain = train(Penalised(build(kind)), data())
    assert_close(mean_run(run_ranks(train_sharded, 2, kind)), plain, RELATIVE)


def test_dropout_draws_the_same_numbers_captured_or_not() -> None:
    captured = run_ranks(train_sharded, 2, Dropping)
    skipped = run_ranks(train_sharded, 2, Dropping, True)
    assert captured[0].losses != captured[1].losses
    for one, other in zip(captured, skipped, strict=True):
        assert_same_bits(one, other)
