"""ShardedParameter: a parameter with its global shape that holds this rank's piece.

Elementwise ops, in place or not, run on the pieces, so stock optimizers work, one kernel for all of
them where they are fused or foreach. Norms and other reductions return the global value on every
rank. Anything else needs the whole tensor and says so.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zgraph._torch import enable_foreach, pytree
from zgraph.errors import WholeTensorError
from zgraph.layout import held
from zgraph.runtime import collectives, pointwise, reductions
from zgraph.runtime.piece import Piece, needs_whole
from zgraph.runtime.storage import FlatShard

_aten = torch.ops.aten


class ShardedParameter(torch.Tensor):
    """A tensor of global shape, held as one 1-D piece a rank.

    What `model.parameters()` yields after `zg.compile`; its `grad` and its optimizer states are of
    this class too. `to_local()` is the piece, `full_tensor()` the whole tensor.
    """

    _local: Tensor
    _piece: Piece
    _flat: FlatShard | None
    _cached_grad: tuple[Tensor | None, "ShardedParameter | None"]

    @staticmethod
    def __new__(
        cls: type["ShardedParameter"],
        local: Tensor,
        piece: Piece,
        flat: FlatShard | None = None,
        requires_grad: bool = False,
    ) -> "ShardedParameter":
        self = torch.Tensor._make_wrapper_subclass(
            cls, piece.shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        self._local, self._piece, self._flat = local, piece, flat
        self._cached_grad = None, None
        if flat is not None:
            self._is_param = True  # isinstance(self, nn.Parameter)
            if requires_grad:
                torch.Tensor.register_post_accumulate_grad_hook(self, _take_over_grad)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    # ------------------------------------------------------------------ what users call

    def to_local(self) -> Tensor:
        """This rank's piece, 1-D and possibly empty. A view: writing to it changes the model."""
        return self._local

    def full_tensor(self) -> Tensor:
        """The whole tensor, of shape `shape`, in this tensor's dtype. All ranks must call it."""
        piece, local = self._piece, self._local.detach()
        numel = torch.Size(piece.shape).numel()
        if not piece.group:
            return local.reshape(piece.shape).clone()
        longest = min(numel, piece.shard_numel)
        padded = local.new_zeros(longest)
        padded[: piece.length] = local
        parts = collectives.all_gather(padded, piece.group)
        whole = local.new_empty(numel)
        for rank in range(collectives.size(piece.group)):
            start, length = held(piece.offset, numel, rank, piece.shard_numel)
            whole[start : start + length] = parts[rank * longest : rank * longest + length]
        return whole.view(piece.shape)

    @property  # What torch declares as a variable is a property there too, written in C.
    def grad(self) -> Tensor | None:
        """The gradient, averaged over ranks, as a `ShardedParameter`; None if there is none."""
        if self._flat is None:
            return None
        local = self._flat.grad_piece(self._piece.name)
        if local is None:
            return None
        # Optimizers ask several times a step; the wrapper is as good as the flat gradient it views.
        source, cached = self._cached_grad
        if source is not self._flat.grad or cached is None:
            cached = ShardedParameter(local, self._piece)
            self._cached_grad = self._flat.grad, cached
        return cached

    @grad.setter
    def grad(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: Tensor | None
    ) -> None:
        if self._flat is None:
            raise WholeTensorError(f"{self._piece.name}: only a model's parameters have a gradient")
        if value is not None and value is self.grad:
            return  # `p.grad *= 2` assigns what it changed in place
        local = None if value is None else self._own_part(value)
        self._flat.drop_grad(self._piece.name)
        self._cached_grad = None, None
        if local is not None:
            self._flat.receive_piece(self._piece.name, local)

    def _own_part(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient to assign; a copy, since it may alias the present one."""
        if tuple(gradient.shape) != self._piece.shape:
            raise WholeTensorError(
                f"{self._piece.name}: a gradient of shape {list(gradient.shape)} was assigned; "
                f"expected {list(self._piece.shape)}"
            )
        if isinstance(gradient, ShardedParameter):
            return gradient._local.clone()
        return self._piece.of(gradient).clone()

    @property
    def data(self) -> Tensor:
        """The tensor, detached. Assigning copies, since shards stay in place."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    def register_hook(self, hook: Any) -> Any:
        """Refuse: it would never run, since gradients arrive for a whole unit at once."""
        raise WholeTensorError(
            f"{self._piece.name}: gradients of a unit arrive together, so hooks on its parameters "
            "would not run; read or change p.grad after backward"
        )

    register_post_accumulate_grad_hook = register_hook

    def share_memory_(self) -> "ShardedParameter":
        """Refuse: this tensor has no storage of its own."""
        raise WholeTensorError(f"{self._piece.name}: a shard cannot be moved to shared memory")

    def requires_grad_(self, mode: bool = True) -> "ShardedParameter":
        """Refuse to change what the plan has fixed; otherwise return the tensor itself."""
        if self._flat is not None and mode != self.requires_grad:
            raise WholeTensorError(
                f"{self._piece.name}: requires_grad is part of the plan, since frozen parameters "
                "lie in buffers of their own; set it before zg.compile"
            )
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:
        p = self._piece
        where = f"elements {p.start}..{p.start + p.length}" if p.group else "whole"
        return (
            f"ShardedParameter({p.name}, shape={list(p.shape)}, dtype={self.dtype}, {where}, "
            f"piece={self._local!r})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedParameter":
        if self._flat is not None:
            raise WholeTensorError(
                f"{self._piece.name}: a model cannot be copied after zg.compile; copy it before, "
                "or copy {name: p.full_tensor() for name, p in model.named_parameters()}"
            )
        return ShardedParameter(self._local.clone(), self._piece)

    # ------------------------------------------------------------------ how ops run on it

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default):
            # The piece itself, not a view: below autograd a view's writes are not counted.
            return ShardedParameter(args[0]._local, args[0]._piece)
        reduction = reductions.RULES.get(func)
        if reduction is not None:
            return reduction(func, args, kwargs)
        if pointwise.is_pointwise(func):
            return pointwise.run(cls, func, args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        raise needs_whole(func, next(x._piece for x in leaves if isinstance(x, cls)))


def _take_over_grad(parameter: ShardedParameter) -> None:
    """Move what autograd accumulated to the flat shard: a loss term of the parameter itself.

    Every rank computes such a term of the whole parameter alike, so it needs no averaging.
    """
    base: Any = torch.Tensor.grad
    gradient = base.__get__(parameter)
    assert parameter._flat is not None
    parameter._flat.receive_piece(parameter._piece.name, parameter._own_part(gradient))
    base.__set__(parameter, None)


enable_foreach(ShardedParameter)
