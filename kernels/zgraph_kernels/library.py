"""The library of ops, `torch.ops.zgraph_kernels`: a definition in plain torch, and a kernel.

The definition is what the op means. It runs wherever there is no kernel: on other devices than
CUDA, and for dtypes that Triton does not load.
"""

from collections.abc import Callable
from typing import Any

import torch

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
    LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    LIBRARY.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"zgraph_kernels::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.zgraph_kernels, name).default
