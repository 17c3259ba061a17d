"""A small, plain Llama: RMSNorm, rotary positions, SwiGLU, causal attention.

Written as a researcher would write it: nothing here knows that it will be sharded. Every module
with parameters or buffers of its own has `reset_parameters`, so that a model built under
`torch.device("meta")` can be given memory later and then initialised module by module.

Axis letters in shapes: B batch, L length, D model width, H heads, K head width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

BYTE_VOCAB = 264
"""256 byte values and one separator, rounded up to a multiple of 8."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a `Llama`."""

    vocab: int = BYTE_VOCAB
    dim: int = 96
    layers: int = 8
    heads: int = 4
    ffn: int = 256
    max_length: int = 128
    rope_base: float = 10_000.0
    tied: bool = False
    """Whether the output projection is the token embedding itself. `Module.to_empty` gives each
    name a tensor of its own: tie them again after it."""

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim {self.dim} over {self.heads} heads leaves no even head width, and rotary "
                f"positions turn pairs; make dim a multiple of {2 * self.heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @classmethod
    def demo(cls) -> Self:
        """0.91 million parameters, tied. A step of 2,048 tokens takes 0.15 s on two CPU cores.

        Deep and narrow, so that one block is a small part of the whole, as it is in a large model.
        """
        return cls(tied=True)

    @classmethod
    def benchmark(cls, max_length: int = 4096) -> Self:
        """0.95 billion parameters, 16 alike blocks of 51 million each."""
        return cls(
            vocab=32_000, dim=2048, layers=16, heads=16, ffn=5632, max_length=max_length, tied=False
        )


class Linear(nn.Linear):
    """A projection without bias, drawn so that it keeps the variance of what it is given."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)


class Embedding(nn.Embedding):
    """A token table, drawn like `Linear` so that it can serve as the output projection too."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class Rope(nn.Module):
    """Rotary positions: turns each pair of a head's channels by an angle that grows with position.

    The tables are fp32 whatever the model's dtype is: at position 4,000 the nearest bf16 value is
    up to 8 positions away. They are no part of the state dict, since the configuration gives them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.length, self.base = config.head_dim, config.max_length, config.rope_base
        shape = (self.length, self.head_dim // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables, fp32 [max_length, K / 2], where the present ones lie."""
        device = self.cos.device
        pair = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        position = torch.arange(self.length, dtype=torch.float64, device=device)
        angle = torch.outer(position, self.base ** (-pair / self.head_dim))
        self.cos, self.sin = angle.cos().float(), angle.sin().float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.to(torch.bfloat16)` comes through here and would round the tables; what it moved
        # to another device is computed there afresh instead.
        super()._apply(fn, recurse)
        self.reset_parameters()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Turn queries or keys [B, H, L, K]; computes in fp32, returns the dtype it was given."""
        length = x.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, rope: Rope) -> None:
        super().__init__()
        self.heads = config.heads
        self.rope = rope
        self.wq = Linear(config.dim, config.dim)
        self.wk = Linear(config.dim, config.dim)
        self.wv = Linear(config.dim, config.dim)
        self.wo = Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        q, k, v = (
            rearrange(projection(x), "b l (h k) -> b h l k", h=self.heads)
            for projection in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True)
        return self.wo(rearrange(y, "b h l k -> b l (h k)"))


class FeedForward(nn.Module):
    """SwiGLU: a gated two-layer perceptron."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.ffn)
        self.up = Linear(config.dim, config.ffn)
        self.down = Linear(config.ffn, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then the perceptron, each behind a norm and added to what came in."""

    def __init__(self, config: LlamaConfig, rope: Rope) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config, rope)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """The whole model: tokens to logits, or to the mean loss where targets are given."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocab, config.dim)
        # One set of tables for all blocks. They are reached as a module and not passed to `Block`
        # as an argument: FSDP2's mixed precision casts floating-point arguments.
        rope = Rope(config)
        self.layers = nn.ModuleList(Block(config, rope) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = Linear(config.dim, config.vocab)
        if config.tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens int64 [B, L] -> logits [B, L, V]; with targets int64 [B, L] -> loss fp32 []."""
        x = self.tokens(tokens)
        for block in self.layers:
            x = block(x)
        logits = self.output(self.norm(x))
        if targets is None:
            return logits
        rows = rearrange(logits, "b l v -> (b l) v")
        return F.cross_entropy(rows.float(), rearrange(targets, "b l -> (b l)"))


def parameter_count(model: nn.Module) -> int:
    """Number of distinct parameter elements; a tied weight counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
