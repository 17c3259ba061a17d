"""Training runs and their comparison: plain PyTorch, zgraph, and FSDP2, on the models of the zoo.

The functions whose names end in `_rank` run on every rank of the pool.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zgraph as zg
from tests.support.models import Batch, batches, build
from zgraph.backends.base import BackendName

STEPS = 5
LR = 5e-3
# Not Adam's 1e-8: where a gradient is as small as rounding, Adam would turn that rounding into
# steps of the full learning rate. Plain PyTorch itself, adding up a batch's gradients in parts,
# moves one of a Llama's tensors by 2e-4 at 1e-8, and none by 1e-6 at 1e-5.
EPS = 1e-5


@dataclass(frozen=True)
class Run:
    """What a training run leaves: each step's loss, then all parameters and buffers, whole."""

    losses: list[float]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def train(model: nn.Module, data: Iterable[Batch]) -> Run:
    """One AdamW step a batch."""

    def step(batch: Batch) -> Tensor:
        loss = model(*batch)
        loss.backward()
        return loss

    return train_by(step, model, data)


def train_by(step: Callable[[Any], Tensor], model: nn.Module, data: Iterable[Any]) -> Run:
    """One AdamW step for each item of `data`; `step` runs forward and backward on it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, eps=EPS)
    losses = []
    for item in data:
        losses.append(step(item).item())
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, whole_parameters(model), dict(model.named_buffers()))


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter as a plain whole tensor. All ranks must call it."""
    return {name: _whole(p) for name, p in model.named_parameters()}


def _whole(parameter: nn.Parameter) -> Tensor:
    full = getattr(parameter, "full_tensor", None)
    return (full() if full else parameter).detach().clone()


@cache
def plain_run(name: str, steps: int = STEPS) -> Run:
    """The reference: one process, the whole batch, nothing compiled."""
    return train(build(name), batches(name, steps))


def mesh_of(shape: Sequence[int] | None = None) -> DeviceMesh:
    """A CPU mesh: all ranks on the axis "shard", or two axes "replicate" and "shard"."""
    if shape is None:
        return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicate", "shard"))


def own_batches(name: str, steps: int = STEPS) -> list[Batch]:
    """This rank's batches."""
    return batches(name, steps, dist.get_rank(), dist.get_world_size())


def zgraph_rank(
    name: str,
    passes: Sequence[zg.Pass],
    shape: Sequence[int] | None = None,
    backend: BackendName = "aot_eager",
) -> Run:
    """Train with zgraph."""
    model = zg.compile(build(name), passes, mesh=mesh_of(shape), backend=backend)
    return train(model, own_batches(name))


def fsdp2_rank(
    name: str,
    units: type[nn.Module],
    policy: MixedPrecisionPolicy,
    reshard: bool,
    shape: Sequence[int] | None = None,
) -> Run:
    """Train with FSDP2: each module of class `units` and the root are its units."""
    model, mesh = build(name), mesh_of(shape)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard}
    for module in list(model.modules()):
        if isinstance(module, units):
            fully_shard(module, **options)
    fully_shard(model, **options)
    return train(model, own_batches(name))


# ------------------------------------------------------------------ comparing


def assert_same_bits(one: Run, other: Run) -> None:
    """Both runs have the same losses, parameters and buffers, bit for bit."""
    assert one.losses == other.losses
    for kind in ("parameters", "buffers"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            worst = distance(value, theirs[name])
            assert _same(value, theirs[name]), f"{name} differs, relative distance {worst:.1e}"


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_close(one: Run, other: Run, relative: float) -> None:
    """Losses differ by at most `relative` of their value, tensors of their 2-norm."""
    for step, (mine, theirs) in enumerate(zip(one.losses, other.losses, strict=True)):
        error = abs(mine - theirs) / abs(theirs)
        assert error <= relative, f"loss of step {step}: {mine} is not {theirs}: {error:.1e}"
    for kind in ("parameters", "buffers"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.dtype == theirs[name].dtype, name
            error = distance(value, theirs[name])
            assert error <= relative, f"{name}: relative distance {error:.1e}"


def distance(one: Tensor, other: Tensor) -> float:
    """2-norm of the difference, relative to that of `other`."""
    assert one.shape == other.shape
    difference = (one.double() - other.double()).norm()
    return (difference / other.double().norm().clamp(min=1e-30)).item()


def mean_run(runs: Sequence[Run]) -> Run:
    """All ranks' run as one: the mean of their losses, and the tensors that all must share."""
    first = replace(runs[0], losses=[])
    for run in runs[1:]:
        assert_same_bits(replace(run, losses=[]), first)
    losses = [sum(step) / len(runs) for step in zip(*(run.losses for run in runs), strict=True)]
    return Run(losses, runs[0].parameters, runs[0].buffers)
