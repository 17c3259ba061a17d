"""inductor: torch.compile's own compiler, with zgraph's passes between its phases.

Inductor calls back twice: for the partition of the joint graph, and for each graph to compile. The
graph that the passes leave is all that Inductor's cache keys on, so a changed pass never meets an
old result. What would reorder collectives again is switched off around this compilation only, and
their starts are tied to one another in the order of the graph.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast
from uuid import uuid4

from torch import fx

from zgraph._torch import (
    CustomGraphPass,
    CustomPartitionerFn,
    compile_fx,
    compile_fx_inner,
    is_collective_start,
    keep_in_order,
    without_autograd_cache,
    without_custom_partitioner,
)
from zgraph.backends.base import Hooks


class Inductor:
    """See the module's docstring."""

    def compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], hooks: Hooks
    ) -> Callable[..., Any]:
        def inner(graph: fx.GraphModule, graph_inputs: Sequence[Any], **options: Any) -> Any:
            if options.get("is_backward"):
                hooks.finish(graph, "backward")
            else:
                hooks.finish(graph, "inference" if options.get("is_inference") else "forward")
            with without_custom_partitioner():
                return compile_fx_inner(graph, graph_inputs, **options)

        settings = {
            "custom_partitioner_fn": _Partitioner(hooks),
            # Both move nodes to where memory or locality would be best without collectives.
            "reorder_for_peak_memory": False,
            "reorder_for_locality": False,
            "post_grad_custom_post_pass": _OrderOfStarts(),
        }
        with without_autograd_cache():
            compiled = compile_fx(
                module, list(inputs), inner_compile=inner, config_patches=settings
            )
        return cast(Callable[..., Any], compiled)


class _Partitioner(CustomPartitionerFn):
    """Lets Inductor call `hooks.partition` after its own joint-graph passes.

    It takes part in the key of AOTAutograd's cache, which would return a graph from before the
    passes changed. That cache is off here, but TORCHINDUCTOR_AUTOGRAD_CACHE=1 forces it on: so
    each partitioner has a name that no other has.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._name = f"zgraph {uuid4()}"

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self._hooks.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return self._name

    def __getstate__(self) -> dict[str, Any]:
        # Inductor pickles its settings into its cache's key. The partition is not part of what it
        # caches: the graph is, and it comes after the partition.
        return {}


class _OrderOfStarts(CustomGraphPass):
    """Ties each collective's start to the start before it.

    Inductor emits a kernel once all that it fused is ready, so it may delay the pack of a scatter,
    and the scatter with it. How far must not decide the order of starts: ranks with other batch
    sizes fuse otherwise, and ranks that start collectives in another order hang.
    """

    def __call__(self, graph: fx.Graph) -> None:
        keep_in_order([node for node in graph.nodes if is_collective_start(node)])

    def uuid(self) -> str:
        return "zgraph order of starts"
