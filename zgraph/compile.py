"""compile: from a model and a pass list to the same model, compiled and training on shards.

Everything that can be wrong is checked first, on every rank; only then is the model changed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zgraph import checks
from zgraph._torch import BackendCompilerFailed, raised_recompile_limit, set_compiled_call
from zgraph.backends.base import BackendName, choose, resolve
from zgraph.errors import PassError, ZGraphError
from zgraph.frames import Capture
from zgraph.layout import Layout, lay_out
from zgraph.lowering import Kernels, choose_kernels
from zgraph.passes import Group, Partition, Pass, Pipeline, Reshard
from zgraph.plan import Axis, Plan, describe, units_covering
from zgraph.runtime import casts
from zgraph.runtime.agree import Meeting
from zgraph.runtime.eager import EagerReads
from zgraph.runtime.sharding import (
    check_materialisable,
    repeat_first_replicas,
    shard_model,
)
from zgraph.runtime.storage import FlatShard, Groups


@dataclass(frozen=True)
class State:
    """What zgraph keeps with a compiled model, under `model._zgraph`."""

    plan: Plan
    layout: Layout
    groups: Groups
    shards: dict[str, FlatShard]
    capture: Capture
    eager_reads: EagerReads


def compile(
    model: nn.Module,
    passes: Sequence[Pass],
    mesh: DeviceMesh | None = None,
    backend: BackendName = "auto",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: Mapping[str, str] | None = None,
) -> nn.Module:
    """Compile `model` with a pass list; it then trains on shards.

    Args:
        model: any module; parameters may be on the meta device, which are then filled unit by unit
            by their modules' own `reset_parameters`.
        passes: what to do, in order; see `zgraph.passes`. Without a `Group` pass, `Group.auto()` is
            used, without `Reshard`, `Reshard(True)`.
        mesh: devices, with the axes that `Partition` names. None: one process, no collectives, and
            unless the passes choose dtypes the parameters stay as they are.
        backend: "inductor", "aot_eager", or "auto" for Inductor where its compilers are at hand.
        fullgraph, dynamic: as in `torch.compile`.
        options: {"kernels": "triton"}, the default on CUDA, casts and packs through zgraph's own
            kernels; {"kernels": "torch"} leaves that to torch and Inductor, for comparison. It is
            about captured graphs: what runs outside them uses the kernels in any case.

    Returns:
        The same module. Build optimizers from its parameters now, not before.

    Raises:
        PassError, ModelError: passes, mesh or model cannot work together; nothing was changed.
        RankError: another rank failed or has another plan; nothing was changed, on any rank.
    """
    ranks, rank = (mesh.mesh.flatten().tolist(), dist.get_rank()) if mesh else ([0], 0)

    def prepare() -> tuple[Pipeline, Plan, Kernels]:
        return _prepare(model, passes, mesh, backend, options)

    def text(prepared: tuple[Pipeline, Plan, Kernels]) -> str:
        # Ranks that compile differently may capture different graphs from one plan.
        _, plan, kernels = prepared
        compiler = resolve(backend, plan.device_type)
        how = f"torch {torch.__version__}, {compiler} on {plan.device_type}, {kernels} kernels"
        return f"compiled by {how}, fullgraph={fullgraph}, dynamic={dynamic}\n{plan.text()}"

    meeting = Meeting(ranks, rank)
    pipeline, plan, kernels = meeting.agree(prepare, text)
    device = _device(mesh, model)
    layout, groups, reads = lay_out(plan), _groups(mesh, plan), EagerReads()
    shards: dict[str, FlatShard] = {}
    if mesh is not None or _changes_dtypes(plan):
        shards = shard_model(model, plan, layout, groups, device, reads)
        repeat_first_replicas(shards)
        casts.install(model, plan)
    compiler = choose(backend, device.type)
    capture = Capture(pipeline.passes, plan, layout, groups, shards, compiler, kernels, meeting)
    model.__dict__["_zgraph"] = State(plan, layout, groups, shards, capture, reads)
    set_compiled_call(model, compiled_call(model, capture, reads, fullgraph, dynamic))
    return model


def _prepare(
    model: nn.Module,
    passes: Sequence[Pass],
    mesh: DeviceMesh | None,
    backend: str,
    options: Mapping[str, str] | None,
) -> tuple[Pipeline, Plan, Kernels]:
    """The finished plan; everything that can be wrong with the arguments is raised here."""
    checks.model(model)
    checks.no_optimizer_yet(model)
    device = _device(mesh, model)
    choose(backend, device.type)
    kernels = choose_kernels(options, device.type)
    check_materialisable(model)
    return *finished_plan(model, passes, checks.axes_of(mesh), device.type), kernels


def finished_plan(
    model: nn.Module, passes: Sequence[Pass], axes: Mapping[str, int], device_type: str
) -> tuple[Pipeline, Plan]:
    """The pass list with its defaults, its contracts checked, and the plan that it makes.

    Args:
        axes: ranks of each mesh axis; empty for one process without a mesh.

    Raises:
        PassError, ModelError: passes, axes and model cannot work together.
    """
    pipeline = Pipeline(_completed(passes))
    partition = next((item for item in pipeline.passes if isinstance(item, Partition)), None)
    if partition is None:
        raise PassError(
            "passes has no zg.Partition(), which says what is split; add it, or a subclass"
        )
    checks.mesh_axes(partition, axes)
    plan = describe(model, device_type)
    if axes:
        repeated = partition.replicate
        plan = plan.changed(
            shard=Axis(partition.shard, axes[partition.shard]),
            replicate=Axis(repeated, axes[repeated]) if repeated else None,
        )
    plan = pipeline.plan(plan)
    return pipeline, plan.changed(units=units_covering(plan, plan.units))


def _completed(passes: Sequence[Pass]) -> list[Pass]:
    """The list with the default of each choice that nothing makes, behind `Partition`."""
    completed = list(passes)
    provided = {word for item in completed if isinstance(item, Pass) for word in item.provides}
    if "gathers" not in provided:
        completed.insert(0, Partition())
    place = next((i + 1 for i, item in enumerate(completed) if isinstance(item, Partition)), None)
    if place is not None:
        missing = {"units": Group.auto(), "reshard": Reshard()}
        completed[place:place] = [item for word, item in missing.items() if word not in provided]
    return completed


def _device(mesh: DeviceMesh | None, model: nn.Module) -> torch.device:
    if mesh is None:
        parameter = next(iter(model.parameters()), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        return torch.device("cpu") if device.type == "meta" else device
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _groups(mesh: DeviceMesh | None, plan: Plan) -> Groups:
    """Group names of the plan's axes. An axis of one rank needs no collective, so no group."""
    if mesh is None or plan.shard is None:
        return Groups()
    several = [axis.name for axis in plan.axes if axis.size > 1]
    names = {name: mesh.get_group(name).group_name for name in several}
    return groups_of(plan, names, mesh.get_local_rank(plan.shard.name))


def groups_of(plan: Plan, names: Mapping[str, str], shard_rank: int) -> Groups:
    """The groups of a plan's axes, from the group's name of each axis that has several ranks."""
    return Groups(
        shard=names.get(plan.shard.name, "") if plan.shard is not None else "",
        replicate=names.get(plan.replicate.name, "") if plan.replicate is not None else "",
        shard_rank=shard_rank,
        shard_size=plan.shard_size,
        axes=tuple((names[axis.name], axis) for axis in plan.axes if axis.name in names),
    )


def _changes_dtypes(plan: Plan) -> bool:
    changed = any(
        not p.dtype == p.master_dtype == p.param_dtype == p.reduce_dtype for p in plan.partitioned()
    )
    return changed or plan.cast_inputs is not None or plan.output_dtype is not None


def compiled_call(
    model: nn.Module,
    capture: Capture,
    reads: EagerReads,
    fullgraph: bool,
    dynamic: bool | None,
) -> Callable[..., Any]:
    """What `model(…)` runs: its forward under `torch.compile`, with `capture` as the backend."""

    # Dynamo starts at a function of this file: it would not start inside torch.nn's own files,
    # where the `forward` of a Sequential lies.
    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    # Dynamo keeps compiled graphs with the code that they were captured from. This code is the
    # model's own, so they go when the model goes, and models do not share a recompile limit. So is
    # its name, under which Dynamo remembers the sizes that it met: else a second model, called with
    # another batch size than the first, would be traced for sizes unknown.
    code = call.__code__.replace(co_name=f"call_{uuid4().hex[:12]}")
    own = FunctionType(code, globals(), "call", None, call.__closure__)
    compiled = torch.compile(own, backend=capture, fullgraph=fullgraph, dynamic=dynamic)
    limit = 8 * (2 + len(capture.plan.units))

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return model._call_impl(*args, **kwargs)
        try:
            with raised_recompile_limit(limit):
                return compiled(*args, **kwargs)
        except BackendCompilerFailed as failure:
            # What zgraph raised on purpose reaches its users as what it is.
            if isinstance(failure.inner_exception, ZGraphError):
                raise failure.inner_exception from None
            raise
        finally:
            reads.release()

    return run
