"""accumulate: against torch's add_."""

import pytest
import torch

from tests.support.kernels import FLOATS, ROUNDED, assert_same_bits, kernel, on_each_device
from zgraph_kernels import accumulate as accumulate_op

accumulate = kernel("accumulate")


@on_each_device
@pytest.mark.parametrize("numel", [0, 1, 2047, 2048, 5001])
@pytest.mark.parametrize("value", FLOATS, ids=str)
def test_equals_add_after_the_cast(device: str, numel: int, value: torch.dtype) -> None:
    for into in ROUNDED[device]:
        before = torch.randn(numel, device=device).to(into)
        added = torch.randn(numel, device=device).to(value)
        expected = before + added.to(into)
        for run in (accumulate.triton, accumulate.reference):
            ours = before.clone()
            run(ours, added)
            assert_same_bits(ours, expected)


@on_each_device
def test_scales_in_fp32_before_it_rounds(device: str) -> None:
    before = torch.randn(3000, device=device)
    added = torch.randn(3000, device=device).half()
    ours = before.clone()
    accumulate.triton(ours, added, 1 / 3)
    assert_same_bits(ours, before + added.float() * (1 / 3))


@on_each_device
def test_unaligned_and_strided_gradients(device: str) -> None:
    value = torch.randn(4001, device=device)
    for into in (torch.zeros(4001, device=device)[1:], torch.zeros(8000, device=device)[::2]):
        accumulate.triton(into, value[1:])
        assert_same_bits(into.contiguous(), value[1:].contiguous())


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ValueError, match=r"shape \[3\] cannot be added into one of shape \[2, 3\]"):
        accumulate_op(torch.zeros(2, 3), torch.zeros(3))
