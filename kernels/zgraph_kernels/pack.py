"""pack: many tensors into one flat buffer, cast and padded.

Bytes moved: each source element is read once and each buffer element written once, so
`sum(numel_i * itemsize_i) + numel * itemsize`; bound by memory bandwidth.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from zgraph_kernels.launch import FlatKernel, casts, is_supported, run_rows
from zgraph_kernels.layout import Rows, packed
from zgraph_kernels.library import define


def reference(
    tensors: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> Tensor:
    """`pack` in plain torch."""
    _rows(tensors, offsets, numel)
    buffer = tensors[0].new_zeros(numel, dtype=dtype)
    for tensor, offset in zip(tensors, offsets, strict=True):
        place = buffer[offset : offset + tensor.numel()].view(tensor.shape)
        place.copy_(scaled(tensor, scale))
    return buffer


def scaled(tensor: Tensor, scale: float) -> Tensor:
    """`tensor * scale` in fp32, or in fp64 if it is; not yet rounded."""
    if scale == 1:
        return tensor
    return (tensor if tensor.dtype == torch.float64 else tensor.float()) * scale


def triton(
    tensors: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> Tensor:
    """`pack` through generated kernels: one for contiguous tensors, up to 64 a launch, and one for
    each of other strides, which it reads as they lie."""
    buffer = tensors[0].new_empty(numel, dtype=dtype)
    if not is_supported(buffer, *tensors, scaled=scale != 1):
        return reference(tensors, offsets, numel, dtype, scale)
    scalars = () if scale == 1 else (scale,)
    first = tensors[0]
    if len(tensors) == 1 and offsets[0] == 0 and first.numel() == numel and first.is_contiguous():
        _cast(first.dtype, dtype, scale != 1)(numel, (first, buffer), *scalars)
    else:
        layout = (tuple(offsets), numel)
        run_rows("pack", layout, lambda: _rows(tensors, offsets, numel), buffer, tensors, scale)
    return buffer


@cache
def _cast(source: torch.dtype, dtype: torch.dtype, scaled: bool) -> FlatKernel:
    steps = casts(source, dtype, scaled)
    if source.itemsize > dtype.itemsize:
        return FlatKernel("cast", steps, tile=8192, warps=8)  # 0.5 % faster where less is written
    return FlatKernel("cast", steps)


def _rows(tensors: Sequence[Tensor], offsets: Sequence[int], numel: int) -> Rows:
    return packed([tensor.numel() for tensor in tensors], offsets, numel)


def _fake(
    tensors: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> Tensor:
    return tensors[0].new_empty(numel, dtype=dtype)


op = define(
    "pack(Tensor[] tensors, int[] offsets, SymInt numel, ScalarType dtype, float scale=1.0)"
    " -> Tensor",
    reference,
    triton,
    _fake,
)


def pack(
    tensors: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> Tensor:
    """Copy `tensors` into a new 1-D buffer, each flattened at its offset, with zeros between.

    Args:
        tensors: at least one, of any shapes, strides and dtypes, all on one device.
        offsets: where each starts, in elements; ranges must not overlap.
        numel: elements of the buffer.
        dtype: dtype of the buffer; values are cast as `Tensor.to` casts.
        scale: factor for every element, applied in fp32 (in fp64 to fp64) before the cast.

    Raises:
        ValueError: there are no tensors, lengths differ, tensors overlap or lie on several devices,
            or one would end outside the buffer.
    """
    if not tensors:
        raise ValueError("pack: no tensors; give at least one")
    return op(tensors, offsets, numel, dtype, scale)
