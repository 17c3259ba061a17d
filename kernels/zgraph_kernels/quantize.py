"""quantize, dequantize: int8 and int4 blocks with scales, for gathers and gradient exchange.

Symmetric, as ZeRO++'s weights are: the largest magnitude of a block becomes 127, or 7. Bytes moved
an element: its own, and 1 or 1/2, and 4 / block for the scale; bound by memory bandwidth.

Note [Error of a block]
|x - dequantize(quantize(x))| <= scale / 2 · (1 + 2^-15), where scale = max(largest / most, 2^-126)
with most = 127 or 7: half a step is what rounding to the nearest integer may lose, and the rest
covers fp32's own rounding of x / scale, at most `most` times 2^-22, and of the product.
"""

from functools import cache

import torch
from einops import rearrange
from torch import Tensor

from zgraph_kernels.generate import TILE, Flat
from zgraph_kernels.launch import FlatKernel, casts, is_supported
from zgraph_kernels.library import define
from zgraph_kernels.steps import SMALLEST_SCALE, Dequantize, Quantize

MOST_BLOCK = 8192


def reference(flat: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """`quantize` in plain torch."""
    _check(bits, block)
    numel, most = flat.numel(), 2 ** (bits - 1) - 1
    padded = flat.new_zeros(-(-numel // block) * block, dtype=torch.float32)
    padded[:numel].copy_(flat.reshape(-1))
    blocks = rearrange(padded, "(block element) -> block element", element=block)
    largest = blocks.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(1, keepdim=True)
    finite = largest < torch.inf
    # By a tensor: torch divides by a number as it multiplies by the inverse, on some devices.
    scale = (largest / torch.full_like(largest, most)).clamp_min(SMALLEST_SCALE)
    inverse = torch.where(finite, 1 / scale, 0)
    integers = (torch.where(finite, blocks, 0) * inverse).round().to(torch.int8).reshape(-1)
    scales = torch.where(finite, scale, torch.nan).reshape(-1)
    if bits == 8:
        return integers[:numel].clone(), scales
    pairs = rearrange(integers[: numel + numel % 2], "(pair two) -> two pair", two=2)
    return (pairs[0] & 15 | pairs[1] << 4).view(torch.uint8), scales


def triton(flat: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """`quantize` through one generated kernel."""
    _check(bits, block)
    if not is_supported(flat, scaled=True):
        return reference(flat, bits, block)
    result, scales = _fake(flat, bits, block)
    _kernel(flat.dtype, bits, block)(flat.numel(), (flat.contiguous(), result, scales))
    return result, scales


@cache
def _kernel(source: torch.dtype, bits: int, block: int) -> FlatKernel:
    steps = (*casts(source, torch.float32, False), Quantize(bits, block))
    pairs = Flat(pairs=bits == 4)
    return FlatKernel("quantize", steps, destination=pairs, tile=max(TILE, block))


def _fake(flat: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    _check(bits, block)
    numel = flat.numel()
    scales = flat.new_empty(-(-numel // block), dtype=torch.float32)
    if bits == 8:
        return flat.new_empty(numel, dtype=torch.int8), scales
    return flat.new_empty(-(-numel // 2), dtype=torch.uint8), scales


def _check(bits: int, block: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"quantize: there are integers of 4 and of 8 bits, not of {bits}")
    if block < 2 or block > MOST_BLOCK or block & (block - 1):
        raise ValueError(
            f"quantize: a block of {block} elements; give a power of two from 2 to {MOST_BLOCK}"
        )


op = define(
    "quantize(Tensor flat, int bits, int block) -> (Tensor, Tensor)", reference, triton, _fake
)


def quantize(flat: Tensor, bits: int = 8, block: int = 256) -> tuple[Tensor, Tensor]:
    """Integers and scales for `flat`, block by block; see Note [Error of a block].

    Args:
        flat: any floating-point tensor, read in the order of its elements.
        bits: 8 or 4.
        block: elements that share a scale; a power of two from 2 to 8192. The last may be shorter.

    Returns:
        Integers: int8 [numel], or for 4 bits uint8 [ceil(numel / 2)], the first of two elements in
        the low half. Scales: fp32 [ceil(numel / block)]; NaN for a block that holds Inf or NaN, so
        that the whole block comes back as NaN.

    Raises:
        ValueError: bits or block are none of these.
    """
    return op(flat, bits, block)


def dequantize_reference(
    quantized: Tensor, scales: Tensor, numel: int, bits: int, block: int, dtype: torch.dtype
) -> Tensor:
    """`dequantize` in plain torch."""
    _check_inputs(quantized, scales, numel, bits, block)
    integers = quantized
    if bits == 4:
        low, high = quantized.to(torch.int8) << 4 >> 4, quantized.view(torch.int8) >> 4
        integers = rearrange([low, high], "two pair -> (pair two)")[:numel]
    each = scales.repeat_interleave(block)[:numel]
    return (integers.float() * each).to(dtype)


def dequantize_triton(
    quantized: Tensor, scales: Tensor, numel: int, bits: int, block: int, dtype: torch.dtype
) -> Tensor:
    """`dequantize` through one generated kernel."""
    _check_inputs(quantized, scales, numel, bits, block)
    result = _dequantize_fake(quantized, scales, numel, bits, block, dtype)
    if not is_supported(result):
        return dequantize_reference(quantized, scales, numel, bits, block, dtype)
    tensors = (quantized.contiguous(), result, scales.contiguous())
    _dequantize_kernel(dtype, bits, block)(numel, tensors)
    return result


@cache
def _dequantize_kernel(dtype: torch.dtype, bits: int, block: int) -> FlatKernel:
    steps = (Dequantize(block), *casts(torch.float32, dtype, False))
    return FlatKernel("dequantize", steps, source=Flat(pairs=bits == 4), tile=max(TILE, block))


def _check_inputs(quantized: Tensor, scales: Tensor, numel: int, bits: int, block: int) -> None:
    _check(bits, block)
    dtypes = (torch.int8 if bits == 8 else torch.uint8, torch.float32)
    if (quantized.dtype, scales.dtype) != dtypes:
        raise ValueError(
            f"dequantize: {bits} bits come as {dtypes[0]} with scales of {dtypes[1]}, not as "
            f"{quantized.dtype} with {scales.dtype}"
        )
    expected = (numel if bits == 8 else -(-numel // 2), -(-numel // block))
    if (quantized.numel(), scales.numel()) != expected:
        raise ValueError(
            f"dequantize: {numel} elements of {bits} bits in blocks of {block} take {expected[0]} "
            f"integers and {expected[1]} scales, not {quantized.numel()} and {scales.numel()}"
        )


def _dequantize_fake(
    quantized: Tensor, scales: Tensor, numel: int, bits: int, block: int, dtype: torch.dtype
) -> Tensor:
    return quantized.new_empty(numel, dtype=dtype)


dequantize_op = define(
    "dequantize(Tensor quantized, Tensor scales, SymInt numel, int bits, int block,"
    " ScalarType dtype) -> Tensor",
    dequantize_reference,
    dequantize_triton,
    _dequantize_fake,
)


def dequantize(
    quantized: Tensor,
    scales: Tensor,
    numel: int,
    bits: int = 8,
    block: int = 256,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The `numel` numbers, 1-D, that the results of `quantize` stand for.

    Raises:
        ValueError: sizes or dtypes do not fit one another, or bits or block are none that
            `quantize` takes.
    """
    return dequantize_op(quantized, scales, numel, bits, block, dtype)
