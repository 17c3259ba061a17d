"""chunk_cat and unpack: FSDP2's layout, against the ops that FSDP2 itself calls."""

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
)
from zgraph_kernels import chunk_cat as chunk_cat_op
from zgraph_kernels import unpack as unpack_op

chunk_cat, unpack = kernel("chunk_cat"), kernel("unpack")
EXAMPLES = settings(max_examples=150 if HAS_GPU else 25, deadline=None)

SHAPES = st.lists(
    st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5
)
RANKS = st.integers(1, 9)


def through_unpack(flat: Tensor, shapes: list[tuple[int, ...]], ranks: int) -> list[Tensor]:
    sizes = [size for shape in shapes for size in shape]
    dims = [len(shape) for shape in shapes]
    ours = unpack.triton(flat, ranks, sizes, dims, flat.dtype)
    for a, b in zip(ours, unpack.reference(flat, ranks, sizes, dims, flat.dtype), strict=True):
        assert_same_bits(a, b)
    return ours


@on_each_device
@EXAMPLES
@given(data=st.data())
def test_chunk_cat_equals_torchs(device: str, data: st.DataObject) -> None:
    shapes, ranks = data.draw(SHAPES), data.draw(RANKS)
    source, dtype = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(ROUNDED[device]))
    tensors = [torch.randn(shape, device=device).to(source) for shape in shapes]
    expected = torch._chunk_cat(tensors, 0, ranks).to(dtype)
    assert_same_bits(chunk_cat.triton(tensors, ranks, dtype), expected)
    assert_same_bits(chunk_cat.reference(tensors, ranks, dtype), expected)


@on_each_device
@EXAMPLES
@given(shapes=SHAPES, ranks=RANKS)
def test_unpack_gives_back_what_chunk_cat_laid_out(
    device: str, shapes: list[tuple[int, ...]], ranks: int
) -> None:
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    flat = torch._chunk_cat(tensors, 0, ranks)
    for ours, theirs in zip(through_unpack(flat, shapes, ranks), tensors, strict=True):
        assert_same_bits(ours, theirs)


@on_each_device
def test_unpack_equals_split_with_sizes_copy_where_rows_divide(device: str) -> None:
    shapes, ranks = [(8, 24), (16,), (4, 3, 40)], 4
    flat = torch.randn(ranks, 8 * 6 + 4 + 120, device=device).half()
    whole = [torch.empty(shape, device=device, dtype=torch.half) for shape in shapes]
    parts = [tensor.view(ranks, -1) for tensor in whole]
    torch.split_with_sizes_copy(flat, [part.shape[1] for part in parts], dim=1, out=parts)
    for ours, theirs in zip(through_unpack(flat, shapes, ranks), whole, strict=True):
        assert_same_bits(ours, theirs)


@on_each_device
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_of_any_strides_are_scaled_on_the_way(device: str, ranks: int) -> None:
    tensors = [
        torch.randn(70, 66, device=device).t(),
        torch.randn(9, 8, 7, device=device).permute(2, 0, 1),
        torch.randn(40, device=device)[::2],
        torch.randn(1, device=device).expand(33),
    ]
    expected = torch._chunk_cat([t.contiguous() * 0.25 for t in tensors], 0, ranks)
    assert_same_bits(chunk_cat.triton(tensors, ranks, torch.float32, 0.25), expected)


@on_each_device
def test_tensors_with_fewer_slices_than_ranks_leave_zeros(device: str) -> None:
    tensors = [torch.randn(2, 5, device=device), torch.randn(0, 4, device=device)]
    rows = chunk_cat.triton(tensors, 4, torch.float32)
    assert_same_bits(rows[:2], tensors[0])
    assert not rows[2:].any()
    back = through_unpack(rows, [(2, 5), (0, 4)], 4)
    assert_same_bits(back[0], tensors[0])
    assert back[1].shape == (0, 4)


@on_each_device
def test_a_gathered_buffer_may_start_anywhere(device: str) -> None:
    flat = torch.randn(1 + 2 * 30, device=device)[1:]
    (whole,) = through_unpack(flat, [(6, 10)], 2)
    assert_same_bits(whole, flat.view(6, 10))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="a buffer of 0 rows"):
        chunk_cat_op([torch.ones(2)], 0, torch.float32)
    with pytest.raises(ValueError, match="no tensors"):
        chunk_cat_op([], 2, torch.float32)
    with pytest.raises(ValueError, match="a tensor without dimensions"):
        chunk_cat_op([torch.ones(())], 2, torch.float32)
    with pytest.raises(ValueError, match="have 8 elements, the buffer has 7"):
        unpack_op(torch.ones(7), [(3, 2)], 2)
