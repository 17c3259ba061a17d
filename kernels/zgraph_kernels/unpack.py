"""unpack: FSDP2's rank-major all-gather output into whole parameters.

The inverse of `chunk_cat`; see Note [Rows] in `layout`. Bytes moved: each element is read once and
written once, padding excepted; bound by memory bandwidth.
"""

from collections.abc import Sequence
from math import prod

import torch
from einops import rearrange
from torch import Tensor

from zgraph_kernels.launch import is_supported, run_rows
from zgraph_kernels.layout import Rows, sharded
from zgraph_kernels.library import define


def reference(
    flat: Tensor, ranks: int, sizes: Sequence[int], dims: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """`unpack` in plain torch."""
    shapes = _shapes(sizes, dims)
    _rows(flat, shapes, ranks)
    rows = flat.reshape(ranks, -1)
    widths = [-(-shape[0] // ranks) * prod(shape[1:]) for shape in shapes]
    whole = []
    for part, shape in zip(rows.split(widths, dim=1), shapes, strict=True):
        elements = rearrange(part, "rank element -> (rank element)")[: prod(shape)]
        whole.append(elements.reshape(shape).to(dtype, copy=True))
    return whole


def triton(
    flat: Tensor, ranks: int, sizes: Sequence[int], dims: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """`unpack` through one generated kernel for up to 64 tensors."""
    shapes = _shapes(sizes, dims)
    whole = [flat.new_empty(shape, dtype=dtype) for shape in shapes]
    if not is_supported(flat, *whole):
        return reference(flat, ranks, sizes, dims, dtype)
    layout = (ranks, flat.numel())
    run_rows(
        "unpack",
        layout,
        lambda: _rows(flat, shapes, ranks),
        flat.contiguous(),
        whole,
        collect=False,
    )
    return whole


def _shapes(sizes: Sequence[int], dims: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ends = [sum(dims[: index + 1]) for index in range(len(dims))]
    pairs = zip(ends, dims, strict=True)
    return tuple(tuple(sizes[end - count : end]) for end, count in pairs)


def _rows(flat: Tensor, shapes: Sequence[Sequence[int]], ranks: int) -> Rows:
    rows = sharded(shapes, ranks)
    if flat.numel() != rows.numel:
        raise ValueError(
            f"unpack: {ranks} rows of these shapes have {rows.numel} elements, the buffer has "
            f"{flat.numel()}"
        )
    return rows


def _fake(
    flat: Tensor, ranks: int, sizes: Sequence[int], dims: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    return [flat.new_empty(shape, dtype=dtype) for shape in _shapes(sizes, dims)]


op = define(
    "unpack(Tensor flat, int ranks, int[] sizes, int[] dims, ScalarType dtype) -> Tensor[]",
    reference,
    triton,
    _fake,
)


def unpack(
    flat: Tensor,
    shapes: Sequence[Sequence[int]],
    ranks: int,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The whole tensors whose parts `chunk_cat` laid out.

    Args:
        flat: `ranks` rows, one after another, as an all-gather leaves them.
        shapes: of the whole tensors, in the order of their parts; each has at least one dimension.
        ranks: rows.
        dtype: of the results; that of `flat` by default.

    Returns:
        New contiguous tensors.

    Raises:
        ValueError: there is no rank, a shape is (), or `flat` has another number of elements.
    """
    sizes = [size for shape in shapes for size in shape]
    return op(flat, ranks, sizes, [len(shape) for shape in shapes], dtype or flat.dtype)
