"""The library of ops, `torch.ops.zgraph_kernels`: a definition in plain torch, and a kernel.

The definition is what the op means. It runs wherever there is no kernel: on other devices than
CUDA, and for dtypes that Triton does not load.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("zgraph_kernels", "DEF")


def define(
    schema: str,
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
) -> Any:
    """Make an op, and return its overload.

    Args:
        schema: its name, arguments and results.
        reference: the definition.
        kernel: the same through Triton, for CUDA tensors.
        fake: shapes and dtypes of the results, for tracing.
    """
    # A kernel here reads any strides: a compiler need not copy inputs to those it traced.
    LIBRARY.define(schema, tags=(torch.Tag.flexible_layout,))
    name = schema.partition("(")[0]
    LIBRARY.impl(name, _without_derivative(name, reference), "CompositeExplicitAutograd")
    LIBRARY.impl(name, _without_derivative(name, kernel), "CUDA")
    torch.library.register_fake(f"zgraph_kernels::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.zgraph_kernels, name).default


def _without_derivative(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, refusing a first argument that takes part in autograd."""

    def checked(first: Any, *others: Any) -> Any:
        if torch.is_grad_enabled():
            refuse_gradients(name, *([first] if isinstance(first, Tensor) else first))
        return function(first, *others)

    return checked


def refuse_gradients(name: str, *tensors: Tensor | None) -> None:
    """Raise if one of these takes part in autograd: a kernel has no derivative.

    Autograd's own way would take a formula for each op, a few µs of the host at each call.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"zgraph_kernels.{name} has no derivative, and a tensor requires grad; call it under "
            "torch.no_grad()"
        )


def written(*tensors: Tensor | None) -> None:
    """Tell autograd that a kernel has changed these, so that it refuses values saved before."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
