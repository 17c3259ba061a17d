"""accumulate: a reduce-scatter's output, scaled and added into the flat gradient.

Bytes moved: `value` is read once, `into` read and written once; bound by memory bandwidth.
"""

from functools import cache

import torch
from torch import Tensor

from zgraph_kernels.launch import FlatKernel, casts, is_supported
from zgraph_kernels.library import define, refuse_gradients, written
from zgraph_kernels.pack import scaled
from zgraph_kernels.steps import Accumulate


def reference(into: Tensor, value: Tensor, scale: float = 1.0) -> None:
    """`accumulate` in plain torch."""
    _check(into, value)
    into.copy_(into + scaled(value, scale).to(into.dtype))


def triton(into: Tensor, value: Tensor, scale: float = 1.0) -> None:
    """`accumulate` through one generated kernel."""
    _check(into, value)
    supported = is_supported(into, value, scaled=scale != 1)
    if not (supported and into.is_contiguous() and value.is_contiguous()):
        return reference(into, value, scale)
    scalars = () if scale == 1 else (scale,)
    _kernel(value.dtype, into.dtype, scale != 1)(into.numel(), (value, into), *scalars)
    written(into)
    return None


@cache
def _kernel(value: torch.dtype, into: torch.dtype, scaled: bool) -> FlatKernel:
    # Two buffers are read: half as many elements of each in flight.
    return FlatKernel("accumulate", (*casts(value, into, scaled), Accumulate()), tile=1024)


def _check(into: Tensor, value: Tensor) -> None:
    if into.shape != value.shape:
        raise ValueError(
            f"accumulate: a value of shape {list(value.shape)} cannot be added into one of shape "
            f"{list(into.shape)}; they must be equal"
        )
    refuse_gradients("accumulate", into, value)


def _fake(into: Tensor, value: Tensor, scale: float = 1.0) -> None:
    _check(into, value)


op = define(
    "accumulate(Tensor(a!) into, Tensor value, float scale=1.0) -> ()",
    reference,
    triton,
    _fake,
)


def accumulate(into: Tensor, value: Tensor, scale: float = 1.0) -> None:
    """`into += value * scale`: scaled in fp32 (fp64 in fp64), rounded to `into`'s dtype, added.

    Raises:
        ValueError: shapes differ.
    """
    op(into, value, scale)
