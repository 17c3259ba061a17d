"""pack: against torch.cat of casts and zeros."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels import (
    FLOATS,
    HAS_GPU,
    ROUNDED,
    assert_same_bits,
    kernel,
    on_each_device,
    special_values,
)
from zgraph_kernels import pack as pack_op

pack = kernel("pack")
EXAMPLES = settings(max_examples=150 if HAS_GPU else 25, deadline=None)


def concatenated(
    tensors: list[Tensor], gaps: list[int], dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """What pack means: zeros of the first gap, the first tensor, and so on."""
    parts = []
    for gap, tensor in zip(gaps, [*tensors, None], strict=True):
        parts.append(torch.zeros(gap, dtype=dtype, device=tensors[0].device))
        if tensor is not None:
            wide = (
                tensor
                if scale == 1
                else tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * scale
            )
            parts.append(wide.reshape(-1).to(dtype))
    return torch.cat(parts)


def offsets_of(tensors: list[Tensor], gaps: list[int]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for gap, tensor in zip(gaps, tensors, strict=False):
        offsets.append(end + gap)
        end += gap + tensor.numel()
    return offsets, end + gaps[-1]


def check(tensors: list[Tensor], gaps: list[int], dtype: torch.dtype, scale: float = 1.0) -> None:
    offsets, numel = offsets_of(tensors, gaps)
    expected = concatenated(tensors, gaps, dtype, scale)
    assert_same_bits(pack.triton(tensors, offsets, numel, dtype, scale), expected)
    assert_same_bits(pack.reference(tensors, offsets, numel, dtype, scale), expected)


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """A shape, a permutation of it, and what else makes it strided."""
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(0, 70 if rank <= 2 else 9)) for _ in range(rank))
    return (
        shape,
        tuple(draw(st.permutations(range(rank)))),
        draw(st.sampled_from(["none", "every other", "expanded", "shifted"])),
    )


def build(
    spec: tuple[tuple[int, ...], tuple[int, ...], str], device: str, dtype: torch.dtype
) -> Tensor:
    shape, order, kind = spec
    if kind == "shifted":
        flat = torch.randn(math.prod(shape) + 1, device=device).to(dtype)
        return flat[1:].view(shape).permute(order)
    tensor = torch.randn(shape, device=device).to(dtype).permute(order)
    if kind == "every other" and tensor.ndim:
        return tensor[..., ::2]
    return tensor.unsqueeze(-1).expand(*tensor.shape, 3) if kind == "expanded" else tensor


@on_each_device
@EXAMPLES
@given(data=st.data())
def test_tensors_of_any_strides_and_gaps_are_packed(device: str, data: st.DataObject) -> None:
    specs = data.draw(st.lists(strided(), min_size=1, max_size=6))
    gaps = [data.draw(st.integers(0, 40)) for _ in range(len(specs) + 1)]
    source = data.draw(st.sampled_from(FLOATS))
    dtype = data.draw(st.sampled_from(ROUNDED[device]))
    scale = data.draw(st.sampled_from([1.0, 0.5, 0.3]))
    check([build(spec, device, source) for spec in specs], gaps, dtype, scale)


@on_each_device
def test_special_values_pass_through_casts_as_in_torch(device: str) -> None:
    for source in ROUNDED[device]:
        values = special_values(source).to(device)
        for dtype in ROUNDED[device]:
            check([values, values.flip(0)], [0, 3, 1], dtype)  # in two tensors, through a table
            check([values], [0, 0], dtype)  # in one, without


@on_each_device
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_bytes_go_through_unchanged(device: str, dtype: torch.dtype) -> None:
    values = torch.arange(256, device=device).to(dtype)
    check([values, values[3:], values.view(16, 16).t()], [0, 0, 5, 0], dtype)


@on_each_device
@pytest.mark.parametrize("count", [1, 2, 5, 17, 64, 65, 200, 2000])
def test_one_call_takes_up_to_thousands_of_tensors(device: str, count: int) -> None:
    tensors = [torch.randn(index % 7, device=device) for index in range(count)]
    check(tensors, [index % 3 for index in range(count + 1)], torch.float16)


@on_each_device
def test_large_and_small_tensors_fill_full_and_partial_tiles(device: str) -> None:
    sizes = [2048, 1, 4096, 2049, 0, 5000, 16, 2047]
    tensors = [torch.randn(size, device=device) for size in sizes]
    check(tensors, [0] * 9, torch.float16)
    check(tensors, [16] * 9, torch.float32)
    check(tensors, [1] * 9, torch.float16)


@on_each_device
def test_nothing_but_empty_tensors_gives_zeros(device: str) -> None:
    empty = torch.randn(0, device=device)
    check([empty], [0, 0], torch.float16)
    check([empty, empty.view(3, 0)], [0, 4, 5], torch.float16)
    check([torch.randn(5, 6, device=device).t()], [7, 4000], torch.float32)


@on_each_device
def test_gradients_of_several_dtypes_share_a_buffer(device: str) -> None:
    tensors = [torch.randn(30, device=device).to(dtype) for dtype in (*FLOATS, torch.float32)]
    check(tensors, [0, 2, 0, 0, 3, 1], torch.float32)


@on_each_device
def test_dtypes_that_have_no_kernel_take_the_definition(device: str) -> None:
    flags = torch.tensor([True, False, True], device=device)
    assert pack.triton([flags], [1], 5, torch.bool).tolist() == [False, True, False, True, False]


@on_each_device
def test_bytes_become_numbers_and_numbers_bytes_as_in_torch(device: str) -> None:
    counts = torch.arange(-100, 100, device=device).to(torch.int8)
    check([counts, counts], [0, 1, 0], torch.float32)
    check([counts.float() * 0.7, counts.half()], [0, 1, 0], torch.int8)


@on_each_device
@pytest.mark.parametrize("scale", [-1.0, float("inf"), float("nan")])
def test_padding_is_zero_whatever_the_scale(device: str, scale: float) -> None:
    check(
        [torch.randn(5, device=device), torch.randn(6, device=device)], [3, 9, 4], torch.half, scale
    )


@on_each_device
def test_which_tensor_is_unaligned_may_change_from_call_to_call(device: str) -> None:
    def shifted(by: int, *shape: int) -> Tensor:
        return torch.randn(math.prod(shape) + by, device=device)[by:].view(shape)

    for first, second in ((0, 1), (1, 0), (0, 0), (3, 4)):
        check([shifted(first, 64, 80).t(), shifted(second, 4096)], [0, 0, 0], torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs 1 CUDA device(s)")
def test_tensors_on_two_devices_are_refused() -> None:
    tensors = [torch.zeros(3, device="cuda"), torch.zeros(3)]
    with pytest.raises(ValueError, match="tensors lie on cpu, cuda:0; move them"):
        pack_op(tensors, [0, 3], 6, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs 1 CUDA device(s)")
def test_tensors_of_millions_of_elements() -> None:
    tensors = [torch.randn(size, device="cuda") for size in (2**23 + 5, 2**23 + 4096, 9)]
    check(tensors, [0, 3, 0, 7], torch.bfloat16)
    check(tensors[:1], [0, 0], torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs 1 CUDA device(s)")
def test_buffers_of_more_than_2_to_the_31_elements() -> None:
    numel = 2**31 + 5000
    source = torch.arange(numel, device="cuda", dtype=torch.int32).to(torch.int8)
    one = pack.triton([source], [0], numel, torch.int8)
    assert torch.equal(one, source)
    del one
    two = pack.triton([source, source[:100]], [3, numel + 16], numel + 200, torch.int8)
    assert torch.equal(two[3 : numel + 3], source)
    assert torch.equal(two[numel + 16 : numel + 116], source[:100])
    assert not two[numel + 3 : numel + 16].any() and not two[numel + 116 :].any()
    del two
    across = source[: 2**31].view(2**15, 2**16).t()
    assert torch.equal(pack.triton([across], [0], 2**31, torch.int8), across.reshape(-1))


@pytest.mark.parametrize(
    ("numels", "offsets", "numel", "says"),
    [
        ([3, 4], [0], 3, "2 tensors and 1 offsets"),
        ([3, 4], [0], 9, "2 tensors and 1 offsets"),
        ([3, 4], [0, 2], 9, "overlap"),
        ([3, 4], [-1, 2], 9, "negative"),
        ([3, 4], [0, 6], 9, "end at element 10 of a buffer of 9"),
    ],
)
def test_mistakes_are_named(numels: list[int], offsets: list[int], numel: int, says: str) -> None:
    tensors = [torch.zeros(count) for count in numels]
    for run in (pack.triton, pack.reference, pack_op):
        with pytest.raises(ValueError, match=says):
            run(tensors, offsets, numel, torch.float32)
