"""One training step of a small model on two ranks, and the records of the graphs it left."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph as zg
from tests.passes.toys import Tower
from tests.support.pool import run_ranks
from zgraph.frames import Frame, GraphRecord
from zgraph.layout import Layout

Passes = tuple[zg.Pass, ...]


@dataclass(frozen=True)
class Captured:
    """What one rank's graphs do: buffer names per kind of collective, peak bytes, text."""

    forward: GraphRecord
    backward: GraphRecord
    plan: zg.Plan
    layout: Layout

    @property
    def report(self) -> zg.Report:
        """The report of the step."""
        return zg.Report(self.plan, self.layout, (Frame(graphs=[self.forward, self.backward]),))


def tower() -> nn.Module:
    """Four blocks between an embedding and a norm with head."""
    return Tower(depth=4, width=8)


def small_tower() -> nn.Module:
    return Tower(depth=2, width=8)


def tied_tower() -> nn.Module:
    """A tower whose head is its embedding."""
    model = Tower(depth=4, width=8)
    model.head.weight = model.embed.weight
    return model


def frozen_tower() -> nn.Module:
    """A tower with a frozen embedding, a frozen block, and a frozen bias in another block."""
    model = Tower(depth=4, width=8)
    model.embed.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    model.layers[2].up.bias.requires_grad_(False)
    return model


def compiled(make: Callable[[], nn.Module], passes: Passes) -> nn.Module:
    """The model on a mesh of all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("shard",))
    return zg.compile(make(), passes, mesh=mesh, backend="aot_eager", fullgraph=True)


def step(model: nn.Module) -> None:
    """Forward and backward on a few tokens."""
    model(torch.arange(8).view(2, 4)).square().mean().backward()


def capture_one_step(make: Callable[[], nn.Module], passes: Passes) -> Captured:
    """Runs on a rank. Checks that the step is one forward and one backward graph."""
    model = compiled(make, passes)
    step(model)
    report = zg.inspect(model)
    (forward,), (backward,) = report.graphs("forward"), report.graphs("backward")
    return Captured(forward, backward, report.plan, report.layout)


@cache
def captured(make: Callable[[], nn.Module], *passes: zg.Pass) -> Captured:
    """The first rank's graphs of one step on two ranks; the passes follow `Partition`."""
    return captured_on_all(make, *passes)[0]


@cache
def captured_on_all(make: Callable[[], nn.Module], *passes: zg.Pass) -> list[Captured]:
    """Every rank's graphs of one step on two ranks."""
    return run_ranks(capture_one_step, 2, make, (zg.Partition(), *passes))
