"""Kernels for casting and flattening, each with the plain-torch reference that defines it."""

from zgraph_kernels.pack import pack

__all__ = ["pack"]
