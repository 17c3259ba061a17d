"""Tests that run on several ranks, and the models they shard."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zgraph as zg
from tests.support.pool import run_ranks


def on_ranks(*world_sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test run on that many ranks, once for each of the sizes; arguments are sent along.

    It is found by name on the ranks, where a process group exists, and there it runs itself.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            if dist.is_initialized():
                test(*args, **kwargs)
                return
            for size in world_sizes:
                run_ranks(_call, size, test.__module__, test.__name__, args, kwargs)

        return run

    return decorate


def _call(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from importlib import import_module

    getattr(import_module(module), name)(*args, **kwargs)


class Shapes(nn.Module):
    """Parameters of many shapes: some smaller than the number of ranks, one empty, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(5, 3))
        self.vector = nn.Parameter(torch.randn(7))
        self.one = nn.Parameter(torch.randn(1))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.cube = nn.Parameter(torch.randn(3, 2, 11))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 5] -> [B, 3]."""
        return x @ self.matrix * self.one + self.vector[:3] * self.scalar + self.cube.sum()


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same model on every rank."""
    torch.manual_seed(seed)
    return make()


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def shard(model: nn.Module, *passes: zg.Pass, mesh: DeviceMesh | None = None) -> nn.Module:
    """The model over all ranks; passes may start with a `Partition` of one's own."""
    if not any(isinstance(item, zg.Partition) for item in passes):
        passes = (zg.Partition(), *passes)
    return zg.compile(model, passes, mesh=mesh or mesh_of_all(), backend="aot_eager")


def whole(value: Tensor) -> Tensor:
    """A plain copy of the whole of a parameter, a gradient or an optimizer's state."""
    plain = value.full_tensor() if isinstance(value, zg.ShardedParameter) else value
    return plain.detach().clone()


def wholes(values: Sequence[Tensor]) -> list[Tensor]:
    return [whole(value) for value in values]


def random_like(parameters: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Plain random tensors of the parameters' global shapes, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Same values, bit for bit, whether sharded or not."""
    for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        value = whole(mine)
        assert value.equal(whole(theirs)), f"tensor {index} differs: {value} is not {theirs}"
