"""zg.capture: the graphs of a real run, without ranks, without data, the model left as it was."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph as zg
from tests.capture.steps import captured, frozen_tower, small_tower, tied_tower
from tests.passes.toys import Block, Tower
from tests.support.pool import run_ranks
from zgraph._torch import detect_fake_mode
from zgraph.ir import ops

TOKENS = torch.arange(8).view(2, 4)
PASSES = (zg.Partition(), zg.Group.by_class(Block), zg.Prefetch(1))
HSDP = (zg.Partition(replicate="replicate"), *PASSES[1:])


@cache
def offline(make: Callable[[], nn.Module], *passes: zg.Pass, world_size: int = 2) -> zg.Captured:
    """One capture of a model of tokens for all tests that only read it."""
    return zg.capture(make(), (TOKENS,), passes=passes, world_size=world_size)


def notes(graph: zg.Graph) -> list[str]:
    return [line.split(": ", 1)[1] for line in zg_collectives(graph)]


def zg_collectives(graph: zg.Graph) -> list[str]:
    from zgraph.ir import show

    return show.collectives(graph)
