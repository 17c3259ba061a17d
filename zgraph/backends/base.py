"""Backend: the protocol between a captured frame and what compiles its graphs."""

import shutil
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from torch import fx

from zgraph._torch import has_triton
from zgraph.errors import PassError
from zgraph.ir.graph import Stage

BackendName = Literal["auto", "inductor", "aot_eager"]


class Hooks(Protocol):
    """What a backend calls on the way; `zgraph.frames.FrameCompiler` is it."""

    def partition(
        self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Joint graph → forward and backward graphs."""
        ...

    def finish(self, module: fx.GraphModule, stage: Stage) -> None:
        """Schedule and lower one graph in place."""
        ...


class Backend(Protocol):
    """Compiles one Dynamo graph to a callable of the same inputs."""

    def compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], hooks: Hooks
    ) -> Callable[..., Any]:
        """Capture forward and backward, call the hooks, compile what they leave."""
        ...


def resolve(name: str, device_type: str) -> str:
    """`name`, with "auto" resolved: Inductor where its compilers are at hand, else aot_eager."""
    if name != "auto":
        return name
    return "inductor" if _inductor_works(device_type) else "aot_eager"


def choose(name: str, device_type: str) -> Backend:
    """The backend called `name`, "auto" resolved.

    Raises:
        PassError: no backend has this name.
    """
    from zgraph.backends.aot_eager import AotEager
    from zgraph.backends.inductor import Inductor

    name = resolve(name, device_type)
    backends: dict[str, type[Backend]] = {"inductor": Inductor, "aot_eager": AotEager}
    if name not in backends:
        known = ", ".join(["auto", *backends])
        raise PassError(f"backend={name!r}: expected one of {known}")
    return backends[name]()


def _inductor_works(device_type: str) -> bool:
    if device_type == "cuda":
        return has_triton()
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))
