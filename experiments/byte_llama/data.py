"""Training text that every machine has: the sources of Python's own standard library, as bytes."""

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SEPARATOR = 256
"""The token between two files; 0 to 255 are the byte values."""

CORPUS_BYTES = 8 * 2**20
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})
"""What other packages installed, and test data that is not written to be read."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, int64 [batch, length] each; targets are the tokens one place later."""


def source_files() -> list[Path]:
    """The standard library's `.py` files, in one order on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in relative if SKIPPED_FOLDERS.isdisjoint(path.parts)]
    if not kept:
        raise FileNotFoundError(
            f"no .py files under {root}: this Python was installed without its sources; "
            "run with another one"
        )
    return [root / path for path in sorted(kept, key=Path.as_posix)]


@cache
def corpus(limit_bytes: int = CORPUS_BYTES) -> Tensor:
    """The files one after another, each followed by `SEPARATOR`; int16 [about `limit_bytes`]."""
    parts: list[Tensor] = []
    left = limit_bytes
    for path in source_files():
        text = bytearray(path.read_bytes()[:left])
        if text:
            parts.append(torch.frombuffer(text, dtype=torch.uint8).to(torch.int16))
            parts.append(torch.tensor([SEPARATOR], dtype=torch.int16))
        left -= len(text)
        if left <= 0:
            break
    return torch.cat(parts)


def batches(seed: int, batch: int, length: int) -> Iterator[Batch]:
    """Endless batches of windows drawn from the corpus; one seed gives one sequence."""
    text = corpus()
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(length + 1)
    while True:
        start = torch.randint(len(text) - length, (batch, 1), generator=generator)
        rows = text[start + window].long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def slice_of_rank(batch: Batch, rank: int, world: int) -> Batch:
    """This rank's rows of a global batch; the batch size is a multiple of `world`."""
    rows = batch[0].shape[0]
    if rows % world:
        raise ValueError(f"{world} ranks do not divide a batch of {rows}")
    mine = slice(rank * rows // world, (rank + 1) * rows // world)
    return batch[0][mine], batch[1][mine]
