"""What lies on several ranks is equal on them, however differently the ranks were seeded."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph as zg
from tests.runtime.ranks import Shapes, assert_equal, build, on_ranks, random_like, shard, whole


def of_all_ranks(tensor: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return gathered


def own_seed(make: type[nn.Module]) -> nn.Module:
    """The model as a rank builds it that has a seed of its own."""
    return build(make, seed=100 + dist.get_rank())


def assert_alike(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        values = of_all_ranks(whole(p))
        assert all(value.equal(values[0]) for value in values), name


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for seed in range(3):
        x = random_like([torch.empty(4, 5)], seed + 10 * dist.get_rank())[0]
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, 3)
def test_persistent_parameters_are_the_first_ranks() -> None:
    model = shard(own_seed(Shapes), zg.Persist(10**6))
    assert_equal(list(model.parameters()), list(build(Shapes, seed=100).parameters()))
    for p in model.parameters():
        pieces = of_all_ranks(p.to_local())
        assert all(piece.equal(pieces[0]) for piece in pieces)


@on_ranks(2)
def test_persistent_parameters_stay_equal_while_training() -> None:
    model = shard(own_seed(Shapes), zg.Persist(7))
    train(model)
    for p in model.parameters():
        if p.numel() <= 7:
            pieces = of_all_ranks(p.to_local())
            assert pieces[0].equal(pieces[1])
    assert_alike(model)


@on_ranks(4)
def test_repeated_shards_are_equal_from_the_start_and_stay_so() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for passes in ((), (zg.Persist(7),)):
        model = shard(own_seed(Shapes), zg.Partition(replicate="replicate"), *passes, mesh=mesh)
        assert_alike(model)
        train(model)
        assert_alike(model)
        for p in model.parameters():
            pieces: list[Tensor] = [torch.empty(0)] * 4
            dist.all_gather_object(pieces, p.to_local())
            assert pieces[0].equal(pieces[2]) and pieces[1].equal(pieces[3])


@on_ranks(4)
def test_repeated_shards_hold_half_of_each_parameter() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    once = shard(build(Shapes), zg.Partition(replicate="replicate"), mesh=mesh)
    assert_equal(list(once.parameters()), list(build(Shapes).parameters()))
    counts = torch.tensor([sum(p.to_local().numel() for p in once.parameters())])
    dist.all_reduce(counts)
    assert counts.item() == 2 * sum(p.numel() for p in once.parameters())


@on_ranks(4)
def test_the_order_of_the_axes_in_the_mesh_does_not_matter() -> None:
    x = torch.randn(4, 5)
    plain = build(Shapes)
    plain(x).square().mean().backward()
    for names in (("replicate", "shard"), ("shard", "replicate")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = shard(build(Shapes), zg.Partition(replicate="replicate"), zg.Persist(1), mesh=mesh)
        model(x).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(whole(p.grad), q.grad)
