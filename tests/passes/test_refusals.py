"""What cannot work is refused before the model is touched, with the cure in the message."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zgraph as zg
from tests.passes.toys import Block, Tower


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which the other is only pretended."""
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def snapshot(model: nn.Module) -> list[tuple[Any, ...]]:
    """Everything that zg.compile could change, by identity."""
    return [
        (
            name,
            id(module),
            type(module),
            {key: id(value) for key, value in module._parameters.items()},
            {key: id(value) for key, value in module._buffers.items()},
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            sorted(module.__dict__),
            module._compiled_call_impl,
        )
        for name, module in model.named_modules()
    ]


def real_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that have values to change."""
    lazy = nn.parameter.UninitializedParameter
    return [p for p in model.parameters() if not (isinstance(p, lazy) or p.is_meta)]


def refused(model: nn.Module, passes: list[Any], **options: Any) -> str:
    """The message with which `zg.compile` refuses; checks that the model is as it was."""
    before, values = snapshot(model), [p.detach().clone() for p in real_parameters(model)]
    with pytest.raises((zg.PassError, zg.ModelError)) as caught:
        zg.compile(model, passes, backend=options.pop("backend", "aot_eager"), **options)
    assert snapshot(model) == before
    for parameter, value in zip(real_parameters(model), values, strict=True):
        assert parameter.equal(value)
    return str(caught.value)


def with_part(part: nn.Module) -> nn.Module:
    model = Tower(1)
    model.part = part
    return model


class Unbuildable(nn.Module):
    """Has a parameter and no way to fill it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))


class UnbuildableBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@dataclass(frozen=True)
class Case:
    """A pass list for a `Tower` and the words its refusal must hold."""

    passes: Callable[[], list[Any]]
    words: tuple[str, ...]


PASS_LISTS = {
    "groups that overlap": Case(
        lambda: [zg.Group.by_class(Block), zg.Group.by_name([["embed", "layers.1.up"]])],
        ("layers.1.up.weight", "layers.1", "embed+layers.1.up", "one group"),
    ),
    "groups of one pass that overlap": Case(
        lambda: [zg.Group.by_name([["layers.0"], ["layers.0.up"]])],
        ("layers.0.up.weight", "layers.0", "one group"),
    ),
    "a name twice in one group": Case(
        lambda: [zg.Group.by_name([["layers.0", "layers.0.up.bias"]])],
        ("layers.0.up.bias", "named twice"),
    ),
    "a class name that matches nothing": Case(
        lambda: [zg.Group.by_class("Blok")], ("Blok", "nearest: Block")
    ),
    "a class that matches nothing": Case(
        lambda: [zg.Group.by_class(nn.LSTM)], ("LSTM", "matches no module with parameters")
    ),
    "a class without parameters": Case(
        lambda: [zg.Group.by_class(nn.Module, nn.ReLU)], ("ReLU", "no module with parameters")
    ),
    "a module name that matches nothing": Case(
        lambda: [zg.Group.by_name([["layers.0", "layers.9"]])],
        ("layers.9", "no module or parameter", "nearest", "layers.1"),
    ),
    "a parameter name that matches nothing": Case(
        lambda: [zg.Group.by_name([["layers.0.up.wait"]])], ("nearest", "layers.0.up.weight")
    ),
    "an ignored parameter in a group": Case(
        lambda: [zg.Partition(ignore=["norm"]), zg.Group.by_name([["norm"]])], ("norm",)
    ),
    "a size that nothing reaches": Case(
        lambda: [zg.Group.by_numel(10_000)], ("10000", "parameters in all")
    ),
    "an ignored name that matches nothing": Case(
        lambda: [zg.Partition(ignore=["layer.0"])], ("layer.0", "nearest", "layers.0")
    ),
    "two partitions": Case(lambda: [zg.Partition(), zg.Partition()], ("keep one",)),
    "an impossible order": Case(lambda: [zg.Prefetch(1), zg.Partition()], ("move partition",)),
}


@pytest.mark.parametrize("case", PASS_LISTS.values(), ids=PASS_LISTS)
def test_a_pass_list_that_cannot_work_leaves_the_model_alone(case: Case) -> None:
    passes = case.passes()
    if not any(isinstance(item, zg.Partition) for item in passes):
        passes = [zg.Partition(), *passes]
    message = refused(Tower(), passes)
    for word in case.words:
        assert word in message


MODELS = {
    "a sparse embedding": (
        lambda: with_part(nn.Embedding(4, 4, sparse=True)),
        ("part", "Embedding", "sparse=False"),
    ),
    "a sparse embedding bag": (
        lambda: with_part(nn.EmbeddingBag(4, 4, sparse=True)),
        ("part", "EmbeddingBag", "sparse=False"),
    ),
    "a lazy module": (lambda: with_part(nn.LazyLinear(3)), ("part.weight", "once before")),
    "a meta module that cannot be filled": (
        lambda: on_meta(lambda: with_part(Unbuildable())),
        ("part", "Unbuildable", "reset_parameters"),
    ),
    "a meta buffer that cannot be filled": (
        lambda: on_meta(lambda: with_part(UnbuildableBuffer())),
        ("part", "UnbuildableBuffer", "reset_parameters"),
    ),
}


@pytest.mark.parametrize(("make", "words"), MODELS.values(), ids=MODELS)
def test_a_model_that_cannot_work_is_left_alone(
    make: Callable[[], nn.Module], words: tuple[str, ...]
) -> None:
    message = refused(make(), [zg.Partition()])
    for word in words:
        assert word in message


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_module_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(zg.ModelError, match="ScriptModule"):
        zg.compile(scripted, [zg.Partition()])


def test_something_else_than_a_module_is_refused() -> None:
    with pytest.raises(zg.ModelError, match=r"expected an nn\.Module"):
        zg.compile(torch.relu, [zg.Partition()])  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_built_before_is_refused(make: type[torch.optim.Optimizer]) -> None:
    model = Tower(1)
    optimizer = make(list(model.parameters())[:3], lr=0.1)
    message = refused(model, [zg.Partition()])
    assert make.__name__ in message and "holds 3" in message
    del optimizer
    zg.compile(model, [zg.Partition()], backend="aot_eager")


def test_an_optimizer_of_another_model_does_not_matter() -> None:
    optimizer = torch.optim.SGD(Tower(1).parameters(), lr=0.1)
    zg.compile(Tower(1), [zg.Partition()], backend="aot_eager")
    assert optimizer.param_groups


def test_a_second_compile_is_refused() -> None:
    model = zg.compile(Tower(1), [zg.Partition()], backend="aot_eager")
    assert "already" in refused(model, [zg.Partition()])


def test_a_model_with_a_compiled_part_is_refused() -> None:
    model = Tower(1)
    zg.compile(model.layers[0], [zg.Partition()], backend="aot_eager")
    assert "layers.0 was compiled" in refused(model, [zg.Partition()])


def test_a_mesh_without_the_shard_axis_is_refused(mesh: DeviceMesh) -> None:
    message = refused(Tower(1), [zg.Partition(shard="shards")], mesh=mesh)
    assert "shard='shards'" in message and "it has shard" in message


def test_a_mesh_without_the_replicate_axis_is_refused(mesh: DeviceMesh) -> None:
    message = refused(Tower(1), [zg.Partition(replicate="node")], mesh=mesh)
    assert "replicate='node'" in message and "it has shard" in message


def test_a_mesh_without_names_is_told_to_name_its_axes(mesh: DeviceMesh) -> None:
    nameless = DeviceMesh("cpu", [0, 1])
    assert "mesh_dim_names" in refused(Tower(1), [zg.Partition()], mesh=nameless)


def test_one_axis_cannot_be_both(mesh: DeviceMesh) -> None:
    passes = [zg.Partition(replicate="shard")]
    assert "both shard and replicate" in refused(Tower(1), passes, mesh=mesh)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    message = refused(Tower(1), [zg.Partition()], backend="aot_eeger")
    assert "aot_eeger" in message and "aot_eager" in message and "inductor" in message


@pytest.mark.parametrize("units", [-1, 1.0, True, None, "1"])
def test_a_prefetch_of_no_number_of_units_is_refused(units: object) -> None:
    with pytest.raises(zg.PassError, match=r"Prefetch\(units=.*0 or more"):
        zg.Prefetch(units)  # type: ignore[arg-type]


def test_a_negative_backward_prefetch_is_refused() -> None:
    with pytest.raises(zg.PassError, match=r"backward_units=-2"):
        zg.Prefetch(1, backward_units=-2)


@pytest.mark.parametrize("after_forward", [2, 1, 0, None, "true"])
def test_reshard_to_anything_but_a_bool_is_refused(after_forward: object) -> None:
    with pytest.raises(zg.PassError, match=r"Reshard\(after_forward=.*True or False"):
        zg.Reshard(after_forward)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [2, None, "no"])
def test_keeping_buffers_between_uses_is_a_bool_too(keep: object) -> None:
    with pytest.raises(zg.PassError, match=r"Reshard\(keep_between_uses=.*True or False"):
        zg.Reshard(True, keep)  # type: ignore[arg-type]


@pytest.mark.parametrize("min_numel", [0, -3, 2.5, "7", None])
def test_a_size_that_is_no_positive_integer_is_refused(min_numel: object) -> None:
    with pytest.raises(zg.PassError, match=r"by_numel.*positive integer"):
        zg.Group.by_numel(min_numel)  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [(), (3,), (int,), (torch.relu,)])
def test_grouping_by_what_is_no_module_class_is_refused(classes: tuple[Any, ...]) -> None:
    with pytest.raises(zg.PassError, match=r"at least one|expected an nn\.Module class"):
        zg.Group.by_class(*classes)
