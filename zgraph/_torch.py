"""Every private PyTorch import of zgraph, with its version branches.

Written against torch 2.11 and 2.13. Each name says what zgraph needs it for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

# Capture: AOTAutograd as a Dynamo backend, and the min-cut partition.
from functorch.compile import min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.graph import _BoxedCodeGen
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "BackendCompilerFailed",
    "CheckpointPolicy",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "OpOverload",
    "all_gather_flat",
    "aot_autograd",
    "backend_name",
    "boxed",
    "compile_fx",
    "compile_fx_inner",
    "default_store",
    "detect_fake_mode",
    "enable_foreach",
    "group_by_name",
    "has_triton",
    "is_collective_start",
    "keep_in_order",
    "min_cut_rematerialization_partition",
    "pytree",
    "raised_recompile_limit",
    "reduce_scatter_flat",
    "set_compiled_call",
    "skip_code",
    "without_autograd_cache",
    "without_custom_partitioner",
]


def group_by_name(name: str) -> dist.ProcessGroup:
    """The process group that a functional collective's group name stands for."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def backend_name(group: dist.ProcessGroup, device_type: str) -> str:
    """Name of what runs the group's collectives on tensors of a device type: "nccl", "gloo"."""
    # dist.get_backend says "undefined" of groups that init_device_mesh made by itself.
    return group._get_backend(torch.device(device_type)).name()


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Run a graph on a list of inputs, which it empties, so that each is freed after its last use.

    AOTAutograd knows by `_boxed_call` that a callable takes its inputs so.
    """
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()

    def run(inputs: list[Any]) -> Any:
        return module(inputs)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def all_gather_flat(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather 1-D shards into a 1-D output. torch 2.13 renamed the function."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, shard, group=group)


def reduce_scatter_flat(
    output: torch.Tensor,
    source: torch.Tensor,
    op: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup,
) -> None:
    """Reduce-scatter a 1-D source into this rank's 1-D slice. torch 2.13 renamed the function."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, source, op=op, group=group)


def default_store() -> dist.Store:
    """The store through which the default process group met."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def enable_foreach(cls: type[torch.Tensor]) -> None:
    """Let optimizers and `clip_grad_norm_` choose their foreach paths for parameters of `cls`.

    torch keeps a list of tensor types that do; DTensor adds itself to it in the same way.
    """
    for types in (optimizer_types, _foreach_utils._foreach_supported_types):
        if cls not in types:
            types.append(cls)


@contextmanager
def raised_recompile_limit(limit: int) -> Iterator[None]:
    """Allow at least `limit` graphs for one piece of code.

    Blocks that share code hold different parameters, so each has a graph of its own.
    """
    if dynamo_config.recompile_limit >= limit:
        yield
        return
    with dynamo_config.patch(
        recompile_limit=limit,
        accumulated_recompile_limit=max(limit, dynamo_config.accumulated_recompile_limit),
    ):
        yield


def is_collective_start(node: fx.Node) -> bool:
    """Whether the node starts a functional collective."""
    ops = torch.ops._c10d_functional
    return node.target in (
        ops.all_gather_into_tensor.default,
        ops.reduce_scatter_tensor.default,
        ops.all_reduce.default,
    )


def keep_in_order(nodes: Sequence[fx.Node]) -> None:
    """Make Inductor emit `nodes`, given in program order, in that order."""
    if len(nodes) > 1:
        edges = {later: OrderedSet([node]) for node, later in pairwise(nodes)}
        preserve_node_ordering(nodes[0].graph, edges)


def set_compiled_call(model: nn.Module, call: Callable[..., Any]) -> None:
    """Let `model(…)` run `call`, as `nn.Module.compile` does with what it compiles."""
    model._compiled_call_impl = call


def without_autograd_cache() -> Any:
    """Switch AOTAutograd's cache off for one compilation.

    It would return old graphs without running the passes. Inductor's own cache stays on: its key is
    the graph that the passes left.
    """
    return functorch_config.patch(enable_autograd_cache=False)


def without_custom_partitioner() -> Any:
    """Leave the partitioner out of the key of Inductor's cache, while one graph is compiled.

    What it did lies in the graph, which is in the key.
    """
    return inductor_config.patch(custom_partitioner_fn=None)
