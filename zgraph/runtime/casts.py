"""Casts at the borders of units, as FSDP2's `cast_forward_inputs` and `output_dtype`."""

from typing import Any

import torch
from torch import Tensor, nn

from zgraph._torch import pytree
from zgraph.plan import Plan


def install(model: nn.Module, plan: Plan) -> None:
    """Hook the model and every module that stands for a unit, where the plan asks for casts."""
    names = dict.fromkeys(["", *(name for unit in plan.units for name in unit.modules)])
    for name in names:
        module = model.get_submodule(name)
        if plan.cast_inputs is not None:
            module.register_forward_pre_hook(_InputCast(plan.cast_inputs), with_kwargs=True)
        if plan.output_dtype is not None:
            module.register_forward_hook(_OutputCast(plan.output_dtype))


def _to(dtype: torch.dtype, values: Any) -> Any:
    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return pytree.tree_map_only(Tensor, cast, values)


class _InputCast:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        return _to(self.dtype, args), _to(self.dtype, kwargs)


class _OutputCast:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _to(self.dtype, output)
