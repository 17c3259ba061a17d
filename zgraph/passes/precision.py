"""MixedPrecision: dtypes at rest, in compute and in reduction."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from zgraph.errors import PassError, nearest
from zgraph.passes.base import Pass
from zgraph.plan import ParameterPlan, Plan

_FLOATS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Choose dtypes, with the semantics of FSDP2's `MixedPrecisionPolicy`.

    Shards are cast to `param_dtype` before they are gathered; gradients are packed in
    `reduce_dtype`, averaged in it, and cast to the master dtype. Units and the model itself cast
    their floating-point inputs to `param_dtype` (`cast_inputs`) and outputs to `output_dtype`.
    Buffers are never cast. Parameters that are not floating point keep their dtype throughout, and
    frozen ones keep it at rest.

    Args:
        param_dtype: dtype of compute and gathers; None keeps each parameter's own.
        reduce_dtype: dtype of reduction; None is the compute dtype.
        output_dtype: dtype of units' outputs; None leaves them.
        master_dtype: dtype at rest of trained parameters and so of optimizer states; None keeps
            each parameter's own, and float64 parameters keep theirs.
        cast_inputs: whether units cast their inputs.

    dtypes are torch dtypes or their names ("bfloat16", "bf16").

    Raises:
        PassError: a dtype that is unknown or not floating point.
    """

    name: ClassVar[str] = "mixed_precision"
    requires: ClassVar[frozenset[str]] = frozenset({"gathers"})
    provides: ClassVar[frozenset[str]] = frozenset({"precision"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"precision"})

    param_dtype: torch.dtype | str | None = None
    reduce_dtype: torch.dtype | str | None = None
    output_dtype: torch.dtype | str | None = None
    master_dtype: torch.dtype | str | None = torch.float32
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for label in ("param_dtype", "reduce_dtype", "output_dtype", "master_dtype"):
            object.__setattr__(self, label, _floating(label, getattr(self, label)))

    def plan(self, plan: Plan) -> Plan:
        return plan.changed(
            parameters=tuple(map(self._parameter, plan.parameters)),
            cast_inputs=self.param_dtype if self.cast_inputs else None,
            output_dtype=self.output_dtype,
        )

    def _master(self, p: ParameterPlan) -> torch.dtype:
        if not p.requires_grad or p.dtype == torch.float64:
            return p.dtype  # a model in double stays so
        return _floating("master_dtype", self.master_dtype) or p.dtype

    def _parameter(self, p: ParameterPlan) -> ParameterPlan:
        if not (p.partitioned and p.dtype.is_floating_point):
            return p
        param_dtype = self.param_dtype or p.dtype
        return replace(
            p,
            master_dtype=self._master(p),
            param_dtype=param_dtype,
            reduce_dtype=(self.reduce_dtype or param_dtype),
        )


def _floating(label: str, value: object) -> torch.dtype | None:
    if value is None:
        return None
    if isinstance(value, str):
        name = _SHORT.get(value, value.removeprefix("torch."))
        if name not in _FLOATS and not isinstance(getattr(torch, name, None), torch.dtype):
            raise PassError(
                f"MixedPrecision({label}={value!r}): unknown dtype; {nearest(name, _FLOATS)}"
            )
        value = getattr(torch, name)
    if not isinstance(value, torch.dtype) or value not in _FLOATS.values():
        raise PassError(
            f"MixedPrecision({label}={value}): expected a floating-point dtype, one of "
            f"{', '.join(_FLOATS)}"
        )
    return value
