"""MixedPrecision chooses dtypes at rest, in compute and in reduction."""

import pytest
import torch
from torch import nn

import zgraph as zg
from tests.passes.toys import planned
from zgraph.plan import ParameterPlan

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]
FP32, BF16, FP16, INT = torch.float32, torch.bfloat16, torch.float16, torch.int64


class Mixed(nn.Module):
    """One parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(3))
        self.trained_bf16 = nn.Parameter(torch.ones(3, dtype=BF16))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.frozen_bf16 = nn.Parameter(torch.ones(3, dtype=BF16), requires_grad=False)
        self.integer = nn.Parameter(torch.ones(3, dtype=INT), requires_grad=False)
        self.register_buffer("scale", torch.ones(3))


def dtypes(*passes: zg.Pass) -> dict[str, Dtypes]:
    """(at rest, in compute, in reduction) by parameter name."""

    def three(p: ParameterPlan) -> Dtypes:
        return p.master_dtype, p.param_dtype, p.reduce_dtype

    return {p.name: three(p) for p in planned(Mixed(), *passes).parameters}


def test_without_the_pass_every_dtype_is_the_parameters_own() -> None:
    expected = {name: (p.dtype,) * 3 for name, p in Mixed().named_parameters()}
    assert dtypes() == expected


def test_trained_parameters_rest_in_fp32_and_compute_and_reduce_as_asked() -> None:
    found = dtypes(zg.MixedPrecision(param_dtype=BF16, reduce_dtype=FP32))
    assert found["trained"] == found["trained_bf16"] == (FP32, BF16, FP32)


def test_gradients_are_reduced_in_the_compute_dtype_unless_told_otherwise() -> None:
    assert dtypes(zg.MixedPrecision(param_dtype=FP16))["trained"] == (FP32, FP16, FP16)


def test_frozen_parameters_keep_their_dtype_at_rest() -> None:
    found = dtypes(zg.MixedPrecision(param_dtype=BF16))
    assert found["frozen"] == (FP32, BF16, BF16)
    assert found["frozen_bf16"] == (BF16, BF16, BF16)


def test_integer_parameters_keep_their_dtype_throughout() -> None:
    found = dtypes(zg.MixedPrecision(param_dtype=BF16, reduce_dtype=FP32, master_dtype="fp64"))
    assert found["integer"] == (INT, INT, INT)


def test_no_param_dtype_computes_in_each_parameters_own() -> None:
    found = dtypes(zg.MixedPrecision())
    assert found["trained"] == (FP32, FP32, FP32)
    assert found["trained_bf16"] == (FP32, BF16, BF16)


def test_no_master_dtype_leaves_parameters_at_rest_as_they_are() -> None:
    found = dtypes(zg.MixedPrecision(param_dtype=BF16, master_dtype=None))
    assert found["trained_bf16"] == (BF16, BF16, BF16)
    assert found["trained"] == (FP32, BF16, BF16)


def test_ignored_parameters_keep_every_dtype() -> None:
    found = dtypes(zg.Partition(ignore=["trained"]), zg.MixedPrecision(param_dtype=BF16))
    assert found["trained"] == (FP32, FP32, FP32)


NAMES = {
    BF16: ("bf16", "bfloat16", "torch.bfloat16"),
    FP16: ("fp16", "float16", "half"),
    FP32: ("fp32", "float32", "float"),
    torch.float64: ("fp64", "float64", "double"),
}


@pytest.mark.parametrize(("text", "dtype"), [(t, d) for d, texts in NAMES.items() for t in texts])
def test_dtypes_may_be_given_by_name(text: str, dtype: torch.dtype) -> None:
    by_name = zg.MixedPrecision(text, text, text, text)
    assert by_name == zg.MixedPrecision(dtype, dtype, dtype, dtype)


def test_borders_cast_inputs_to_the_compute_dtype_unless_told_not_to() -> None:
    plan = planned(Mixed(), zg.MixedPrecision(param_dtype=BF16, output_dtype=FP32))
    assert (plan.cast_inputs, plan.output_dtype) == (BF16, FP32)
    plan = planned(Mixed(), zg.MixedPrecision(param_dtype=BF16, cast_inputs=False))
    assert (plan.cast_inputs, plan.output_dtype) == (None, None)


LABELS = ["param_dtype", "reduce_dtype", "output_dtype", "master_dtype"]


@pytest.mark.parametrize("label", LABELS)
def test_an_unknown_dtype_is_refused_with_the_nearest_names(label: str) -> None:
    with pytest.raises(
        zg.PassError, match=rf"{label}='bfloat17'.*unknown dtype; nearest: bfloat16"
    ):
        zg.MixedPrecision(**{label: "bfloat17"})


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("dtype", [torch.int32, "int64", torch.bool, torch.complex64, 16])
def test_a_dtype_that_is_not_floating_point_is_refused(label: str, dtype: object) -> None:
    with pytest.raises(zg.PassError, match=rf"{label}=.*expected a floating-point dtype"):
        zg.MixedPrecision(**{label: dtype})  # type: ignore[arg-type]
