"""Checks of a model and a mesh before anything is changed."""

import gc
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zgraph.errors import ModelError, PassError, nearest
from zgraph.passes.partition import Partition


def model(module: nn.Module) -> None:
    """Raise `ModelError` if `module` cannot be compiled by zgraph at all."""
    if not isinstance(module, nn.Module):
        raise ModelError(f"zg.compile({type(module).__name__}): expected an nn.Module")
    for name, part in module.named_modules():
        where = name or "the model"
        if "_zgraph" in part.__dict__:
            raise ModelError(
                f"{where} was compiled by zg.compile already; build the model anew for another "
                "pass list"
            )
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise ModelError(
                f"{where} is an {type(part).__name__} with sparse=True: sparse gradients cannot be "
                "scattered; set sparse=False"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(f"{where} is a ScriptModule; zg.compile needs Python modules")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(f"{name} is not initialised; run a lazy module once before zg.compile")
        if type(parameter) is not nn.Parameter:
            raise ModelError(
                f"{name} is a {type(parameter).__name__}; zg.compile shards plain nn.Parameters "
                "only (a module inside a compiled model has ShardedParameters already)"
            )


def no_optimizer_yet(module: nn.Module) -> None:
    """Raise `ModelError` if an optimizer holds parameters that are about to be replaced."""
    own = set(module.parameters())
    if _optimizers_of(own):
        gc.collect()  # one that only a cycle or an old traceback keeps alive trains nothing
    for name, count in _optimizers_of(own):
        raise ModelError(
            f"a {name} built before zg.compile holds {count} of this model's parameters; they are "
            "about to be replaced by shards, so it would train nothing. Build the optimizer after "
            "zg.compile"
        )


def _optimizers_of(own: set[nn.Parameter]) -> list[tuple[str, int]]:
    """(class, number of parameters in `own`) of each living optimizer that holds any."""
    found: list[tuple[str, int]] = []
    # gc knows every living optimizer; objects may raise on inspection, so only the type is asked.
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.optim.Optimizer):
            # One whose constructor raised may linger without groups.
            groups = getattr(candidate, "param_groups", ())
            held = [p for group in groups for p in group["params"] if p in own]
            found += [(type(candidate).__name__, len(held))] if held else []
    return found


def axes_of(mesh: DeviceMesh | None) -> dict[str, int]:
    """Ranks of each axis of a mesh; empty without one. Raises `PassError` if axes have no names."""
    if mesh is None:
        return {}
    if mesh.mesh_dim_names is None:
        raise PassError("the mesh has no named axes: give mesh_dim_names to init_device_mesh")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def device_type(name: str) -> None:
    """Raise `ModelError` if fake tensors of this device type cannot be made here."""
    if name not in ("cpu", "cuda"):
        raise ModelError(f'device_type={name!r}: expected "cpu" or "cuda"')
    if name == "cuda" and not torch.backends.cuda.is_built():
        raise ModelError(
            'device_type="cuda": this torch was built without CUDA, and cannot trace for it; use '
            'device_type="cpu", whose graphs differ in the attention kernel only'
        )


def call_arguments(args: object, kwargs: object) -> None:
    """Raise `ModelError` unless these are the arguments of a call: a sequence and a mapping."""
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ModelError(
            f"args is a {type(args).__name__}; expected a tuple of the model's arguments, such as "
            "(tokens,)"
        )
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise ModelError(f"kwargs is a {type(kwargs).__name__}; expected a dict of arguments")


def mesh_axes(partition: Partition, axes: Mapping[str, int]) -> None:
    """Raise `PassError` if the mesh, given as ranks by axis, lacks an axis of `partition`."""
    if not axes:
        return
    for label, axis in (("shard", partition.shard), ("replicate", partition.replicate)):
        if axis is not None and axis not in axes:
            raise PassError(
                f"Partition({label}={axis!r}): the mesh has no such axis; it has "
                f"{', '.join(axes)} ({nearest(axis, axes)})"
            )
    for axis, size in axes.items():
        if size > 1 and axis not in (partition.shard, partition.replicate):
            raise PassError(
                f"the mesh has {size} ranks along {axis!r}, which Partition does not name, so "
                f"their gradients would not be reduced; say Partition(replicate={axis!r}), or give "
                f"zg.compile the part of the mesh to train over: mesh[{partition.shard!r}]"
            )
    if partition.shard == partition.replicate:
        raise PassError(f"Partition: {partition.shard!r} cannot be both shard and replicate")
