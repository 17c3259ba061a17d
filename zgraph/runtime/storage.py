"""FlatShard: one buffer's slice on this rank, and the flat gradient that belongs to it."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zgraph.layout import Buffer, Slot
from zgraph.plan import Axis

if TYPE_CHECKING:
    from zgraph.runtime.eager import EagerReads


@dataclass(frozen=True)
class Groups:
    """Process groups of one model's mesh, by name, and this rank's place in them.

    Attributes:
        shard: group over which buffers are split; "" for one rank.
        replicate: group over which shards are repeated; "" for none.
        shard_rank: this rank's number in the shard group.
        shard_size: ranks of the shard group.
        axes: (group, mesh axis) of each group.
    """

    shard: str = ""
    replicate: str = ""
    shard_rank: int = 0
    shard_size: int = 1
    axes: tuple[tuple[str, Axis], ...] = ()

    def axis(self, group: str) -> Axis | None:
        """Mesh axis of a group; None for no group, or one not of these."""
        return dict(self.axes).get(group)

    def gather_group(self, buffer: Buffer) -> str:
        """Group that gathers and scatters `buffer`; "" if it lies whole on every rank."""
        return "" if buffer.persistent or not buffer.numel else self.shard

    def sum_groups(self, buffer: Buffer) -> tuple[str, ...]:
        """Groups over which gradients are averaged besides the scatter."""
        candidates = (self.shard if buffer.persistent else "", self.replicate)
        return tuple(group for group in candidates if group and buffer.numel)


class FlatShard:
    """This rank's slice of one buffer. See Note [Flat layout].

    Attributes:
        data: 1-D leaf of `buffer.shard_numel` elements in the master dtype. It is the input of
            captured graphs, and an `nn.Parameter` so that Dynamo keeps its shape static.
        grad: its gradient, of the same shape, or None.
        received: names of the parameters that have a gradient; the rest of `grad` means nothing.

    Gradients are held here, not in `data.grad`: one addition accumulates all of a buffer's
    gradients, while a parameter that no graph has used still has none, as in plain PyTorch.
    """

    def __init__(
        self, buffer: Buffer, groups: Groups, device: torch.device, eager_reads: "EagerReads"
    ) -> None:
        self.buffer = buffer
        self.groups = groups
        self.eager_reads = eager_reads
        zeros = torch.zeros(buffer.shard_numel, dtype=buffer.master_dtype, device=device)
        self.data = nn.Parameter(zeros, requires_grad=buffer.requires_grad)
        if buffer.requires_grad:
            self.data.register_post_accumulate_grad_hook(partial(_adopt, weakref.ref(self)))
        self.grad: Tensor | None = None
        self.received: set[str] = set()
        self._pieces = {slot.name: self._span(slot) for slot in buffer.slots}

    def _span(self, slot: Slot) -> tuple[int, int]:
        start, _, length = self.buffer.piece(slot, self.groups.shard_rank)
        return start, start + length

    def piece(self, slot: Slot) -> Tensor:
        """1-D view of this rank's part of a parameter; in-place changes train the model."""
        start, stop = self._pieces[slot.name]
        return self.data.detach()[start:stop]

    def grad_piece(self, name: str) -> Tensor | None:
        """1-D view of this rank's part of a parameter's gradient, or None if it has none."""
        if self.grad is None or name not in self.received:
            return None
        start, stop = self._pieces[name]
        return self.grad[start:stop]

    def fill(self, slot: Slot, value: Tensor) -> None:
        """Copy this rank's part of the whole parameter `value` into the shard."""
        _, start, length = self.buffer.piece(slot, self.groups.shard_rank)
        with torch.no_grad():
            self.piece(slot).copy_(value.detach().reshape(-1)[start : start + length])

    def receive(
        self,
        grad: Tensor,
        names: Iterable[str],
        accumulate: Callable[[Tensor, Tensor], object] = Tensor.add_,
    ) -> None:
        """Add the gradient of the whole slice. It holds zeros outside `names`, and is kept.

        Args:
            accumulate: adds the second into the first of two flat gradients.
        """
        with torch.no_grad():
            if self.grad is None:
                self.grad = grad.detach()
            else:
                self._clear_stale()
                accumulate(self.grad, grad)
        self.received |= set(names)

    def receive_piece(self, name: str, grad: Tensor) -> None:
        """Add the gradient of this rank's part of one parameter. Its own history is not kept."""
        if self.grad is None:
            self.grad = torch.zeros_like(self.data, requires_grad=False)
        start, stop = self._pieces[name]
        with torch.no_grad():
            self._clear_stale()
            self.grad[start:stop].add_(grad)
        self.received.add(name)

    def drop_grad(self, name: str) -> None:
        """Forget one parameter's gradient; the memory goes with the last one."""
        self.received.discard(name)
        if not self.received:
            self.grad = None

    def _clear_stale(self) -> None:
        """Zero what earlier backwards left for parameters whose gradient was dropped since."""
        assert self.grad is not None
        for name, (start, stop) in self._pieces.items():
            if name not in self.received:
                self.grad[start:stop].zero_()


def _adopt(owner: "weakref.ref[FlatShard]", data: Tensor) -> None:
    """Take a gradient that autograd left on the leaf: one from a compiler that is not zgraph's,
    around a model that is. Which parameters it used is not known there, so all count.

    Autograd also calls this when zgraph itself has taken the gradient, with none left. The weak
    reference matters: Python's collector does not see the cycle of a tensor and its hook.
    """
    flat = owner()
    if flat is not None and data.grad is not None:
        grad, data.grad = data.grad, None
        flat.receive(grad, [slot.name for slot in flat.buffer.slots])
