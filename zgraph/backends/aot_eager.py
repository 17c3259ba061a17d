"""aot_eager: captured and scheduled graphs, run op by op with ATen's kernels.

Bitwise the numbers of eager PyTorch, so it is what equality is tested on.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from zgraph._torch import aot_autograd, boxed
from zgraph.backends.base import Hooks
from zgraph.ir.graph import Stage


class AotEager:
    """See the module's docstring."""

    def compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], hooks: Hooks
    ) -> Callable[..., Any]:
        def compiler(
            graph: fx.GraphModule, _: Sequence[Any], *, stage: Stage
        ) -> Callable[..., Any]:
            hooks.finish(graph, stage)
            return boxed(graph)

        return aot_autograd(
            fw_compiler=partial(compiler, stage="forward"),
            bw_compiler=partial(compiler, stage="backward"),
            inference_compiler=partial(compiler, stage="inference"),
            partition_fn=hooks.partition,
        )(module, inputs)
