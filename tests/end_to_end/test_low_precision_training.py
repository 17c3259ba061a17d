"""Why moving between FSDP and DeepSpeed changed results: at small learning rates bf16 weights do
not move, and only one of the two kept fp32 masters.

A step of AdamW moves each weight by about the learning rate, and half the distance between two bf16
numbers near 0.02 is 6e-5. So weights at rest in bf16 move only where they are small.
"""

import pytest
import torch
from torch import Tensor, nn

import zgraph as zg

NUMEL = 1000 * 1000
LOW = zg.MixedPrecision(torch.bfloat16, master_dtype=None)
MASTERS = zg.MixedPrecision(torch.bfloat16, master_dtype=torch.float32)


def _loaded() -> nn.Linear:
    """Weights as a checkpoint in bf16 has them: N(0, 0.02)."""
    torch.manual_seed(0)
    model = nn.Linear(1000, 1000, bias=False)
    nn.init.normal_(model.weight, std=0.02)
    return model.to(torch.bfloat16)


def _step(model: nn.Module, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    inputs = torch.randn(8, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    model(inputs).float().square().mean().backward()
    optimizer.step()


def _weights_after_a_step(precision: zg.MixedPrecision, lr: float) -> Tensor:
    passes = [zg.Partition(), precision]
    model = zg.compile(_loaded(), passes, backend="aot_eager")
    _step(model, lr)
    return next(model.parameters()).full_tensor()  # type: ignore[attr-defined]


def _share_moved(weights: Tensor) -> float:
    return (weights != _loaded().weight.to(weights.dtype)).float().mean().item()


# Shares: for N(0, 0.02) weights, those whose bf16 spacing the learning rate exceeds.
@pytest.mark.parametrize(("lr", "share"), [(1e-6, 0.020), (4e-6, 0.078), (1e-5, 0.155)])
def test_few_bf16_weights_move_at_small_learning_rates(lr: float, share: float) -> None:
    low = _weights_after_a_step(LOW, lr)
    assert low.dtype == torch.bfloat16
    # A share of a million weights: its standard deviation is 4e-4 at most.
    assert _share_moved(low) == pytest.approx(share, abs=2e-3)
    plain = _loaded()
    _step(plain, lr)
    assert torch.equal(low, plain.weight)


@pytest.mark.parametrize("lr", [1e-6, 4e-6, 1e-5])
def test_all_fp32_masters_move(lr: float) -> None:
    masters = _weights_after_a_step(MASTERS, lr)
    assert masters.dtype == torch.float32
    assert _share_moved(masters) > 0.999
