"""Launching: which kernels a call needs, found once for its shapes, then run with its addresses.

Note [Steady state]
The first call with given shapes, strides, dtypes and alignments compiles what is missing and copies
the table of its tiles to the device. From the second call on a launch reads addresses, and nothing
waits for the device nor copies to it: so a call may be captured in a CUDA graph, and run on any
stream. What belongs to shapes is kept as long as the process, because a captured graph may read it
at any time; models have few shapes.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zgraph_kernels.generate import (
    MOST_ADDRESSES,
    TILE,
    WARPS,
    Flat,
    Kernel,
    Strided,
    Tensors,
)
from zgraph_kernels.layout import Dim, Rows, collapsed
from zgraph_kernels.steps import TRITON_DTYPES, Cast, Scale, Step


class Launcher:
    """A compiled kernel on one device.

    Triton looks at every argument of an ordinary launch to choose a specialisation. Here it is
    known after the first, which is a third of the time that a launch takes.
    """

    def __init__(self, kernel: Kernel, device: int) -> None:
        self.kernel = kernel
        self._device = device
        self._function = kernel.function()
        self._compiled: Any = None

    def __call__(self, programs: int, tensors: Sequence[Tensor], *numbers: float) -> None:
        """Run `programs` programs on the current stream of the device; -1 is the CPU."""
        if not programs:
            return
        if self._device >= 0 and torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                self._launch(programs, tensors, numbers)
        else:
            self._launch(programs, tensors, numbers)

    def _launch(self, programs: int, tensors: Sequence[Tensor], numbers: Sequence[float]) -> None:
        if self._compiled is None:
            _refuse_in_capture(self.kernel.name, self._device)
            launch = self._function[(programs,)]
            # Without fusing products and sums, which round once: so kernels give the bits that
            # their definitions give.
            options = {"num_warps": self.kernel.warps, "enable_fp_fusion": False}
            self._compiled = launch(*tensors, *numbers, **options)
        else:
            addresses = [tensor.data_ptr() for tensor in tensors]
            self._compiled[(programs, 1, 1)](*addresses, *numbers)


def _refuse_in_capture(name: str, device: int) -> None:
    if device >= 0 and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"zgraph_kernels: {name} meets these shapes and dtypes for the first time while a CUDA "
            "graph is being captured, when nothing can be compiled or copied to the device; call "
            "it once before the capture"
        )


def is_supported(*tensors: Tensor, scaled: bool = False) -> bool:
    """Whether kernels exist for these dtypes: floats in any mix, bytes unchanged."""
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes <= TRITON_DTYPES.keys():
        return False
    return all(dtype.is_floating_point for dtype in dtypes) or (len(dtypes) == 1 and not scaled)


def _devices_differ(name: str, tensors: Sequence[Tensor]) -> str:
    devices = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
    return f"{name}: tensors lie on {devices}; move them to one device"


def are_aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all start at multiples of 16 bytes."""
    return not any(tensor.data_ptr() & 15 for tensor in tensors)


def casts(source: torch.dtype, to: torch.dtype, scaled: bool) -> tuple[Step, ...]:
    """Scale in fp32, or in fp64 if the source is; then round once."""
    if not scaled:
        return (Cast(source, to),)
    wide = torch.float64 if source == torch.float64 else torch.float32
    return (Scale(source), Cast(wide, to))


class FlatKernel:
    """A kernel from one contiguous buffer to another, with its launchers.

    Attributes:
        description: what it does, for addresses that are aligned.
    """

    def __init__(
        self,
        name: str,
        steps: tuple[Step, ...],
        source: Flat = Flat(),  # noqa: B008  a frozen value
        destination: Flat = Flat(),  # noqa: B008
        tile: int = TILE,
        warps: int = WARPS,
    ) -> None:
        self.description = Kernel(name, source, destination, steps, True, tile, warps)
        self._launchers: dict[tuple[Any, ...], Launcher] = {}

    def __call__(self, numel: int, tensors: Sequence[Tensor], *scalars: float) -> None:
        """Move `numel` elements.

        Args:
            tensors: source, destination and the steps' operands, all contiguous on one device.
            scalars: those of the steps, in order.
        """
        device, aligned = tensors[0].get_device(), are_aligned(tensors)
        if any(tensor.get_device() != device for tensor in tensors):
            raise ValueError(_devices_differ(self.description.name, tensors))
        # A compiled kernel trusts that addresses are of the dtypes that it was compiled for.
        key = (device, aligned, *(tensor.dtype for tensor in tensors))
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = Launcher(replace(self.description, aligned=aligned), device)
            self._launchers[key] = launcher
        launcher(-(-numel // self.description.tile), tensors, numel, *scalars)


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
    layout: Hashable,
    make_rows: Callable[[], Rows],
    flat: Tensor,
    tensors: Sequence[Tensor],
    scale: float = 1.0,
    collect: bool = True,
) -> None:
    """Move tensors into the rows of a flat buffer, or out of them. See Note [Rows] in `layout`.

    Args:
        layout: what, with the tensors' shapes, decides the rows.
        make_rows: the rows; called when these shapes come for the first time.
        flat: contiguous, as many elements as the rows.
        tensors: one for each of the rows' tensors; contiguous unless `collect`.
        scale: factor for each element, applied before it is rounded.
        collect: from the tensors to `flat`, with zeros in its padding; else the other way.
    """
    scalars = () if scale == 1 else (scale,)
    shapes = [(t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors]
    aligned = are_aligned((flat, *tensors))
    key = (name, layout, flat.dtype, flat.get_device(), aligned, scale == 1, *shapes)
    plan = _plans.get(key)
    if plan is None:
        planner = _Planner(name, make_rows(), flat, tensors, aligned, scale != 1, collect)
        plan = _plans[key] = planner.calls()
    for call in plan:
        call(flat, tensors, scalars)


def _kept_on(device: torch.device, table: np.ndarray) -> Tensor:
    """`table` in memory that stays its own. Inductor warms up what it will capture with a memory
    pool that belongs to the graph; that pool is the calling thread's, so another one allocates."""
    with ThreadPoolExecutor(max_workers=1) as other:
        return other.submit(lambda: torch.from_numpy(table).to(device)).result()


@cache
def _launcher(kernel: Kernel, device: int) -> Launcher:
    return Launcher(kernel, device)


@dataclass(frozen=True)
class _Planner:
    """Finds the launches of one call of `run_rows`, whose arguments it has."""

    name: str
    rows: Rows
    flat: Tensor
    tensors: Sequence[Tensor]
    aligned: bool
    scaled: bool
    collect: bool

    def calls(self) -> list[_Call]:
        """One launch for up to 64 contiguous tensors of one dtype, one for each other tensor."""
        tensors = (self.flat, *self.tensors)
        if len({tensor.device for tensor in tensors}) > 1:
            raise ValueError(_devices_differ(self.name, tensors))
        _refuse_in_capture(self.name, self.flat.get_device())
        calls: list[_Call] = []
        runs: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(self.tensors):
            dims = collapsed(tensor)
            if len(dims) > 1 or (dims and dims[0].stride != 1):
                calls.append(self._strided(index, dims))
            elif tensor.numel():
                runs.setdefault(tensor.dtype, []).append(index)
        padded = not self.collect
        if not runs and not padded:
            runs[self.tensors[0].dtype] = []
        for dtype, members in runs.items():
            for start in range(0, len(members) or 1, MOST_ADDRESSES):
                some = members[start : start + MOST_ADDRESSES]
                calls.append(self._linear(dtype, some, pads=not padded))
                padded = True
        return calls

    def _linear(self, dtype: torch.dtype, members: Sequence[int], pads: bool) -> _Call:
        """One launch for contiguous tensors of one dtype, and for all padding if it `pads`."""
        source, to = (dtype, self.flat.dtype) if self.collect else (self.flat.dtype, dtype)
        tiles = self.rows.tiles(members, TILE)
        if pads:
            tiles = np.concatenate([tiles, self.rows.padding(TILE)])
        members = members or [0]
        count = next(count for count in (1, 4, 16, MOST_ADDRESSES) if len(members) <= count)
        # A kernel for 16 addresses serves fewer tensors too: the last is repeated.
        chosen = (*members, *[members[-1]] * (count - len(members)))
        places = (Tensors(count), Flat()) if self.collect else (Flat(), Tensors(count))
        steps = casts(source, to, self.scaled)
        kernel = Kernel(self.name, *places, steps, self.aligned)
        launcher = _launcher(kernel, self.flat.get_device())
        return _Call(launcher, len(tiles), chosen, _kept_on(self.flat.device, tiles), ())

    def _strided(self, index: int, dims: tuple[Dim, ...]) -> _Call:
        """One launch for one tensor that is not contiguous."""
        *outer, last = dims
        # A tile's other dimension is that along which the source runs, else the next to the last.
        across = min(reversed(outer), key=lambda dim: dim.stride, default=Dim(1, 0, 0))
        outer = [dim for dim in outer if dim is not across]
        transposed = across.size > 1 and across.stride < last.stride
        width = min(64 if transposed else 1024, _power_of_two(last.size))
        height = min(4096 // width, _power_of_two(across.size))
        tensor, rows = self.tensors[index], self.rows
        source = Strided(len(outer), height, width, rows.ranks > 1)
        steps = casts(tensor.dtype, self.flat.dtype, self.scaled)
        kernel = Kernel(f"{self.name}_strided", source, Flat(), steps, self.aligned)
        down, along = -(-across.size // height), -(-last.size // width)
        programs = down * along * prod(dim.size for dim in outer)
        order = (*outer, across, last)
        numbers = [rows.offsets[index], rows.chunks[index], rows.row_numel, down, along]
        numbers += [dim.size for dim in order] + [dim.stride for dim in order]
        numbers += [dim.place for dim in order[:-1]]
        launcher = Launcher(kernel, self.flat.get_device())
        return _Call(launcher, programs, (index,), None, tuple(numbers))


def _power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
