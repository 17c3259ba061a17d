"""adamw_flat: the AdamW step over a flat shard, which also writes the next gather's copy.

Bytes moved an element of an fp32 shard with a bf16 copy: 16 read (gradient, parameter, both
moments), 14 written; bound by memory bandwidth. A step with a cast behind it moves 34.
"""

from functools import cache
from math import inf, log2

import torch
from torch import Tensor

from zgraph_kernels.launch import FlatKernel, is_supported
from zgraph_kernels.library import define, refuse_gradients, written
from zgraph_kernels.steps import AdamW


def reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    low: Tensor | None,
    lr: float,
    lr_tensor: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """`adamw_flat` in plain torch."""
    _check(param, grad, exp_avg, exp_avg_sq, step, low, lr_tensor)
    rate = lr if lr_tensor is None else lr_tensor.float().reshape(())
    count = step.double().reshape(())
    correction1, correction2 = (1 - beta1**count).float(), (1 - beta2**count).float()
    grad = grad.float()
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = exp_avg_sq.sqrt() / correction2.sqrt() + eps
    kept = param.float() * (1 - rate * weight_decay)
    param.copy_(kept - rate / correction1 * exp_avg / root)
    if low is not None:
        low.copy_(param)


def triton(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    low: Tensor | None,
    lr: float,
    lr_tensor: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """`adamw_flat` through one generated kernel."""
    _check(param, grad, exp_avg, exp_avg_sq, step, low, lr_tensor)
    copies = () if low is None else (low,)
    flat = all(t.is_contiguous() for t in (param, grad, exp_avg, exp_avg_sq, *copies))
    if not (flat and is_supported(param, grad, *copies)):
        return reference(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            step,
            low,
            lr,
            lr_tensor,
            beta1,
            beta2,
            eps,
            weight_decay,
        )
    rates = () if lr_tensor is None else (lr_tensor,)
    tensors = (grad, param, exp_avg, exp_avg_sq, step, *rates, *copies)
    rate = (lr,) if lr_tensor is None else ()
    factors = (beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay)
    kernel = _kernel(param.dtype, None if low is None else low.dtype, lr_tensor is not None)
    kernel(param.numel(), tensors, _log2(beta1), _log2(beta2), *rate, *factors)
    written(param, exp_avg, exp_avg_sq, low)
    return None


def _log2(beta: float) -> float:
    return log2(beta) if beta else -inf


@cache
def _kernel(param: torch.dtype, low: torch.dtype | None, lr_in_memory: bool) -> FlatKernel:
    # Three more buffers are read than by other kernels: half as many elements of each in flight.
    return FlatKernel("adamw_flat", (AdamW(param, low, lr_in_memory),), tile=1024)


def _check(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    low: Tensor | None,
    lr: Tensor | None,
) -> None:
    names = ("grad", "exp_avg", "exp_avg_sq", "low")
    for name, tensor in zip(names, (grad, exp_avg, exp_avg_sq, low), strict=True):
        if tensor is not None and tensor.shape != param.shape:
            raise ValueError(
                f"adamw_flat: {name} has shape {list(tensor.shape)}, param {list(param.shape)}; "
                "they must be equal"
            )
    for name, tensor in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"adamw_flat: {name} is {tensor.dtype}; it must be torch.float32")
    for name, tensor in (("step", step), ("lr", lr)):
        if tensor is not None and tensor.numel() != 1:
            raise ValueError(f"adamw_flat: {name} has {tensor.numel()} elements; give one number")
    refuse_gradients("adamw_flat", param, grad, exp_avg, exp_avg_sq, low)


def _fake(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    low: Tensor | None,
    lr: float,
    lr_tensor: Tensor | None,
    *factors: float,
) -> None:
    _check(param, grad, exp_avg, exp_avg_sq, step, low, lr_tensor)


op = define(
    "adamw_flat(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq,"
    " Tensor step, Tensor(d!)? low, float lr, Tensor? lr_tensor, float beta1, float beta2,"
    " float eps, float weight_decay) -> ()",
    reference,
    triton,
    _fake,
)


def adamw_flat(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    low: Tensor | None = None,
    *,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """One step of AdamW, in place, as `torch.optim.AdamW` counts it.

    Args:
        param: a flat shard; fp32, or a lower dtype, in which it is then rounded at each step.
        grad: of the same shape, in any dtype.
        exp_avg, exp_avg_sq: the moments, fp32.
        step: number of this step, from 1, on the device: torch's `state["step"]` once increased.
        low: where the new parameter also goes, cast; the shard that is gathered next.
        lr: a number, or a one-element tensor on the device. A CUDA graph keeps a number as it was
            at capture, and reads a tensor anew.

    Raises:
        ValueError: shapes differ, the moments are not fp32, or tensors lie on several devices.
        RuntimeError: what it changes requires grad, and grad mode is on.
    """
    rate, tensor = (0.0, lr) if isinstance(lr, Tensor) else (lr, None)
    op(param, grad, exp_avg, exp_avg_sq, step, low, rate, tensor, *betas, eps, weight_decay)
