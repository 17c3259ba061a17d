"""Launching: which kernels a call needs, found once for its shapes, then run with its addresses.

Note [Steady state]
The first call with given shapes, strides, dtypes and alignments compiles what is missing and copies
the table of its tiles to the device. From the second call on a launch reads addresses, and nothing
waits for the device nor copies to it: so a call may be captured in a CUDA graph, and run on any
stream. What belongs to shapes is kept as long as the process, because a captured graph may read it
at any time; models have few shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zgraph_kernels.generate import MOST_ADDRESSES, Flat, Kernel, Strided, Tensors
from zgraph_kernels.layout import Dim, Rows, collapsed
from zgraph_kernels.steps import TRITON_DTYPES, Cast, Scale, Step


class Launcher:
    """A compiled kernel on one device.

    Triton looks at every argument of an ordinary launch to choose a specialisation. Here it is
    known after the first, which is half of the time that a launch takes.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._function = kernel.function()
        self._compiled: Any = None

    def __call__(self, programs: int, tensors: Sequence[Tensor], *numbers: float) -> None:
        """Run `programs` programs on the current stream."""
        if not programs:
            return
        if self._compiled is None:
            launch = self._function[(programs,)]
            self._compiled = launch(*tensors, *numbers, num_warps=self.kernel.warps)
        else:
            addresses = [tensor.data_ptr() for tensor in tensors]
            self._compiled[(programs, 1, 1)](*addresses, *numbers)


@cache
def launcher(kernel: Kernel, device: torch.device) -> Launcher:
    """The launcher of a kernel whose compiled form depends on its description alone."""
    return Launcher(kernel)


def is_supported(*tensors: Tensor) -> bool:
    """Whether kernels exist for these tensors' dtypes."""
    return all(tensor.dtype in TRITON_DTYPES for tensor in tensors)


def is_aligned(tensor: Tensor) -> bool:
    """Whether a tensor starts at a multiple of 16 bytes."""
    return tensor.data_ptr() % 16 == 0


def casts(source: torch.dtype, to: torch.dtype, scaled: bool) -> tuple[Step, ...]:
    """Scale in fp32, or in fp64 if the source is; then round once."""
    if not scaled:
        return (Cast(source, to),)
    wide = torch.float64 if source == torch.float64 else torch.float32
    return (Scale(source), Cast(wide, to))


def run_flat(
    name: str,
    source: Tensor,
    destination: Tensor,
    numel: int,
    steps: tuple[Step, ...],
    operands: Sequence[Tensor] = (),
    scalars: Sequence[float] = (),
    pairs: tuple[bool, bool] = (False, False),
    tile: int = 8192,
    warps: int = 8,
) -> None:
    """One kernel from one contiguous buffer to another, both on one device.

    Args:
        numel: elements to move.
        operands, scalars: those of the steps, in order.
        pairs: whether a byte of source, and of destination, holds two elements.
    """
    tensors = (source, destination, *operands)
    aligned = all(map(is_aligned, tensors))
    kernel = Kernel(name, Flat(pairs[0]), Flat(pairs[1]), steps, aligned, tile, warps)
    with on_device_of(source):
        launcher(kernel, source.device)(-(-numel // tile), tensors, numel, *scalars)


def on_device_of(tensor: Tensor) -> Any:
    """A context in which the device of `tensor` is the current one; Triton launches there."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


@dataclass(frozen=True)
class _Call:
    """One launch of a plan: on some of the tensors of a call."""

    launcher: Launcher
    programs: int
    tensors: tuple[int, ...]
    tiles: Tensor | None
    numbers: tuple[int, ...]

    def __call__(self, flat: Tensor, tensors: Sequence[Tensor], scalars: Sequence[float]) -> None:
        mine = [tensors[index] for index in self.tensors]
        if self.tiles is None:
            self.launcher(self.programs, (*mine, flat), *self.numbers, *scalars)
        else:
            self.launcher(self.programs, (flat, self.tiles, *mine), *self.numbers, *scalars)


_plans: dict[Any, list[_Call]] = {}
"""What each (layout, shapes, …) launches. See Note [Steady state]."""


def run_rows(
    name: str,
    rows: Rows,
    flat: Tensor,
    tensors: Sequence[Tensor],
    scale: float = 1.0,
    collect: bool = True,
) -> None:
    """Move tensors into the rows of a flat buffer, or out of them. See Note [Rows] in `layout`.

    Args:
        flat: contiguous, `rows.numel` elements.
        tensors: one for each of `rows`; contiguous unless `collect`.
        scale: factor for each element, applied before it is rounded.
        collect: from the tensors to `flat`, with zeros in its padding; else the other way.
    """
    if not rows.numel:
        return
    scalars = () if scale == 1 else (scale,)
    key = (name, rows, flat.dtype, flat.device, is_aligned(flat), bool(scalars))
    key += tuple((t.shape, t.stride(), t.dtype, is_aligned(t)) for t in tensors)
    plan = _plans.get(key)
    with on_device_of(flat):
        if plan is None:
            plan = _plans[key] = _plan(name, rows, flat, tensors, bool(scalars), collect)
        for call in plan:
            call(flat, tensors, scalars)


def _plan(
    name: str, rows: Rows, flat: Tensor, tensors: Sequence[Tensor], scaled: bool, collect: bool
) -> list[_Call]:
    if flat.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"zgraph_kernels: {name} meets these shapes for the first time while a CUDA graph is "
            "being captured, when nothing can be copied to the device; call it once before capture"
        )
    calls: list[_Call] = []
    runs: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        dims = collapsed(tensor)
        if len(dims) > 1 or (dims and dims[0].stride != 1):
            calls.append(_strided(name, rows, flat, index, tensor, dims, scaled))
        elif tensor.numel():
            runs.setdefault(tensor.dtype, []).append(index)
    padding = rows.padding(_TILE) if collect else np.empty((0, 4), np.int64)
    if len(padding) and not runs:
        runs[tensors[0].dtype] = []
    for dtype, members in runs.items():
        for start in range(0, len(members) or 1, MOST_ADDRESSES):
            some = members[start : start + MOST_ADDRESSES]
            tiles = np.concatenate([rows.tiles(some, _TILE), padding])
            padding = padding[:0]
            calls.append(_linear(name, flat, tensors, dtype, some or [0], tiles, scaled, collect))
    return calls


_TILE = 8192


def _linear(
    name: str,
    flat: Tensor,
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    members: Sequence[int],
    tiles: np.ndarray,
    scaled: bool,
    collect: bool,
) -> _Call:
    """One launch for contiguous tensors of one dtype."""
    count = next(count for count in (1, 4, 16, MOST_ADDRESSES) if len(members) <= count)
    # A kernel for 16 addresses serves fewer tensors too: the last is repeated.
    chosen = (*members, *[members[-1]] * (count - len(members)))
    aligned = is_aligned(flat) and all(is_aligned(tensors[index]) for index in members)
    if collect:
        steps = casts(dtype, flat.dtype, scaled)
        kernel = Kernel(name, Tensors(count), Flat(), steps, aligned, _TILE)
    else:
        steps = casts(flat.dtype, dtype, scaled)
        kernel = Kernel(name, Flat(), Tensors(count), steps, aligned, _TILE)
    table = torch.from_numpy(tiles).to(flat.device)
    return _Call(launcher(kernel, flat.device), len(tiles), chosen, table, ())


def _strided(
    name: str,
    rows: Rows,
    flat: Tensor,
    index: int,
    tensor: Tensor,
    dims: tuple[Dim, ...],
    scaled: bool,
) -> _Call:
    """One launch for one tensor that is not contiguous."""
    *outer, last = dims
    # The tile's other dimension is the one along which the source runs, else the next to the last.
    across = min(reversed(outer), key=lambda dim: dim.stride, default=Dim(1, 0, 0))
    outer = [dim for dim in outer if dim is not across]
    if across.stride < last.stride:
        height, width = 64, 64
    else:
        width = min(1024, 1 << (last.size - 1).bit_length())
        height = 4096 // width
    order = (*outer, across, last)
    steps = casts(tensor.dtype, flat.dtype, scaled)
    source = Strided(len(outer), height, width, rows.ranks > 1)
    kernel = Kernel(f"{name}_strided", source, Flat(), steps, tile=height * width)
    programs = -(-across.size // height) * -(-last.size // width)
    for dim in outer:
        programs *= dim.size
    numbers = [rows.offsets[index], rows.chunks[index], rows.row_numel]
    numbers += [dim.size for dim in order] + [dim.stride for dim in order]
    numbers += [dim.place for dim in order[:-1]]
    return _Call(Launcher(kernel), programs, (index,), None, tuple(numbers))
