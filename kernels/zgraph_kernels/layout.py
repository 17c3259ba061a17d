"""Layouts: where the elements that a kernel moves lie, and the tiles in which it moves them.

Note [Rows]
A flat buffer of `ranks` rows, one after another, holds many tensors. A tensor has a *chunk* of
columns in every row, starting at its *offset*, and its elements run through the chunks in order:

    element e of a tensor lies in row e // chunk, column offset + e % chunk

`pack` has one row, and chunks as long as their tensors: each tensor in one piece. FSDP2's layout
has one row a rank, and the chunk of a tensor of shape [R, …] is ceil(R / ranks) of its R slices.
What no tensor fills is padding, and holds zeros.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """See Note [Rows].

    Attributes:
        ranks: rows of the buffer.
        row_numel: elements of one row.
        numels, chunks, offsets: of each tensor, in elements.
    """

    ranks: int
    row_numel: int
    numels: tuple[int, ...]
    chunks: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.ranks * self.row_numel

    def tiles(self, tensors: Sequence[int], tile: int) -> np.ndarray:
        """The parts that programs move: int64 [tiles, 4], in the order of `tensors`.

        Columns: position in `tensors`, first element there, first element in the buffer, count.
        """
        parts = [np.empty((0, 4), np.int64)]
        for position, index in enumerate(tensors):
            numel, chunk = self.numels[index], self.chunks[index]
            for row in range(-(-numel // chunk) if numel else 0):
                count = min(chunk, numel - row * chunk)
                place = row * self.row_numel + self.offsets[index]
                parts.append(_cut(position, row * chunk, place, count, tile))
        return np.concatenate(parts)

    def padding(self, tile: int) -> np.ndarray:
        """As `tiles`, for what no tensor fills; the position is -1."""
        parts = [np.empty((0, 4), np.int64)]
        parts += [_cut(-1, 0, start, stop - start, tile) for start, stop in self._gaps()]
        return np.concatenate(parts)

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Ranges of the buffer, in order, that no tensor fills."""
        order = sorted(range(len(self.numels)), key=lambda index: self.offsets[index])
        for row in range(self.ranks):
            end = row * self.row_numel
            for index in order:
                chunk = self.chunks[index]
                count = min(chunk, max(0, self.numels[index] - row * chunk))
                start = row * self.row_numel + self.offsets[index]
                if count and end < start:
                    yield end, start
                end = start + count if count else end
            if end < (row + 1) * self.row_numel:
                yield end, (row + 1) * self.row_numel


def _cut(position: int, start: int, place: int, count: int, tile: int) -> np.ndarray:
    steps = np.arange(0, count, tile, dtype=np.int64)
    columns = (
        np.full_like(steps, position),
        start + steps,
        place + steps,
        np.minimum(count - steps, tile),
    )
    return np.stack(columns, axis=1)


def packed(numels: Sequence[int], offsets: Sequence[int], numel: int) -> Rows:
    """One row that holds each tensor in one piece.

    Raises:
        ValueError: the offsets are not one a tensor, or tensors overlap or leave the buffer.
    """
    if len(numels) != len(offsets):
        raise ValueError(
            f"pack: {len(numels)} tensors and {len(offsets)} offsets; give one for each"
        )
    end = 0
    for offset, count in sorted(zip(offsets, numels, strict=True)):
        if count and offset < end:
            raise ValueError(
                f"pack: elements {offset}..{offset + count} overlap those before them, which end "
                f"at {end}"
                if offset >= 0
                else f"pack: offset {offset} is negative"
            )
        end = max(end, offset + count)
    if end > numel:
        raise ValueError(f"pack: tensors end at element {end} of a buffer of {numel}")
    return Rows(1, numel, tuple(numels), tuple(max(1, n) for n in numels), tuple(offsets))


def sharded(shapes: Sequence[Sequence[int]], ranks: int) -> Rows:
    """FSDP2's layout: each tensor split along its first dimension, one row a rank.

    As `torch.chunk` splits: ranks own ceil(size / ranks) slices, the last ones fewer or none.

    Raises:
        ValueError: there is no rank, or a tensor has no dimension to split.
    """
    if ranks < 1:
        raise ValueError(f"a buffer of {ranks} rows holds nothing; give at least 1")
    numels, chunks, offsets = [], [], []
    end = 0
    for shape in shapes:
        if not shape:
            raise ValueError("a tensor without dimensions has no first one to split; reshape it")
        numel = int(np.prod(shape, dtype=np.int64))
        chunk = -(-shape[0] // ranks) * (numel // shape[0] if shape[0] else 0)
        numels.append(numel)
        chunks.append(max(1, chunk))
        offsets.append(end)
        end += chunk
    return Rows(ranks, end, tuple(numels), tuple(chunks), tuple(offsets))


@dataclass(frozen=True)
class Dim:
    """One dimension of a strided tensor: its size, its stride, and its stride once contiguous."""

    size: int
    stride: int
    place: int


def collapsed(tensor: Tensor) -> tuple[Dim, ...]:
    """The fewest dimensions that say where the elements of `tensor` lie, outermost first.

    A contiguous tensor has at most one, of stride 1; an empty or a one-element tensor has none.
    """
    dims: list[Dim] = []
    place = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size == 1:
            continue
        if dims and stride == dims[-1].stride * dims[-1].size:
            dims[-1] = Dim(dims[-1].size * size, dims[-1].stride, dims[-1].place)
        else:
            dims.append(Dim(size, stride, place))
        place *= size
    return tuple(reversed(dims)) if tensor.numel() > 1 else ()
