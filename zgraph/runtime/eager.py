"""Reading parameters outside captured code: after a graph break, or in a skipped frame.

The buffer is gathered once and kept until another buffer is read, its shard changes, or the model's
call ends, so modules that read one unit in turn gather it once. What autograd saves keeps it alive
until backward.
Every rank decides by the same program, never by what happens to be alive: a rank that reuses a
buffer while another gathers it would hang.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from zgraph.errors import WholeTensorError
from zgraph.runtime import collectives
from zgraph.runtime.storage import FlatShard

if TYPE_CHECKING:
    from zgraph.runtime.modules import Read

log = logging.getLogger("zgraph")


class EagerReads:
    """The one buffer that a model's eager code holds gathered, and the modules it has named.

    One per model. Attributes:
        gathers: collectives issued so far, for tests and reports.
    """

    def __init__(self) -> None:
        self.gathers = 0
        self._flat: FlatShard | None = None
        self._version = -1
        self._whole_version = -1
        self._whole: Tensor | None = None
        self._named: set[str] = set()

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that read parameters outside captured code."""
        return tuple(sorted(self._named))

    def whole(self, flat: FlatShard) -> Tensor:
        """The gathered buffer of `flat` in compute dtype, 1-D.

        Raises:
            WholeTensorError: the buffer held so far was written to, which would be lost.
        """
        self._refuse_lost_writes()
        version = flat.data._version
        if self._whole is None or self._flat is not flat or self._version != version:
            self._flat, self._whole = None, None  # freed before the next is gathered
            # Evaluation may run in inference mode and training read the same buffer after it.
            with torch.inference_mode(False), torch.no_grad():
                shard = flat.data.detach().to(flat.buffer.param_dtype)
                self._whole = collectives.all_gather(shard, flat.groups.gather_group(flat.buffer))
            self.gathers += bool(flat.groups.gather_group(flat.buffer))
            self._flat, self._version = flat, version
            self._whole_version = self._whole._version
        return self._whole

    def release(self) -> None:
        """Let go of the buffer, at the end of each call of the model. Raises as `whole` does."""
        self._refuse_lost_writes()
        self._flat, self._whole = None, None

    def _refuse_lost_writes(self) -> None:
        flat, whole = self._flat, self._whole
        if flat is None or whole is None:
            return
        if whole.dtype == flat.data.dtype and not flat.groups.gather_group(flat.buffer):
            return  # Without a gather or a cast the buffer is the shard itself.
        if whole._version != self._whole_version:
            self._flat, self._whole = None, None
            raise WholeTensorError(
                f"a parameter of unit {flat.buffer.unit} was changed in place through its module; "
                "that changes a gathered copy only. Change what model.named_parameters() gives, "
                "under torch.no_grad()"
            )

    def name_once(self, module: str) -> None:
        """Say once for each module that it reads outside captured code."""
        if module not in self._named:
            self._named.add(module)
            log.warning(
                "%s reads its parameters outside a captured graph (a graph break, or a call that "
                "torch.compile skipped): they are gathered eagerly, without prefetch",
                module or "the model",
            )


def _read(source: "Read") -> Tensor:
    """The whole parameter in compute dtype, differentiable."""
    reads: EagerReads = source.flat.eager_reads
    reads.name_once(source.module)
    whole = reads.whole(source.flat)
    return _EagerParameter.apply(source.flat.data, whole, source)


# Dynamo would otherwise make graphs of its own from what a skipped frame calls here.
read = cast("Callable[[Read], Tensor]", torch.compiler.disable(_read))


class _EagerParameter(torch.autograd.Function):
    """A view of the gathered buffer whose gradient goes to the flat shard's."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, whole: Tensor, source: "Read") -> Tensor:
        ctx.source = source
        slot = source.slot
        return whole[slot.offset : slot.offset + slot.numel].view(slot.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        flat, slot = ctx.source.flat, ctx.source.slot
        buffer, groups = flat.buffer, flat.groups
        mean = grad.reshape(-1).to(buffer.reduce_dtype)
        # One parameter alone: an all-reduce, since its elements may lie on any of the ranks.
        gather_group = groups.gather_group(buffer)
        for group in (gather_group, *groups.sum_groups(buffer)):
            mean = collectives.all_reduce_mean(mean, group)
        _, start, length = buffer.piece(slot, groups.shard_rank)
        flat.receive_piece(slot.name, mean[start : start + length].to(buffer.master_dtype))
        return None, None, None
