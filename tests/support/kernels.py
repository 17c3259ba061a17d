"""Where kernels run in tests: compiled on a GPU, else in Triton's interpreter on CPU tensors."""

import os
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU here"
        ),
        id="interpreted",
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not HAS_GPU, reason="needs 1 CUDA device(s)"),
        ],
        id="compiled",
    ),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)

# Triton's interpreter truncates to bf16 where a GPU rounds (Triton 3.9), so that what is rounded to
# bf16 is compared on GPUs only.
ROUNDED = {"cpu": (torch.float64, torch.float32, torch.float16)}
ROUNDED["cuda"] = (*ROUNDED["cpu"], torch.bfloat16)
FLOATS = ROUNDED["cuda"]


def kernel(name: str) -> Any:
    """The module of one kernel, with its `reference` and `triton`. The package holds functions of
    the same names."""
    return import_module(f"zgraph_kernels.{name}")


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """Equal in shape, dtype and every bit, except that any NaN equals any other."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    if ours.dtype.is_floating_point:
        assert torch.equal(ours.isnan(), theirs.isnan())
        ours, theirs = (t.masked_fill(t.isnan(), 0) for t in (ours, theirs))
        assert torch.equal(ours.signbit(), theirs.signbit())  # -0 equals 0 otherwise
    assert torch.equal(ours, theirs)


def special_values(dtype: torch.dtype) -> Tensor:
    """NaN, infinities, zeros of both signs, ends of fp16's and bf16's ranges, ties, denormals."""
    values = [
        *(float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0),
        *(65504.0, 65519.0, 65520.0, -65520.0, 1e5, 3.3e38, 3.4e38, -3.4e38),
        *(6e-8, 2.98e-8, 2.99e-8, -1e-8, 6.1e-5, 1e-40, -1e-45, 1.1754944e-38),
        *(1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2049.0, 2051.0),
    ]
    return torch.tensor(values, dtype=torch.float64).to(dtype)
