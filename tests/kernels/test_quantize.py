"""quantize and dequantize: the bound of Note [Error of a block], and a definition in integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels import FLOATS, HAS_GPU, assert_same_bits, kernel, on_each_device
from zgraph_kernels import dequantize as dequantize_op
from zgraph_kernels import quantize as quantize_op

quantize = kernel("quantize")
EXAMPLES = settings(max_examples=150 if HAS_GPU else 30, deadline=None)


def there_and_back(values: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """What comes back, in fp32, and each element's scale; kernel and definition have equal bits."""
    integers, scales = quantize.triton(values, bits, block)
    for ours, theirs in zip(
        (integers, scales), quantize.reference(values, bits, block), strict=True
    ):
        assert_same_bits(ours, theirs)
    sizes = (values.numel(), bits, block, torch.float32)
    back = quantize.dequantize_triton(integers, scales, *sizes)
    assert_same_bits(back, quantize.dequantize_reference(integers, scales, *sizes))
    return back, scales.repeat_interleave(block)[: values.numel()]


@on_each_device
@EXAMPLES
@given(
    numel=st.integers(0, 5000),
    bits=st.sampled_from([4, 8]),
    block=st.sampled_from([2, 16, 64, 256, 2048, 4096]),
    magnitude=st.integers(-44, 37),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(FLOATS),
)
def test_the_error_stays_within_its_bound(
    device: str, numel: int, bits: int, block: int, magnitude: int, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(numel, generator=generator) * 10.0**magnitude).to(device, dtype)
    if values.numel() and not values.isfinite().all():
        values = values.nan_to_num(posinf=1.0, neginf=-1.0)
    back, scales = there_and_back(values, bits, block)
    wide = values.double()
    assert ((wide - back.double()).abs() <= scales.double() / 2 * (1 + 2**-15)).all()
    # A block's scale is its largest magnitude over 127 or 7, so that none is wasted.
    most = 2 ** (bits - 1) - 1
    for start in range(0, numel, block):
        largest = wide[start : start + block].abs().max().item()
        assert scales[start].item() == pytest.approx(max(largest / most, 2**-126), rel=1e-6)


@on_each_device
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_come_back_exactly(device: str, bits: int) -> None:
    most = 2 ** (bits - 1) - 1
    values = (torch.arange(513, device=device) % (2 * most + 1) - most).float()
    back, _ = there_and_back(values, bits, 256)
    assert_same_bits(back, values)


@on_each_device
def test_four_bits_lie_two_to_a_byte_the_first_in_the_low_half(device: str) -> None:
    values = torch.tensor([7.0, -7.0, 1.0], device=device)
    integers, scales = quantize.triton(values, 4, 16)
    assert integers.tolist() == [7 | (-7 & 15) << 4, 1]
    assert scales.tolist() == [1.0]


@on_each_device
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_comes_back_as_nan(device: str, bits: int, bad: float) -> None:
    values = torch.ones(100, device=device)
    values[40] = bad
    back, _ = there_and_back(values, bits, 32)
    assert back[32:64].isnan().all()
    assert back[:32].eq(1).all() and back[64:].eq(1).all()


@on_each_device
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros(device: str, bits: int) -> None:
    back, _ = there_and_back(torch.zeros(77, device=device), bits, 32)
    assert not back.any()


@on_each_device
def test_dequantize_rounds_to_the_dtype_that_is_asked_for(device: str) -> None:
    values = torch.randn(3000, device=device)
    integers, scales = quantize.triton(values, 8, 64)
    exact = quantize.dequantize_reference(integers, scales, 3000, 8, 64, torch.float32)
    ours = quantize.dequantize_triton(integers, scales, 3000, 8, 64, torch.float16)
    assert_same_bits(ours, exact.half())


def test_mistakes_are_named() -> None:
    values = torch.ones(10)
    with pytest.raises(ValueError, match="not of 3"):
        quantize_op(values, bits=3)
    with pytest.raises(ValueError, match="block of 48 elements; give a power of two"):
        quantize_op(values, block=48)
    with pytest.raises(ValueError, match=r"with scales of torch\.float32, not as torch\.int8 with"):
        integers, scales = quantize_op(values, 8, 16)
        dequantize_op(integers, scales.half(), 10, bits=8, block=16)
    with pytest.raises(ValueError, match="take 5 integers and 1 scales, not 10 and 1"):
        dequantize_op(integers.view(torch.uint8), scales, 10, bits=4, block=16)
