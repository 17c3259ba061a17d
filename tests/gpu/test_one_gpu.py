"""One GPU: a mesh of one rank needs no collectives and trains as plain PyTorch does."""

import pytest
import torch

from tests.gpu import training
from tests.gpu.devices import needs_gpus, run_on_gpus

pytestmark = [pytest.mark.gpu, needs_gpus[1]]


def _plain() -> list[float]:
    model = training.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    losses = []
    for step in range(training.STEPS):
        loss = model(*training.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses + [p.double().square().sum().item() for p in model.parameters()]


def test_a_mesh_of_one_trains_as_plain_pytorch_bit_for_bit() -> None:
    ours = run_on_gpus(training.with_zgraph, 1, [], "aot_eager", {"foreach": True})
    assert ours == run_on_gpus(_plain, 1)
