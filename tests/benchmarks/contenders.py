"""What casts and flattens one block of a Llama today, and zgraph's kernels beside it.

Each function makes the buffers of one call, and returns the call. What a user has today is written
as its users write it: FSDP2's ops as FSDP2 calls them, Inductor's bucketing ops as it emits them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

import zgraph_kernels as zk

BF16, FP32 = torch.bfloat16, torch.float32
Call = Callable[[], Any]


def _block(dim: int, ffn: int, kv: int) -> list[tuple[int, ...]]:
    attention = [(dim, dim), (kv, dim), (kv, dim), (dim, dim)]
    return [*attention, (ffn, dim), (ffn, dim), (dim, ffn), (dim,), (dim,)]


BLOCKS = {
    "1B": _block(2048, 8192, 512),
    "8B": _block(4096, 14336, 1024),
    "70B": _block(8192, 28672, 1024),
}
"""Parameter shapes of one block: Llama 3.2 1B, Llama 3.1 8B and 70B."""


@dataclass(frozen=True)
class Size:
    """One block on one rank of several."""

    model: str
    ranks: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return BLOCKS[self.model]

    @property
    def numel(self) -> int:
        return sum(map(prod, self.shapes))

    @property
    def shard_numel(self) -> int:
        return self.numel // self.ranks

    def shards(self, dtype: torch.dtype = FP32) -> list[Tensor]:
        """This rank's part of each parameter, as FSDP2 shards."""
        return [_random(prod(shape) // self.ranks, dtype) for shape in self.shapes]

    def grads(self) -> list[Tensor]:
        return [_random(prod(shape), BF16).view(shape) for shape in self.shapes]


def _random(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, device="cuda", dtype=FP32).to(dtype)


def _offsets(tensors: list[Tensor]) -> list[int]:
    return [sum(t.numel() for t in tensors[:index]) for index in range(len(tensors))]


def _flattened(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # For each size by itself: what a user gets whose sizes do not change.
    return torch.compile(function, dynamic=False)


# pack: fp32 shards of the parameters into the bf16 input of an all-gather.


def pack_shards(size: Size) -> dict[str, Callable[[], Call]]:
    numel = size.shard_numel

    def zgraph() -> Call:
        shards = size.shards()
        return partial(zk.pack, shards, _offsets(shards), numel, BF16)

    def zgraph_flat() -> Call:
        return partial(zk.pack, [_random(numel, FP32)], [0], numel, BF16)

    def flat_cast() -> Call:
        return partial(_random(numel, FP32).to, BF16)

    def foreach_copy() -> Call:
        shards, out = size.shards(), torch.empty(numel, device="cuda", dtype=BF16)
        return partial(torch._foreach_copy_, list(out.split([s.numel() for s in shards])), shards)

    def cat_of_casts() -> Call:
        return partial(_flattened, size.shards(), BF16)

    def fsdp2() -> Call:
        shards = size.shards()
        sizes = [shard.numel() for shard in shards]
        out = torch.empty(numel * size.ranks, device="cuda", dtype=BF16)

        def call() -> Any:
            low = torch.empty(numel, device="cuda", dtype=BF16).split(sizes)
            torch._foreach_copy_(low, shards)
            return torch.ops.fsdp.all_gather_copy_in(list(low), out, sizes, numel, 0)

        return call

    def bucketing() -> Call:
        from torch._inductor.fx_passes import bucketing

        shards, index = size.shards(), bucketing._ALL_DTYPES.index(BF16)
        bucket = torch.ops.bucketing._pre_bucket_all_gather
        return partial(bucket, shards, size.ranks, "", BF16, [index] * len(shards), 0)

    compiled = _compiled(_flattened)
    return {
        "zgraph pack": zgraph,
        "zgraph pack, flat shard": zgraph_flat,
        "Tensor.to of a flat shard": flat_cast,
        "_foreach_copy_": foreach_copy,
        "torch.cat of casts": cat_of_casts,
        "torch.compile(cat of casts)": lambda: partial(compiled, size.shards(), BF16),
        "FSDP2 cast + all_gather_copy_in": fsdp2,
        "Inductor _pre_bucket_all_gather": bucketing,
    }


# pack: a whole unit's bf16 gradients into the flat fp32 input of a reduce-scatter.


def pack_gradients(size: Size) -> dict[str, Callable[[], Call]]:
    def zgraph() -> Call:
        grads = size.grads()
        return partial(zk.pack, grads, _offsets(grads), size.numel, FP32)

    def foreach_copy() -> Call:
        grads, out = size.grads(), torch.empty(size.numel, device="cuda")
        parts = out.split([grad.numel() for grad in grads])
        views = [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]
        return partial(torch._foreach_copy_, views, grads)

    compiled = _compiled(_flattened)
    return {
        "zgraph pack": zgraph,
        "_foreach_copy_": foreach_copy,
        "torch.cat of casts": lambda: partial(_flattened, size.grads(), FP32),
        "torch.compile(cat of casts)": lambda: partial(compiled, size.grads(), FP32),
    }


# chunk_cat: the same gradients into FSDP2's rank-major layout, scaled by 1/ranks.


def _rows(grads: list[Tensor], ranks: int) -> Tensor:
    return torch.cat([grad.view(ranks, -1).float() for grad in grads], dim=1) * (1 / ranks)


def chunk_cat(size: Size) -> dict[str, Callable[[], Call]]:
    ranks = size.ranks

    def fsdp2() -> Call:
        grads, out = size.grads(), torch.empty(ranks, size.shard_numel, device="cuda")
        return partial(torch._chunk_cat, grads, 0, ranks, out=out)  # it does not scale

    def bucketing() -> Call:
        import torch._inductor.fx_passes.bucketing

        grads, bucket = size.grads(), torch.ops.bucketing._pre_bucket_reduce_scatter
        return lambda: bucket(grads, ranks).float()

    compiled = _compiled(_rows)
    return {
        "zgraph chunk_cat": lambda: partial(zk.chunk_cat, size.grads(), ranks, FP32, 1 / ranks),
        "FSDP2 chunk_cat, unscaled": fsdp2,
        "torch.cat of casts": lambda: partial(_rows, size.grads(), ranks),
        "torch.compile(cat of casts)": lambda: partial(compiled, size.grads(), ranks),
        "Inductor _pre_bucket_reduce_scatter + cast": bucketing,
    }


# unpack: FSDP2's all-gather output into whole parameters.


def _whole(flat: Tensor, shapes: list[tuple[int, ...]], ranks: int) -> list[Tensor]:
    parts = flat.view(ranks, -1).split([prod(shape) // ranks for shape in shapes], dim=1)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def unpack(size: Size) -> dict[str, Callable[[], Call]]:
    shapes, ranks, numel = size.shapes, size.ranks, size.numel

    def fsdp2() -> Call:
        flat = _random(numel, BF16).view(ranks, -1)
        out = [torch.empty(prod(s), device="cuda", dtype=BF16).view(ranks, -1) for s in shapes]
        sizes = [part.shape[1] for part in out]
        return partial(torch.ops.fsdp.split_with_sizes_copy, flat, sizes, dim=1, out=out)

    compiled = _compiled(_whole)
    return {
        "zgraph unpack": lambda: partial(zk.unpack, _random(numel, BF16), shapes, ranks),
        "FSDP2 split_with_sizes_copy": fsdp2,
        "torch.reshape of splits": lambda: partial(_whole, _random(numel, BF16), shapes, ranks),
        "torch.compile(reshape of splits)": lambda: partial(
            compiled, _random(numel, BF16), shapes, ranks
        ),
    }


# accumulate: a reduce-scatter's output, in one dtype, into the fp32 gradient.


def accumulate(size: Size, dtype: torch.dtype) -> dict[str, Callable[[], Call]]:
    numel, scale = size.shard_numel, 1 / size.ranks

    def buffers() -> tuple[Tensor, Tensor]:
        return _random(numel, FP32), _random(numel, dtype)

    def add() -> Call:
        into, value = buffers()
        return partial(into.add_, value, alpha=scale)

    compiled = _compiled(lambda into, value: into.add_(value, alpha=scale))
    return {
        "zgraph accumulate": lambda: partial(zk.accumulate, *buffers(), scale),
        "Tensor.add_": add,
        "torch.compile(add_)": lambda: partial(compiled, *buffers()),
    }


# adamw_flat: the step over a flat fp32 shard, and its bf16 copy for the next gather.

ADAMW: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}


def _adamw_by_hand(
    param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor, low: Tensor
) -> None:
    """What Inductor can fuse into one kernel."""
    step.add_(1)
    mean.lerp_(grad, 0.1)
    square.mul_(0.999).addcmul_(grad, grad, value=0.001)
    root = square.sqrt() / (1 - 0.999**step).sqrt() + ADAMW["eps"]
    param.mul_(1 - ADAMW["lr"] * ADAMW["weight_decay"])
    param.sub_(ADAMW["lr"] / (1 - 0.9**step) * mean / root)
    low.copy_(param)


def adamw(size: Size) -> dict[str, Callable[[], Call]]:
    numel = size.shard_numel

    def zgraph() -> Call:
        param, grad, mean, square = (_random(numel, FP32).abs() for _ in range(4))
        step, low = torch.ones((), device="cuda"), torch.empty(numel, device="cuda", dtype=BF16)

        def call() -> None:
            step.add_(1)
            zk.adamw_flat(param, grad, mean, square, step, low, **ADAMW)

        return call

    compiled = _compiled(_adamw_by_hand)

    def by_hand() -> Call:
        buffers = [_random(numel, FP32).abs() for _ in range(4)]
        step, low = torch.ones((), device="cuda"), torch.empty(numel, device="cuda", dtype=BF16)
        return partial(compiled, *buffers, step, low)

    def optimizer_and_cast(**kind: bool) -> Call:
        param = torch.nn.Parameter(_random(numel, FP32))
        param.grad = _random(numel, FP32)
        low = torch.empty(numel, device="cuda", dtype=BF16)
        optimizer = torch.optim.AdamW([param], **ADAMW, **kind)
        optimizer.step()

        @torch.no_grad()
        def call() -> None:
            optimizer.step()
            low.copy_(param)

        return call

    return {
        "zgraph adamw_flat": zgraph,
        "fused AdamW + cast": lambda: optimizer_and_cast(fused=True),
        "torch.compile(AdamW and cast by hand)": by_hand,
        "foreach AdamW + cast": lambda: optimizer_and_cast(foreach=True),
    }


# quantize, dequantize: a flat fp32 shard to blocks of 256, and back to bf16.


def quantize(size: Size, bits: int) -> dict[str, Callable[[], Call]]:
    from zgraph_kernels.quantize import op

    definition = _compiled(_definition("reference"))
    numel = size.shard_numel
    return {
        "zgraph quantize": lambda: partial(op, _random(numel, FP32), bits, 256),
        "torch.compile(the definition)": lambda: partial(
            definition, _random(numel, FP32), bits, 256
        ),
    }


def dequantize(size: Size, bits: int) -> dict[str, Callable[[], Call]]:
    from zgraph_kernels.quantize import dequantize_op, op

    definition = _compiled(_definition("dequantize_reference"))
    numel = size.shard_numel

    def arguments() -> tuple[Any, ...]:
        return (*op(_random(numel, FP32), bits, 256), numel, bits, 256, BF16)

    return {
        "zgraph dequantize": lambda: partial(dequantize_op, *arguments()),
        "torch.compile(the definition)": lambda: partial(definition, *arguments()),
    }


def _definition(name: str) -> Callable[..., Any]:
    from importlib import import_module

    return getattr(import_module("zgraph_kernels.quantize"), name)


@dataclass(frozen=True)
class Task:
    """What contenders do, and the bytes that it must read and write, each counted once."""

    contenders: Callable[[Size], dict[str, Callable[[], Call]]]
    call_bytes: Callable[[Size], float]


TASKS: dict[str, Task] = {
    "pack shards": Task(pack_shards, lambda size: 6 * size.shard_numel),
    "pack gradients": Task(pack_gradients, lambda size: 6 * size.numel),
    "chunk_cat": Task(chunk_cat, lambda size: 6 * size.numel),
    "unpack": Task(unpack, lambda size: 4 * size.numel),
    "accumulate fp32": Task(partial(accumulate, dtype=FP32), lambda size: 12 * size.shard_numel),
    "accumulate bf16": Task(partial(accumulate, dtype=BF16), lambda size: 10 * size.shard_numel),
    "adamw_flat": Task(adamw, lambda size: 30 * size.shard_numel),
    "quantize int8": Task(partial(quantize, bits=8), lambda size: (5 + 4 / 256) * size.shard_numel),
    "quantize int4": Task(
        partial(quantize, bits=4), lambda size: (4.5 + 4 / 256) * size.shard_numel
    ),
    "dequantize int8": Task(
        partial(dequantize, bits=8), lambda size: (3 + 4 / 256) * size.shard_numel
    ),
    "dequantize int4": Task(
        partial(dequantize, bits=4), lambda size: (2.5 + 4 / 256) * size.shard_numel
    ),
}
SIZES = [Size(model, ranks) for model in BLOCKS for ranks in (2, 8)]
