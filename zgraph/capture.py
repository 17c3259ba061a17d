"""capture: every stage of a model's graphs, without running or changing the model.

A twin of the model, of fake tensors that have shapes and no data, goes the way that `zg.compile`
takes, up to the graphs that a backend would compile. So the mesh need not exist (see Note [Planned
groups] in `zgraph.runtime.collectives`), and the model may be on the meta device.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zgraph import checks
from zgraph._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    pytree,
)
from zgraph.backends.aot_eager import AotEager
from zgraph.compile import compiled_call, finished_plan, groups_of
from zgraph.errors import GraphError, ModelError, PassError, nearest
from zgraph.frames import Capture, Frame, Step
from zgraph.ir import show
from zgraph.ir.graph import Graph, Stage
from zgraph.ir.nodes import bytes_in
from zgraph.layout import Layout, lay_out
from zgraph.lowering import choose_kernels
from zgraph.passes import Partition, Pass
from zgraph.plan import Plan
from zgraph.runtime import casts
from zgraph.runtime.collectives import planned
from zgraph.runtime.eager import EagerReads
from zgraph.runtime.sharding import shard_model
from zgraph.runtime.storage import Groups


@dataclass(frozen=True)
class Captured:
    """What `capture` returns: the graphs of one call, as each pass left them.

    Attributes:
        plan, layout, groups: what was decided.
        frames: one for each captured graph; a model without graph breaks has one.
        name: the model's class.
        buffer_bytes, input_bytes: the model's buffers, and the arguments.
        outside: modules that read their parameters outside these graphs, where torch.compile
            skipped them; what they gather is in none of the graphs.
    """

    plan: Plan
    layout: Layout
    groups: Groups
    frames: tuple[Frame, ...]
    name: str
    buffer_bytes: int
    input_bytes: int
    outside: tuple[str, ...] = ()

    def steps(self, stage: Stage, frame: int = 0) -> list[Step]:
        """The graph at "joint", "forward", "backward" or "inference", as each pass left it.

        The first step is the graph before any pass; the last of all but "joint" is the lowered
        one. Only passes that have a hook at this stage appear.

        Raises:
            GraphError: there is no such frame, or it has no graph at this stage.
        """
        if not 0 <= frame < len(self.frames):
            raise GraphError(f"frame {frame}: this call has {len(self.frames)}, counted from 0")
        chosen = self.frames[frame]
        found = [step for step in chosen.history if step.graph.stage == stage]
        if not found:
            stages = ", ".join(chosen.stages)
            raise GraphError(f"frame {frame} has no {stage} graph; it has {stages}")
        return found

    def graph(self, stage: Stage, after: Pass | str | None = None, frame: int = 0) -> Graph:
        """The graph at a stage, after one pass, or as it was scheduled.

        Args:
            after: a pass, or its name: "prefetch", "prefetch{units=1}", "capture", "lower".

        Raises:
            GraphError: no such stage, or that pass has no hook there.
        """
        steps = self.steps(stage, frame)
        if after is None:
            return next(step for step in reversed(steps) if step.made_by != "lower").graph
        return steps[_index(steps, str(after), stage)].graph

    def diff(self, made_by: Pass | str, stage: Stage, frame: int = 0) -> str:
        """What one pass changed in the graph of a stage, as a diff of texts; "" for nothing."""
        steps = self.steps(stage, frame)
        index = _index(steps, str(made_by), stage)
        if index == 0:
            raise GraphError(f"{made_by} is where the {stage} graph begins: nothing to compare")
        return show.diff(steps[index - 1].graph, steps[index].graph)

    def __str__(self) -> str:
        made = [f"{step.graph.stage}: {step.made_by}" for f in self.frames for step in f.history]
        return "\n".join([self.plan.text(), *made])


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    passes: Sequence[Pass] = (),
    mesh: DeviceMesh | Mapping[str, int] | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> Captured:
    """Trace one call of `model` under a pass list, as rank 0 would compile it.

    Nothing is computed, the model is left as it is, and there are no collectives: no process group
    is needed, and the mesh may be of any size.

    Args:
        model: a module with parameters on any device, the meta device included.
        args, kwargs: of the call; of tensors only shapes, dtypes and strides matter.
        passes: as for `zg.compile`.
        mesh: a device mesh, or {axis: ranks}, such as {"replicate": 4, "shard": 8}.
        world_size: short for a mesh of this many ranks along the axis that `Partition` splits.
        device_type: "cuda" or "cpu", which decides among kernels; that of the mesh, else of the
            model's parameters, else "cpu". "cuda" needs a torch with CUDA support, but no GPU.
        fullgraph: as for `torch.compile`.
        dynamic: True traces sizes as symbols; None is as False, since this is one call only.

    Raises:
        PassError, ModelError: as for `zg.compile`; or forward needs values that fakes do not have.
        GraphError: a pass broke a rule.
    """
    checks.call_arguments(args, kwargs)
    if not isinstance(passes, Sequence):
        raise PassError(f"passes is a {type(passes).__name__}; expected a list of passes")
    axes = _axes(passes, mesh, world_size)
    checks.model(model)
    device_type = device_type or _device_type(model, mesh)
    checks.device_type(device_type)
    pipeline, plan = finished_plan(model, passes, axes, device_type)
    layout = lay_out(plan)
    names = {axis: planned(axis, ranks) for axis, ranks in axes.items() if ranks > 1}
    groups = groups_of(plan, names, shard_rank=0)
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    reads = EagerReads()
    # The twin's tensors are ordinary ones, whatever mode the call is traced in.
    with torch.inference_mode(False):
        twin, call_args, call_kwargs = _fakes(mode, device_type, model, args, dict(kwargs or {}))
    with torch.inference_mode(False), mode:
        shards = shard_model(twin, plan, layout, groups, torch.device(device_type), reads)
        casts.install(twin, plan)
        backend = AotEager()
        kernels = choose_kernels(None, device_type)
        traced = Capture(
            pipeline.passes, plan, layout, groups, shards, backend, kernels, keeps_history=True
        )
        # Not None: Dynamo would take sizes that differ from an earlier capture's for dynamic ones.
        call = compiled_call(twin, traced, reads, fullgraph, bool(dynamic))
    with mode, _explaining(type(model).__name__):
        call(*call_args, **call_kwargs)
    if not traced.frames:
        raise ModelError(
            f"torch.compile captured nothing of {type(model).__name__}: it ran the whole call "
            "itself, as it does around nn.LSTM and nn.GRU, or nothing in it computes; capture the "
            "parts that it can trace"
        )
    return Captured(
        plan,
        layout,
        groups,
        tuple(traced.frames),
        type(model).__name__,
        buffer_bytes=bytes_in(list(model.buffers())),
        input_bytes=bytes_in((args, kwargs)),
        outside=reads.modules,
    )


@contextmanager
def _explaining(model: str) -> Iterator[None]:
    """Say of errors that come from tracing without data what a person can do about them."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"{model} needs the values of a tensor, and a capture has none: {error} (what reads "
            "values, such as .item(), bool(tensor) or a boolean index, decides by data; capture "
            "the parts around it, or give the decision as an argument that is no tensor)"
        ) from error
    except AssertionError as error:
        if "FakeTensor" not in str(error):
            raise
        raise ModelError(
            f"{model} reads a tensor that it does not hold as a parameter, a buffer or an "
            "attribute of a module; register it as a buffer, or pass it as an argument"
        ) from error


def is_called(step: Step, wanted: str) -> bool:
    """Whether a pass's name, its whole text, or its function's name means this step."""
    name = step.made_by.partition("{")[0]
    return wanted in (step.made_by, name, name.partition("@")[0].rpartition(".")[2])


def _index(steps: Sequence[Step], wanted: str, stage: str) -> int:
    for index, step in reversed(list(enumerate(steps))):
        if is_called(step, wanted):
            return index
    known = [step.made_by for step in steps]
    raise GraphError(f"no step of the {stage} graph is called {wanted!r}; {nearest(wanted, known)}")


def _device_type(model: nn.Module, mesh: DeviceMesh | Mapping[str, int] | None) -> str:
    if isinstance(mesh, DeviceMesh):
        return mesh.device_type
    types = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    return types.pop() if len(types) == 1 else "cpu"


def _axes(
    passes: Sequence[Pass], mesh: DeviceMesh | Mapping[str, int] | None, world_size: int | None
) -> dict[str, int]:
    if mesh is not None and world_size is not None:
        raise PassError("capture was given both mesh and world_size; give one")
    if isinstance(mesh, DeviceMesh):
        return checks.axes_of(mesh)
    if mesh is not None:
        if not isinstance(mesh, Mapping):
            raise PassError(f"mesh={mesh!r}: expected a device mesh, or ranks by axis in a dict")
        axes = dict(mesh)
    else:
        partition = next((item for item in passes if isinstance(item, Partition)), Partition())
        if partition.replicate is not None and world_size is not None:
            raise PassError(
                f"{partition} has two axes, and world_size={world_size} does not say how long each "
                f'is; say mesh={{"{partition.replicate}": …, "{partition.shard}": …}}'
            )
        axes = {} if world_size is None else {partition.shard: world_size}
    for axis, ranks in axes.items():
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise PassError(f"{axis}={ranks!r}: expected a number of ranks, 1 or more")
    return axes


def _fakes(
    mode: FakeTensorMode, device_type: str, model: nn.Module, args: Any, kwargs: Any
) -> tuple[nn.Module, Any, Any]:
    """The model and the arguments again, with one fake tensor for each tensor."""
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = new_fake(tensor)
        return fakes[id(tensor)]

    def new_fake(tensor: Tensor) -> Tensor:
        with mode:
            empty = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device_type
            )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, tensor.requires_grad)
        return empty.requires_grad_(tensor.requires_grad)

    for part in model.modules():
        for tensor in _tensors_of(part):
            fake(tensor)
    # deepcopy asks its memo first, by identity: so tensors are replaced, and not copied.
    twin = _copied(model, dict(fakes))
    for old, new in zip(model.parameters(), twin.parameters(), strict=True):
        for key, value in vars(old).items():
            setattr(new, key, value)
    args, kwargs = pytree.tree_map_only(Tensor, fake, (args, kwargs))
    return twin, args, kwargs


def _copied(model: nn.Module, replaced: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, replaced)
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied, and a capture traces a copy: {error}"
        ) from error


def _tensors_of(module: nn.Module) -> list[Tensor]:
    held = (module._parameters, module._buffers, vars(module))
    leaves = (value for values in held for value in pytree.tree_leaves(dict(values)))
    return [cast(Tensor, value) for value in leaves if isinstance(value, Tensor)]
