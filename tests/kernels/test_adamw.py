"""adamw_flat: against torch.optim.AdamW in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels import assert_same_bits, kernel, on_each_device
from zgraph_kernels import adamw_flat

adamw = kernel("adamw")
OPTIONS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 10


def torch_adamw(start: Tensor, grads: list[Tensor]) -> Tensor:
    param = torch.nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([param], **OPTIONS)
    for grad in grads:
        param.grad = grad.double()
        optimizer.step()
    return param.detach()


def ours(
    run: Any, start: Tensor, grads: list[Tensor], low: Tensor | None, in_memory: bool = False
) -> Tensor:
    param, step = start.clone(), torch.zeros((), device=start.device)
    moments = [torch.zeros_like(start, dtype=torch.float32) for _ in range(2)]
    lr = torch.tensor(OPTIONS["lr"], device=start.device) if in_memory else None
    betas, rest = OPTIONS["betas"], (OPTIONS["eps"], OPTIONS["weight_decay"])
    for grad in grads:
        step += 1
        rate = 0.0 if in_memory else OPTIONS["lr"]
        run(param, grad, *moments, step, low, rate, lr, *betas, *rest)
    return param


@on_each_device
@pytest.mark.parametrize("in_memory", [False, True], ids=["lr number", "lr tensor"])
@pytest.mark.parametrize("numel", [1, 1024, 3001])
def test_ten_steps_equal_torchs(device: str, numel: int, in_memory: bool) -> None:
    start = torch.randn(numel, device=device)
    grads = [torch.randn(numel, device=device) for _ in range(STEPS)]
    low = torch.empty(numel, device=device, dtype=torch.float16)
    expected = torch_adamw(start, grads)
    for run in (adamw.triton, adamw.reference):
        param = ours(run, start, grads, low, in_memory)
        # A few ulps of fp32 a step: 3e-7 of the parameter, and of the step's own size.
        torch.testing.assert_close(param.double(), expected, rtol=3e-6, atol=3e-7)
        assert_same_bits(low, param.half())


@on_each_device
def test_gradients_steps_and_rates_may_change_dtype_from_call_to_call(device: str) -> None:
    start = torch.randn(3000, device=device)
    grad = torch.randn(3000, device=device).half()
    one, rate = torch.ones((), device=device), torch.tensor(OPTIONS["lr"], device=device)
    rest = (*OPTIONS["betas"], OPTIONS["eps"], OPTIONS["weight_decay"])
    expected = torch_adamw(start, [grad])
    for dtype in (torch.float32, torch.float16, torch.float64):
        for step, lr in ((one, rate), (one.long(), rate), (one.view(1), rate.double())):
            for run in (adamw.triton, adamw.reference):
                param, moments = start.clone(), [torch.zeros_like(start) for _ in range(2)]
                run(param, grad.to(dtype), *moments, step, None, 0.0, lr, *rest)
                torch.testing.assert_close(param.double(), expected, rtol=1e-6, atol=1e-7)


@on_each_device
def test_betas_of_zero(device: str) -> None:
    start, grad = torch.randn(100, device=device), torch.randn(100, device=device)
    reference, moments = torch.nn.Parameter(start.double()), [torch.zeros_like(start) for _ in "mv"]
    reference.grad = grad.double()
    torch.optim.AdamW([reference], lr=0.1, betas=(0.0, 0.0), weight_decay=0.0).step()
    adamw.triton(
        start, grad, *moments, torch.ones((), device=device), None, 0.1, None, *[0.0] * 2, 1e-8, 0.0
    )
    torch.testing.assert_close(start.double(), reference.detach(), rtol=1e-6, atol=1e-7)


@on_each_device
def test_a_shard_of_low_precision_rounds_at_each_step(device: str) -> None:
    start = torch.randn(2000, device=device).half()
    grads = [torch.randn(2000, device=device).half() for _ in range(3)]
    param = ours(adamw.triton, start, grads, None)
    assert param.dtype == torch.float16
    # Two roundings of 2^-11 lie between what the kernel and fp64 have after three steps.
    torch.testing.assert_close(param.double(), torch_adamw(start, grads), rtol=2e-3, atol=1e-4)


@on_each_device
def test_unaligned_and_empty_shards(device: str) -> None:
    start = torch.randn(3001, device=device)[1:]
    grads = [torch.randn(3000, device=device)]
    expected = torch_adamw(start, grads)
    param = torch.empty(3001, device=device)[1:].copy_(start)
    moments = [torch.zeros(3000, device=device) for _ in range(2)]
    one = torch.ones((), device=device)
    numbers = (OPTIONS["lr"], None, *OPTIONS["betas"], OPTIONS["eps"], OPTIONS["weight_decay"])
    adamw.triton(param, grads[0], *moments, one, None, *numbers)
    torch.testing.assert_close(param.double(), expected, rtol=1e-6, atol=1e-7)
    empty = [torch.empty(0, device=device) for _ in range(4)]
    adamw.triton(*empty, one, None, *numbers)


def test_mistakes_are_named() -> None:
    param = torch.zeros(4)
    with pytest.raises(ValueError, match=r"exp_avg has shape \[3\], param \[4\]"):
        adamw_flat(param, param, torch.zeros(3), param, torch.ones(()), lr=0.1)
    with pytest.raises(ValueError, match=r"exp_avg_sq is torch\.float16"):
        adamw_flat(param, param, param, param.half(), torch.ones(()), lr=0.1)
    with pytest.raises(ValueError, match="step has 2 elements"):
        adamw_flat(param, param, param, param, torch.ones(2), lr=0.1)
    with pytest.raises(ValueError, match="lr has 2 elements"):
        adamw_flat(param, param, param, param, torch.ones(1), lr=torch.ones(2))
    with pytest.raises(RuntimeError, match="requires grad"):
        adamw_flat(torch.nn.Parameter(param), param, param, param, torch.ones(1), lr=0.1)
