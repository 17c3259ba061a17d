"""Training through zgraph's kernels gives the bits that training through torch's gives."""

from typing import Any

import pytest
import torch

import zgraph as zg
from experiments.byte_llama.model import Block
from tests.gpu import training
from tests.gpu.devices import needs_gpus, run_on_gpus

pytestmark = [pytest.mark.gpu]
POLICIES = {
    "fp32": zg.MixedPrecision(),
    "bf16, reduced in fp32": zg.MixedPrecision(torch.bfloat16, torch.float32),
    "bf16": zg.MixedPrecision(torch.bfloat16, torch.bfloat16),
    "fp16": zg.MixedPrecision(torch.float16, torch.float16),
}


def _train(kernels: str, policy: str) -> tuple[list[float], list[str]]:
    """Losses and sums of squares of parameters, then the kernels' ops in the compiled graphs."""
    passes = [zg.Partition(), zg.Group.by_class(Block), POLICIES[policy]]
    model = zg.compile(
        training.llama(),
        passes,
        mesh=training.mesh(),
        backend="aot_eager",
        options={"kernels": kernels},
    )
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    losses = []
    for step in range(3):
        for micro_step in range(2):  # the second accumulates
            loss = model(*training.batch(2 * step + micro_step))
            loss.backward()
            losses.append(loss.item())
        adamw.step()
        adamw.zero_grad()
    wholes = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    return losses + [whole.double().square().sum().item() for whole in wholes], _ops(model)


def _ops(model: Any) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(2):
            model(*training.batch(0)).backward()
    return sorted({e.name for e in profiled.events() if e.name.startswith("zgraph_kernels::")})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "count", [pytest.param(count, marks=needs_gpus[count], id=f"{count} GPUs") for count in (1, 2)]
)
def test_kernels_change_no_number(count: int, policy: str) -> None:
    ours, ops = run_on_gpus(_train, count, "triton", policy)[0]
    theirs, none = run_on_gpus(_train, count, "torch", policy)[0]
    assert ours == theirs
    assert ops == ["zgraph_kernels::accumulate", "zgraph_kernels::pack"]
    assert not none
