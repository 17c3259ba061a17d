"""pack: many tensors into one flat buffer, cast and padded.

Bytes moved: each source element is read once and each buffer element written once, so
`sum(numel_i * itemsize_i) + numel * itemsize`; bound by memory bandwidth.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(
    tensors: Sequence[Tensor], offsets: Sequence[int], numel: int, dtype: torch.dtype
) -> Tensor:
    """Copy `tensors` into a new 1-D buffer, each flattened at its offset, with zeros between.

    The definition, in plain torch; it runs on every device.

    Args:
        tensors: at least one, of any shapes, strides and dtypes, all on one device.
        offsets: where each starts, in elements; ranges must not overlap.
        numel: elements of the buffer.
        dtype: dtype of the buffer; values are cast as `Tensor.to` casts.

    Raises:
        ValueError: lengths differ, or a tensor would end behind the buffer.
    """
    if len(tensors) != len(offsets):
        raise ValueError(
            f"pack: {len(tensors)} tensors and {len(offsets)} offsets; give one for each"
        )
    buffer = tensors[0].new_zeros(numel, dtype=dtype)
    for tensor, offset in zip(tensors, offsets, strict=True):
        if offset < 0 or offset + tensor.numel() > numel:
            raise ValueError(
                f"pack: elements {offset}..{offset + tensor.numel()} end outside a buffer of "
                f"{numel} elements"
            )
        buffer[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
    return buffer
