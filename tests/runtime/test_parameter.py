"""ShardedParameter: looks like the whole parameter, holds one piece of it."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph as zg
from tests.runtime.ranks import Shapes, assert_equal, build, mesh_of_all, on_ranks, shard, whole


@on_ranks(2, 3)
def test_it_has_the_shape_dtype_and_dimensions_of_the_whole() -> None:
    plain = dict(build(Shapes).named_parameters())
    sharded = dict(shard(build(Shapes), zg.Persist(max_numel=1)).named_parameters())
    assert list(sharded) == list(plain)
    for name, p in sharded.items():
        q = plain[name]
        assert isinstance(p, zg.ShardedParameter) and isinstance(p, nn.Parameter)
        for trait in ("shape", "dtype", "ndim", "requires_grad", "is_leaf", "device", "layout"):
            assert getattr(p, trait) == getattr(q, trait), (name, trait)
        assert (p.dim(), p.numel(), p.stride()) == (q.dim(), q.numel(), q.stride())
        assert p.element_size() == q.element_size()


@on_ranks(2)
def test_it_shows_its_name_shape_and_which_part_it_holds() -> None:
    shown = repr(dict(shard(build(Shapes), zg.Persist(1)).named_parameters()))
    for words in (
        "ShardedParameter(matrix, shape=[5, 3], dtype=torch.float32",
        "cube, shape=[3, 2, 11]",
    ):
        assert words in shown
    assert ("elements 0..15" in shown) == (dist.get_rank() == 0)
    assert shown.count("whole") == 3  # one, scalar, empty


@on_ranks(2, 3)
def test_pieces_of_all_ranks_are_the_whole() -> None:
    plain = build(Shapes)
    for p, q in zip(shard(build(Shapes)).parameters(), plain.parameters(), strict=True):
        pieces: list[Tensor] = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(pieces, p.to_local())
        assert torch.cat(pieces).equal(q.detach().flatten())
        assert p.full_tensor().equal(q)
        assert type(p.full_tensor()) is Tensor and not p.full_tensor().requires_grad


@on_ranks(2)
def test_a_persistent_parameter_is_whole_on_every_rank() -> None:
    plain = build(Shapes)
    for p, q in zip(
        shard(build(Shapes), zg.Persist(10**6)).parameters(), plain.parameters(), strict=True
    ):
        assert p.to_local().view(p.shape).equal(q)
        assert p.full_tensor().equal(q)


@on_ranks(2)
def test_writing_to_the_piece_changes_the_model() -> None:
    p = dict(shard(build(Shapes)).named_parameters())["cube"]
    p.to_local().fill_(7.0)
    assert p.full_tensor().equal(torch.full((3, 2, 11), 7.0))


@on_ranks(2)
def test_whole_tensors_are_copies() -> None:
    model = shard(build(Shapes), zg.Persist(1))
    before = [whole(p) for p in model.parameters()]
    for p in model.parameters():
        p.full_tensor().zero_()
    assert_equal(list(model.parameters()), before)


def groups(model: nn.Module) -> list[set[str]]:
    """The usual rule: weight decay for matrices only."""
    names = {True: set(), False: set()}
    for name, parameter in model.named_parameters():
        names[parameter.dim() >= 2].add(name)
    return [names[True], names[False]]


@on_ranks(2)
def test_rules_by_dimension_find_the_same_groups() -> None:
    assert groups(shard(build(Shapes))) == groups(build(Shapes))


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "add itself": lambda p: p + p,
    "add a number": lambda p: 2 - p,
    "multiply by a 0-dim tensor": lambda p: p * torch.tensor(3.0),
    "add a whole tensor": lambda p: p + torch.arange(15.0).view(5, 3),
    "a whole tensor first": lambda p: torch.arange(15.0).view(5, 3) - p,
    "clamp": lambda p: p.clamp(-0.5, 0.5),
    "where": lambda p: torch.where(p > 0, p, -p),
    "compare": lambda p: p > 0,
    "convert": lambda p: p.double(),
    "clone and detach": lambda p: p.clone().detach(),
    "like": lambda p: torch.zeros_like(p) + torch.ones_like(p) + torch.full_like(p, 2.0),
    "in place": lambda p: p.detach().clone().mul_(2).add_(p, alpha=3).sqrt_().nan_to_num_(),
    "foreach": lambda p: torch._foreach_mul([p, p], 2.0)[1],
}


@on_ranks(2)
def test_elementwise_ops_run_on_the_pieces() -> None:
    sharded, plain = shard(build(Shapes)).state_dict()["matrix"], build(Shapes).matrix.detach()
    for name, use in ELEMENTWISE.items():
        result = use(sharded)
        assert isinstance(result, zg.ShardedParameter), name
        assert_equal([result], [use(plain)])


NEED_THE_WHOLE: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "matrix product": (lambda p: p @ torch.ones(3, 3), "aten.mm"),
    "linear": (lambda p: nn.functional.linear(torch.ones(2, 3), p), "aten.t"),
    "indexing": (lambda p: p[0], "aten.select"),
    "slicing": (lambda p: p[1:], "aten.slice"),
    "assigning to an index": (lambda p: p.detach().__setitem__(0, 1.0), "aten."),
    "view": (lambda p: p.view(-1), "aten.view"),
    "reshape": (lambda p: p.reshape(3, 5), "aten.view"),
    "flatten": (lambda p: p.flatten(), "aten.view"),
    "transpose": (lambda p: p.T, "aten."),
    "sum over a dimension": (lambda p: p.sum(0), "aten.sum.dim_IntList"),
    "mean over a dimension": (lambda p: p.mean(1), "aten.mean.dim"),
    "norm over a dimension": (lambda p: p.norm(dim=0), "aten.linalg_vector_norm"),
    "maximum over a dimension": (lambda p: p.max(0), "aten.max.dim"),
    "standard deviation": (lambda p: p.std(), "aten.std"),
    "concatenation": (lambda p: torch.cat([p, p]), "aten.cat"),
    "softmax": (lambda p: p.softmax(0), "aten._softmax"),
    "sort": (lambda p: p.sort(), "aten.sort"),
    "broadcasting": (lambda p: p + torch.ones(3), "aten.add.Tensor"),
    "drawing": (lambda p: p.detach().normal_(), "aten.normal_"),
    "copying out": (lambda p: torch.ones(5, 3).copy_(p.detach()), "aten.copy_"),
    "adding to a plain tensor": (lambda p: torch.ones(5, 3).add_(p.detach()), "aten.add_"),
}


@on_ranks(2)
def test_other_ops_raise_and_name_op_parameter_and_cure() -> None:
    parameter = dict(shard(build(Shapes)).named_parameters())["matrix"]
    for name, (use, op) in NEED_THE_WHOLE.items():
        message = ""
        try:
            use(parameter)
        except zg.WholeTensorError as error:
            message = str(error)
        assert op in message and "matrix" in message and "full_tensor()" in message, name


@on_ranks(2)
def test_parameters_that_are_split_differently_do_not_mix() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    first, second = shard(Pair()).parameters()
    with pytest.raises(zg.WholeTensorError, match=r"first and second are split differently"):
        first + second


@on_ranks(2)
def test_assigning_data_copies_into_the_shard() -> None:
    p = dict(shard(build(Shapes)).named_parameters())["matrix"]
    p.data = torch.full((5, 3), 2.0)
    p.data.add_(1)
    assert p.full_tensor().equal(torch.full((5, 3), 3.0))
    assert p.data.requires_grad is False


@on_ranks(2)
def test_what_the_plan_has_fixed_cannot_be_changed() -> None:
    p = dict(shard(build(Shapes)).named_parameters())
    p["matrix"].requires_grad_(True)
    p["frozen"].requires_grad_(False)
    for name, wanted in (("matrix", False), ("frozen", True)):
        with pytest.raises(
            zg.WholeTensorError, match=rf"{name}: requires_grad is part of the plan"
        ):
            p[name].requires_grad_(wanted)


@on_ranks(2)
def test_what_would_silently_do_nothing_is_refused() -> None:
    model = shard(build(Shapes))
    p = dict(model.named_parameters())["matrix"]
    for register in (p.register_hook, p.register_post_accumulate_grad_hook):
        with pytest.raises(zg.WholeTensorError, match=r"matrix: .*hooks"):
            register(lambda grad: grad)
    with pytest.raises(zg.WholeTensorError, match="shared memory"):
        model.share_memory()
    with pytest.raises(zg.ModelError, match=r"matrix is sharded.*copy_"):
        model.matrix = nn.Parameter(torch.ones(5, 3))


@on_ranks(2)
def test_copying_a_model_raises_and_says_what_to_copy_instead() -> None:
    model = shard(build(Shapes))
    with pytest.raises(zg.WholeTensorError, match=r"matrix: a model cannot be copied.*full_tensor"):
        copy.deepcopy(model)
    gradient_like = torch.zeros_like(dict(model.named_parameters())["matrix"])
    assert_equal([copy.deepcopy(gradient_like)], [torch.zeros(5, 3)])


class Buffered(nn.Module):
    """A sharded layer among buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3))
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)


@on_ranks(2)
def test_a_move_to_where_the_model_is_changes_nothing() -> None:
    model = shard(build(Buffered))
    before = [(p, p.to_local().data_ptr()) for p in model.parameters()]
    for same in (model.to("cpu"), model.cpu(), model.float(), model.to(torch.float32)):
        assert same is model
    now = [(p, p.to_local().data_ptr()) for p in model.parameters()]
    assert all(a is b and x == y for (a, x), (b, y) in zip(before, now, strict=True))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, "meta"])
@on_ranks(2)
def test_a_conversion_raises_and_names_the_parameter(kind: torch.dtype | str) -> None:
    model = shard(build(Buffered))
    with pytest.raises(zg.ModelError, match=r"layer\.weight: would become .*MixedPrecision"):
        model.to(kind)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@on_ranks(2)
def test_functional_call_computes_with_the_tensors_it_is_given() -> None:
    mesh = mesh_of_all()
    model = shard(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), mesh=mesh)
    given = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    x = torch.randn(5, 3)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    expected = torch.func.functional_call(plain, given, x)
    assert torch.func.functional_call(model, given, x).equal(expected)
    leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
    torch.func.functional_call(model, leaves, x).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves.values())
    assert all(isinstance(p, zg.ShardedParameter) and p.grad is None for p in model.parameters())
