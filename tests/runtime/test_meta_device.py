"""Models built on the meta device are filled unit by unit, by their own `reset_parameters`."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zgraph as zg
from tests.runtime.ranks import build, mesh_of_all, on_ranks, shard, whole

WIDTH = 64
A_MESH = 64  # bytes that slicing a device mesh may leave behind


class Layer(nn.Linear):
    """Fills itself with its own number and counts how often it is asked to."""

    def __init__(self, number: int) -> None:
        self.number, self.resets = number, -1
        super().__init__(WIDTH, WIDTH)

    def reset_parameters(self) -> None:
        self.resets += 1
        nn.init.constant_(self.weight, self.number)
        nn.init.constant_(self.bias, -self.number)


class Table(nn.Module):
    """A buffer to fill, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ramp", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.ramp = torch.arange(float(WIDTH), device=self.ramp.device)


class Deep(nn.Module):
    """Six layers of 4,160 elements each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.layers = nn.ModuleList(Layer(number + 1) for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table.ramp
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Tied(nn.Module):
    """The head is the embedding, so it is filled once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def on_meta(make: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@on_ranks(2)
def test_each_module_fills_its_parameters_and_buffers_once() -> None:
    model = shard(on_meta(Deep))
    for number, layer in enumerate(model.layers, start=1):
        assert layer.resets == 1
        held = dict(layer.named_parameters())
        assert whole(held["weight"]).eq(number).all() and whole(held["bias"]).eq(-number).all()
    assert model.table.ramp.equal(torch.arange(float(WIDTH)))
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


@on_ranks(2)
def test_it_trains_as_the_model_built_on_the_device_does() -> None:
    x = torch.randn(3, WIDTH)
    for passes in ((), (zg.Group.whole(),), (zg.Persist(WIDTH), zg.MixedPrecision())):
        meta, plain = shard(on_meta(Deep), *passes), build(Deep)
        meta(x).sum().backward()
        plain(x).sum().backward()
        for p, q in zip(meta.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad)


@on_ranks(2)
def test_tied_parameters_stay_one_and_are_equal_on_all_ranks() -> None:
    model = shard(on_meta(Tied), zg.Group.by_name([["embed"], ["head.bias"]]))
    named = dict(model.named_parameters(remove_duplicate=False))
    assert named["head.weight"] is named["embed.weight"]
    full = whole(named["embed.weight"])
    gathered = [torch.empty_like(full) for _ in range(2)]
    torch.distributed.all_gather(gathered, full)
    assert gathered[0].equal(gathered[1]) and full.isfinite().all() and full.std() > 0


class Residence(TorchDispatchMode):
    """Bytes of the real storages that ops make, and of those it is told of: now, and at most."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in tensors:
            self.watch(tensor)
        self.start = self.peak = self.now()

    def watch(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu" and type(tensor) is not zg.ShardedParameter:
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def now(self) -> int:
        return sum(size for reference, size in self.storages.values() if not reference.expired())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
        self.peak = max(self.peak, self.now())
        return result


@pytest.mark.parametrize("per_unit", [1, 2])
@on_ranks(2)
def test_sharding_never_holds_more_than_the_shards_and_one_unit(per_unit: int) -> None:
    model = on_meta(Deep)
    names = [f"layers.{i}" for i in range(6)]
    groups = zg.Group.by_name([names[i : i + per_unit] for i in range(0, 6, per_unit)])
    mesh = mesh_of_all()
    with Residence() as residence:
        shard(model, groups, mesh=mesh)
    report = zg.inspect(model)
    unit_bytes = max(row.gathered_bytes for row in report.units())
    buffers = sum(b.nbytes for b in model.buffers())
    assert residence.peak <= report.shard_bytes + unit_bytes + buffers + A_MESH
    assert 0 <= residence.now() - report.shard_bytes - buffers <= A_MESH


@on_ranks(2)
def test_a_real_model_is_freed_as_it_is_sharded() -> None:
    model, mesh = build(Deep), mesh_of_all()
    with Residence(model.parameters()) as residence:
        shard(model, zg.Group.by_class(Layer), mesh=mesh)
        made = residence.now()
    report = zg.inspect(model)
    # One unit's shard is allocated before the unit itself is freed, and never more than that.
    assert residence.start == 6 * (WIDTH + 1) * WIDTH * 4
    most = residence.start + max(row.shard_bytes for row in report.units())
    assert most <= residence.peak <= most + A_MESH
    assert report.shard_bytes <= made <= report.shard_bytes + A_MESH
