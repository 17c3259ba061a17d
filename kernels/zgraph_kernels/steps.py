"""Steps: what a kernel does to its elements between load and store.

Each step is a frozen value, part of the description that names a kernel, and writes its own lines
of Triton. Names that the lines may use:

    x            the elements, as the step before left them; a step leaves its result in x
    index        their places in the flat buffers, int64
    {mask}       what a load of other operands adds to be safe in a last, partial tile
    {only}       likewise, for a store
    TILE         elements of a tile: written as a number, so that the shapes of blocks are constants
"""

from dataclasses import dataclass

import torch

TRITON_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
}
"""The dtypes that kernels load and store; others take the plain-torch path."""

SMALLEST_SCALE = 2.0**-126
"""The smallest scale of a quantised block, fp32's smallest normal number: its inverse is finite."""


class Step:
    """One link of a kernel's chain."""

    def operands(self) -> tuple[str, ...]:
        """Tensors that the step adds to the kernel's parameters."""
        return ()

    def scalars(self) -> tuple[str, ...]:
        """Numbers that it adds, each with its Triton type where that is not fp32."""
        return ()

    def lines(self, tile: int) -> list[str]:
        """The step's statements."""
        raise NotImplementedError


@dataclass(frozen=True)
class Cast(Step):
    """Round to another dtype, to nearest, ties to even, as `Tensor.to`.

    From fp64 to 16 bits torch goes by way of fp32, which rounds twice; so does this.
    """

    source: torch.dtype
    to: torch.dtype

    def lines(self, tile: int) -> list[str]:
        if self.source == self.to:
            return []
        by_way = (
            [".to(tl.float32)"] if self.source == torch.float64 and self.to.itemsize == 2 else []
        )
        return [f"x = x{''.join(by_way)}.to({TRITON_DTYPES[self.to]})"]


@dataclass(frozen=True)
class Scale(Step):
    """Multiply by a number given at launch, in fp32, or in fp64 if the elements are."""

    source: torch.dtype

    def scalars(self) -> tuple[str, ...]:
        return ("scale: 'fp64'",) if self.source == torch.float64 else ("scale",)

    def lines(self, tile: int) -> list[str]:
        if self.source == torch.float64:
            return ["x = x * scale"]
        return ["x = x.to(tl.float32) * scale"]


@dataclass(frozen=True)
class Accumulate(Step):
    """Add to what the destination holds."""

    def lines(self, tile: int) -> list[str]:
        return ["x = tl.load(destination + index{mask}) + x"]


@dataclass(frozen=True)
class Quantize(Step):
    """Symmetric integers of `bits` bits, with one fp32 scale for every `block` elements.

    scale = max(|x|) / (2^(bits-1) - 1) over the block, at least `SMALLEST_SCALE`; the integer is
    x / scale, rounded to nearest, ties to even. A block with an Inf or NaN has the scale NaN.
    """

    bits: int
    block: int

    def operands(self) -> tuple[str, ...]:
        return ("scales",)

    def lines(self, tile: int) -> list[str]:
        blocks, most = tile // self.block, 2 ** (self.bits - 1) - 1
        return [
            f"blocks = tl.reshape(x.to(tl.float32), ({blocks}, {self.block}))",
            "size = tl.abs(blocks)",
            # NaN compares as false, so that it counts as infinite.
            "size = tl.where(size < float('inf'), size, float('inf'))",
            "largest = tl.max(size, axis=1)",
            f"block_scale = tl.maximum(tl.div_rn(largest, {float(most)}), {SMALLEST_SCALE!r})",
            "finite = largest < float('inf')",
            "inverse = tl.where(finite, tl.div_rn(1.0, block_scale), 0.0)",
            "block_scale = tl.where(finite, block_scale, float('nan'))",
            f"block = start // {self.block} + tl.arange(0, {blocks})",
            f"tl.store(scales + block, block_scale, mask=block * {self.block} < numel)",
            "blocks = tl.where(finite[:, None], blocks, 0.0) * inverse[:, None]",
            # Adding 1.5 × 2^23 leaves no bit for a fraction: the sum is rounded to an integer.
            "blocks = (blocks + 12582912.0) - 12582912.0",
            f"x = tl.reshape(blocks, ({tile},)).to(tl.int8)",
        ]


@dataclass(frozen=True)
class Dequantize(Step):
    """The numbers that `Quantize` stands for: integer times scale, in fp32."""

    block: int

    def operands(self) -> tuple[str, ...]:
        return ("scales",)

    def lines(self, tile: int) -> list[str]:
        blocks = tile // self.block
        return [
            f"block = start // {self.block} + tl.arange(0, {blocks})",
            f"block_scale = tl.load(scales + block, mask=block * {self.block} < numel, other=0.0)",
            f"blocks = tl.reshape(x.to(tl.float32), ({blocks}, {self.block}))",
            f"x = tl.reshape(blocks * block_scale[:, None], ({tile},))",
        ]


@dataclass(frozen=True)
class AdamW(Step):
    """The AdamW step: x comes as the gradient and leaves as the parameter.

    Decoupled weight decay as in Loshchilov and Hutter, arXiv:1711.05101, algorithm 2, with
    torch.optim.AdamW's order of operations. The step's number is read from memory, so that a
    captured CUDA graph goes on counting.
    """

    parameter: torch.dtype
    low: torch.dtype | None
    lr_in_memory: bool

    def operands(self) -> tuple[str, ...]:
        low = () if self.low is None else ("low",)
        lr = ("lr_at",) if self.lr_in_memory else ()
        return ("exp_avg", "exp_avg_sq", "steps", *lr, *low)

    def scalars(self) -> tuple[str, ...]:
        lr = () if self.lr_in_memory else ("lr",)
        factors = ("keep1", "take1", "keep2", "take2", "eps", "weight_decay")
        return ("log2_beta1: 'fp64'", "log2_beta2: 'fp64'", *lr, *factors)

    def lines(self, tile: int) -> list[str]:
        lines = ["lr = tl.load(lr_at).to(tl.float32)"] if self.lr_in_memory else []
        lines += [
            "count = tl.load(steps).to(tl.float64)",
            "correction1 = (1.0 - tl.exp2(count * log2_beta1)).to(tl.float32)",
            "correction2 = (1.0 - tl.exp2(count * log2_beta2)).to(tl.float32)",
            "grad = x.to(tl.float32)",
            "mean = keep1 * tl.load(exp_avg + index{mask}) + take1 * grad",
            "square = keep2 * tl.load(exp_avg_sq + index{mask}) + take2 * grad * grad",
            "tl.store(exp_avg + index, mean{only})",
            "tl.store(exp_avg_sq + index, square{only})",
            "old = tl.load(destination + index{mask}).to(tl.float32)",
            "root = tl.sqrt_rn(square) / tl.sqrt_rn(correction2) + eps",
            "x = old * (1.0 - lr * weight_decay) - (lr / correction1) * mean / root",
        ]
        lines += Cast(torch.float32, self.parameter).lines(tile)
        if self.low is not None:
            lines += [f"tl.store(low + index, x.to({TRITON_DTYPES[self.low]}){{only}})"]
        return lines
