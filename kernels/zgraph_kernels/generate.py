"""The generator: from the description of a kernel to a Triton function.

A description says from where to where elements move and what happens to them on the way. Its source
is made of three parts: *where* (which tile this program moves), *load, steps, store* for a full
tile, and the same once more for a partial one, under masks. A full, aligned tile needs no mask, so
it moves in vectors of 16 bytes. No shape stands in the text, so that one function serves every
shape; but a tensor that is not contiguous gets its own, compiled for its strides.

    print(Kernel("pack", Tensors(4), Flat(), (Cast(torch.float32, torch.bfloat16),)).text)

Note [Addresses]
The tensors of a launch are arguments of it. There is no table of addresses to copy to the device,
none to keep until a CUDA graph is gone, and none to renew when a gradient lies somewhere else. A
program finds its tensor by comparing its number with each of them, at most 64; more tensors than
that take several launches.
"""

import inspect
import linecache
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from types import ModuleType
from typing import Any

from zgraph_kernels.steps import Step

MOST_ADDRESSES = 64
"""Tensors of one launch. See Note [Addresses]."""

TILE, WARPS = 2048, 4
"""Elements and warps of a program, unless a kernel says otherwise: 16 elements a thread are enough
loads in flight on Hopper, and larger tiles lose a few percent (kernels/README.md)."""


@dataclass(frozen=True)
class Flat:
    """One contiguous buffer.

    Attributes:
        pairs: whether a byte holds two elements of 4 bits, the first in its low half.
    """

    pairs: bool = False


@dataclass(frozen=True)
class Tensors:
    """Contiguous tensors in the rows of a flat buffer, see Note [Rows] in `layout`.

    Attributes:
        count: addresses of a launch.
    """

    count: int


@dataclass(frozen=True)
class Strided:
    """One tensor of any strides, whose elements go to their chunks of a flat buffer's rows.

    Attributes:
        outer: dimensions besides the last and the one of the smallest stride.
        rows, columns: extent of a tile along that one, and along the last.
        split: whether the flat buffer has more than one row.
    """

    outer: int
    rows: int
    columns: int
    split: bool


@dataclass(frozen=True)
class Kernel:
    """The description of one kernel.

    Attributes:
        name: of the function, for profiles and for reading.
        source, destination: where elements come from and go to; at least one is `Flat`.
        steps: what happens to them on the way.
        aligned: whether all addresses are multiples of 16 bytes.
        tile: elements that one program moves; a power of two.
        warps: of 32 threads, a program.
    """

    name: str
    source: Flat | Tensors | Strided
    destination: Flat | Tensors
    steps: tuple[Step, ...]
    aligned: bool = True
    tile: int = TILE
    warps: int = WARPS

    @property
    def text(self) -> str:
        """The kernel in Triton."""
        if isinstance(self.source, Strided):
            return _strided(self, self.source)
        return _linear(self)

    def function(self) -> Any:
        """The kernel as `triton.jit` makes it, once a process."""
        return _function(self)


@cache
def _function(kernel: Kernel) -> Any:
    import triton

    text = kernel.text
    # Triton reads a function's source back by its file. This one lies in linecache, as do those of
    # other generated functions in Python; an entry without a time is never checked against a disk.
    file = f"<zgraph_kernels {kernel.name} {sha256(repr(kernel).encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = ModuleType("zgraph_kernels.generated")
    exec(compile(text, file, "exec"), module.__dict__)
    function = module.__dict__[kernel.name]
    names = list(inspect.signature(function).parameters)
    tensors, numbers = names[: len(_operands(kernel))], names[len(_operands(kernel)) :]
    # What Triton must not read into the first call's arguments. A strided kernel is made for one
    # tensor's sizes and strides.
    general = [] if isinstance(kernel.source, Strided) else numbers
    general += [] if kernel.aligned else tensors
    options: dict[str, Any] = {"do_not_specialize": general}
    return triton.jit(function, **options)


def _operands(kernel: Kernel) -> list[str]:
    """Parameters that are tensors: first of all, so that a launch can tell them from numbers."""
    places = (kernel.source, kernel.destination)
    tensors = next((place for place in places if isinstance(place, Tensors)), None)
    if tensors is None:
        names = ["source", "destination"]
    else:
        names = ["flat", "tiles", *(f"t{number}" for number in range(tensors.count))]
    return names + [name for step in kernel.steps for name in step.operands()]


def _function_text(kernel: Kernel, numbers: list[str], body: list[str]) -> str:
    scalars = [name for step in kernel.steps for name in step.scalars()]
    parameters = ", ".join([*_operands(kernel), *numbers, *scalars])
    head = ["import triton.language as tl", "", "", f"def {kernel.name}({parameters}):"]
    return "\n".join([*head, *(f"    {line}" for line in body)]) + "\n"


def _linear(kernel: Kernel) -> str:
    """Kernels whose tiles are runs of elements on both sides."""
    tile = kernel.tile
    tensors = next((s for s in (kernel.source, kernel.destination) if isinstance(s, Tensors)), None)
    if tensors is None:
        numbers = ["numel: 'i64'"]
        where = [
            f"start = tl.program_id(0).to(tl.int64) * {tile}",
            f"full = start + {tile} <= numel",
        ]
        full = ["index = start + lane"]
        part = ["index = start + lane", "part = index < numel", "filled = part"]
    else:
        numbers = []
        # The table is read again at the next launch: it is the last to leave the cache.
        where = [
            "row = tiles + tl.program_id(0).to(tl.int64) * 4",
            "number = tl.load(row, eviction_policy='evict_last')",
            "start = tl.load(row + 1, eviction_policy='evict_last')",
            "place = tl.load(row + 2, eviction_policy='evict_last')",
            "count = tl.load(row + 3, eviction_policy='evict_last')",
            "tensor = t0",
            *(f"tensor = tl.where(number == {n}, t{n}, tensor)" for n in range(1, tensors.count)),
            # Padding takes the masked way, with a mask that loads nothing.
            f"full = (number >= 0) & (count == {tile}) & (start % 16 == 0) & (place % 16 == 0)",
        ]
        source, destination = ("tensor", "flat"), ("flat", "tensor")
        mine, its = source if isinstance(kernel.source, Tensors) else destination
        at = {"tensor": "start", "flat": "place"}
        # Dividing and multiplying again tells the compiler that vectors of 16 bytes are aligned.
        full = [
            f"source = {mine} + {at[mine]} // 16 * 16",
            f"destination = {its} + {at[its]} // 16 * 16",
            "index = lane",
        ]
        part = [
            f"source = {mine} + {at[mine]}",
            f"destination = {its} + {at[its]}",
            "index = lane",
            "part = lane < count",
            "filled = lane < tl.where(number >= 0, count, 0)",
        ]
    body = [
        *where,
        f"lane = tl.arange(0, {tile})",
        "if full:",
        *_indented([*full, *_move(kernel, mask="", other="", only="")]),
        "else:",
        *_indented([*part, *_move(kernel, ", mask=filled", ", other=0", ", mask=part")]),
    ]
    return _function_text(kernel, numbers, body)


def _move(kernel: Kernel, mask: str, other: str, only: str) -> list[str]:
    """Load, steps, store."""
    lines: list[str] = []
    half = kernel.tile // 2
    if kernel.source == Flat(pairs=True):
        masked = f", mask=pair * 2 < numel{other}" if mask else ""
        lines += [
            f"pair = start // 2 + tl.arange(0, {half})",
            f"byte = tl.load(source + pair{masked}).to(tl.int32)",
            # The sign of 4 bits: 8 and above stand for -8 and above.
            "low, high = ((byte & 15) ^ 8) - 8, ((byte >> 4 & 15) ^ 8) - 8",
            "x = tl.interleave(low, high)",
        ]
    else:
        lines += [f"x = tl.load(source + index{mask}{other})"]
    for step in kernel.steps:
        lines += [
            line.replace("{mask}", mask + other).replace("{only}", only)
            for line in step.lines(kernel.tile)
        ]
    if only and isinstance(kernel.source, Tensors):
        lines += ["x = tl.where(filled, x, 0)  # padding is zero whatever the steps make of it"]
    if kernel.destination == Flat(pairs=True):
        masked = ", mask=pair * 2 < numel" if only else ""
        lines += [
            f"low, high = tl.split(tl.reshape(x, ({half}, 2)))",
            f"pair = start // 2 + tl.arange(0, {half})",
            f"tl.store(destination + pair, (low & 15 | high << 4).to(tl.uint8){masked})",
        ]
    else:
        lines += [f"tl.store(destination + index, x{only})"]
    return lines


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _strided(kernel: Kernel, source: Strided) -> str:
    """Kernels whose tiles are rectangles: of the last dimension, along which the destination runs,
    and of the dimension of the smallest stride, along which the source does."""
    count = source.outer + 2
    numbers = ["offset", "chunk", "row_numel", "down", "along"]
    numbers += [f"size{n}" for n in range(count)]
    numbers += [f"stride{n}" for n in range(count)]
    numbers += [f"place{n}" for n in range(count - 1)]
    across, last = source.outer, source.outer + 1
    body = [
        "rest = tl.program_id(0).to(tl.int64)",
        f"column = rest % along * {source.columns} + tl.arange(0, {source.columns})[None, :]",
        "rest = rest // along",
        f"row = rest % down * {source.rows} + tl.arange(0, {source.rows})[:, None]",
        "rest = rest // down",
        f"source += row * stride{across} + column * stride{last}",
        f"element = row * place{across} + column",
    ]
    for n in range(source.outer):
        body += [
            f"source += rest % size{n} * stride{n}",
            f"element += rest % size{n} * place{n}",
            f"rest = rest // size{n}",
        ]
    body += [
        f"part = (row < size{across}) & (column < size{last})",
        "x = tl.load(source, mask=part)",
        *(line for step in kernel.steps for line in step.lines(kernel.tile)),
        *(["element = element // chunk * row_numel + element % chunk"] if source.split else []),
        "destination += offset + element",
        "tl.store(destination, x, mask=part)",
    ]
    return _function_text(kernel, numbers, body)
