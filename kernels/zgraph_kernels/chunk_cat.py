"""chunk_cat: gradients into the rank-major input of FSDP2's reduce-scatter, cast, scaled, padded.

See Note [Rows] in `layout`. Bytes moved: `sum(numel_i * itemsize_i) + ranks * row * itemsize`;
bound by memory bandwidth.
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from zgraph_kernels.launch import is_supported, run_rows
from zgraph_kernels.layout import Rows, sharded
from zgraph_kernels.library import define
from zgraph_kernels.pack import scaled


def reference(
    tensors: Sequence[Tensor], ranks: int, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """`chunk_cat` in plain torch."""
    _rows(tensors, ranks)
    parts = []
    for tensor in tensors:
        rows = -(-tensor.shape[0] // ranks) * ranks
        padded = tensor.new_zeros(rows, *tensor.shape[1:], dtype=dtype)
        padded[: tensor.shape[0]].copy_(scaled(tensor, scale))
        parts.append(rearrange(padded, "(rank row) ... -> rank (row ...)", rank=ranks))
    return torch.cat(parts, dim=1)


def triton(tensors: Sequence[Tensor], ranks: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """`chunk_cat` through generated kernels, as `pack`."""
    buffer = _fake(tensors, ranks, dtype)
    if not is_supported(buffer, *tensors, scaled=scale != 1):
        return reference(tensors, ranks, dtype, scale)
    run_rows("chunk_cat", ranks, lambda: _rows(tensors, ranks), buffer, tensors, scale)
    return buffer


def _rows(tensors: Sequence[Tensor], ranks: int) -> Rows:
    return sharded(tuple(tensor.shape for tensor in tensors), ranks)


def _fake(tensors: Sequence[Tensor], ranks: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return tensors[0].new_empty(ranks, _rows(tensors, ranks).row_numel, dtype=dtype)


op = define(
    "chunk_cat(Tensor[] tensors, int ranks, ScalarType dtype, float scale=1.0) -> Tensor",
    reference,
    triton,
    _fake,
)


def chunk_cat(
    tensors: Sequence[Tensor], ranks: int, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Row r of the result holds the r-th part of every tensor, split along its first dimension.

    As `torch._chunk_cat(tensors, 0, ranks)`: parts have ceil(size / ranks) slices, with zeros where
    a tensor has none left.

    Args:
        tensors: at least one, each with at least one dimension; any strides and dtypes.
        ranks: rows of the result.
        dtype: of the result.
        scale: factor for every element, applied in fp32 (in fp64 to fp64) before the cast.

    Returns:
        [ranks, sum of the parts' elements].

    Raises:
        ValueError: there is no rank or no tensor, or a tensor has no dimension.
    """
    if not tensors:
        raise ValueError("chunk_cat: no tensors; give at least one")
    return op(tensors, ranks, dtype, scale)
