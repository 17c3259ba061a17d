"""Kernels for casting and flattening, each with the plain-torch reference that defines it."""

from zgraph_kernels.accumulate import accumulate
from zgraph_kernels.adamw import adamw_flat
from zgraph_kernels.chunk_cat import chunk_cat
from zgraph_kernels.pack import pack
from zgraph_kernels.quantize import dequantize, quantize
from zgraph_kernels.unpack import unpack

__all__ = ["accumulate", "adamw_flat", "chunk_cat", "dequantize", "pack", "quantize", "unpack"]
