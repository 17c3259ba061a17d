"""The Dynamo backend `torch.compile(model, backend="zgraph", options={"passes": […]})`.

One process: torch.compile hands a backend graphs, not the model, so parameters stay as they are and
only the graph hooks of the passes do anything. Sharding needs `zg.compile`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from zgraph.backends.base import choose
from zgraph.errors import PassError, nearest
from zgraph.frames import Capture
from zgraph.ir import ops
from zgraph.layout import Layout
from zgraph.passes import Pipeline
from zgraph.plan import Plan
from zgraph.runtime.storage import Groups

_OPTIONS = ("passes", "backend")


def zgraph(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph with a pass list.

    Options: `passes`, a list as for `zg.compile`; `backend`, "auto", "inductor" or "aot_eager".

    Raises:
        PassError: an unknown option, passes that would shard or change dtypes, or a model that
            `zg.compile` has sharded already.
    """
    options = options or {}
    for name in options:
        if name not in _OPTIONS:
            hint = (
                "; to shard over a mesh call zg.compile(model, passes, mesh)"
                if name == "mesh"
                else ""
            )
            raise PassError(
                f"backend zgraph has no option {name!r}; {nearest(name, _OPTIONS)}{hint}"
            )
    if module.graph.find_nodes(op="call_function", target=ops.parameter):
        raise PassError(
            "this model was compiled by zg.compile already; call it without torch.compile"
        )
    device_type = next((x.device.type for x in inputs if isinstance(x, Tensor)), "cpu")
    pipeline = Pipeline(options.get("passes", ()))
    plan = pipeline.plan(Plan(device_type, (), ()))
    if plan.cast_inputs is not None or plan.output_dtype is not None:
        raise PassError("torch.compile cannot change a model's dtypes; call zg.compile instead")
    backend = choose(options.get("backend", "auto"), device_type)
    return Capture(pipeline.passes, plan, Layout(()), Groups(), {}, backend)(module, inputs)
