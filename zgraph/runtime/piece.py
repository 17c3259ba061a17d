"""Piece: which part of a parameter a rank holds, and the error of an op that needs more."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zgraph.errors import WholeTensorError
from zgraph.runtime import collectives


@dataclass(frozen=True)
class Piece:
    """Which part of which parameter: `start` and `length` in elements of the whole."""

    name: str
    shape: tuple[int, ...]
    start: int
    length: int
    offset: int  # of the parameter in its flat buffer, in elements
    shard_numel: int  # elements of one rank's slice of that buffer
    group: str  # over which the parameter is split; "" if it lies whole on every rank

    def of(self, whole: Tensor) -> Tensor:
        """This piece of a whole tensor of `shape`, 1-D."""
        return whole.reshape(-1)[self.start : self.start + self.length]

    def same_place(self, other: "Piece") -> bool:
        """Whether elements of the two pieces belong together one by one."""
        # The same answer on every rank: where the parameter lies, not what is here of it.
        mine = self.shape, self.offset, self.shard_numel, self.group
        return mine == (other.shape, other.offset, other.shard_numel, other.group)


def needs_whole(func: Any, piece: Piece) -> WholeTensorError:
    """The error of an op that needs the whole tensor."""
    ranks = collectives.size(piece.group)
    return WholeTensorError(
        f"{func} needs the whole of {piece.name} {list(piece.shape)}, which is split over "
        f"{ranks} ranks; call .full_tensor() first, on every rank"
    )
