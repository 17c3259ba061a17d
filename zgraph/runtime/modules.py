"""Modules that read shards: a generated property for each parameter.

Each module of a sharded model becomes an instance of a subclass of its own class, made for it
alone, with the class's name and one property a parameter. A property reads a plain tensor found in
`_parameters` (as under `torch.func.functional_call`) as it is; otherwise it calls the captured op
inside a trace, and gathers eagerly outside.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from zgraph._torch import skip_code
from zgraph.errors import ModelError
from zgraph.ir import ops
from zgraph.layout import Slot
from zgraph.runtime import eager
from zgraph.runtime.parameter import ShardedParameter
from zgraph.runtime.storage import FlatShard


@dataclass(frozen=True)
class Read:
    """How one parameter is read: the shard it lies in, and the captured op's further arguments."""

    shard: nn.Parameter
    arguments: tuple[Any, ...]
    flat: FlatShard
    slot: Slot
    module: str

    @staticmethod
    def of(flat: FlatShard, slot: Slot, module: str) -> "Read":
        """The read of `slot` by the module called `module`."""
        buffer, groups = flat.buffer, flat.groups
        arguments = (
            slot.name,
            buffer.name,
            slot.shape,
            slot.offset,
            buffer.param_dtype,
            buffer.reduce_dtype,
            groups.gather_group(buffer),
            groups.sum_groups(buffer),
        )
        return Read(flat.data, arguments, flat, slot, module)


READS = "_zgraph_reads"


def install(module: nn.Module, reads: dict[str, Read], has_tied: bool) -> None:
    """Let `module` read its parameters through `reads`, by attribute name.

    Args:
        has_tied: a parameter inside the module has a second name. See Note [Tied reads].
    """
    cls: type[nn.Module] = type(module)
    members: dict[str, Any] = {name: property(_getter(name)) for name in reads}
    members.update(__module__=cls.__module__, __qualname__=cls.__qualname__, _apply=_apply)
    members["register_parameter"] = _register_parameter
    members["get_parameter"] = _get_parameter
    if issubclass(cls, nn.RNNBase):
        members["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    if has_tied:
        members["named_parameters"] = _named_parameters
    # In __dict__ directly: nn.Module would look for parameters inside.
    module.__dict__[READS] = reads
    module.__class__ = cast(Any, type(cls.__name__, (cls,), members))


# Note [Tied reads]
# Dynamo marks what `named_parameters()` yields as static inputs when it meets a module. A
# property's `type(held)` makes it hold a `ShardedParameter` as a plain object before it meets the
# second module that has the same parameter, and then the marking fails: it expects a graph input.
# Shards are the inputs here, and Dynamo leaves modules alone that have a `named_parameters` of
# their own.
def _named_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    # The class above the generated one may have a `named_parameters` of its own.
    return cast(Any, super(type(module), module)).named_parameters(*args, **kwargs)


def _getter(name: str) -> Callable[[nn.Module], Any]:
    def read(module: nn.Module) -> Any:
        held = module._parameters[name]
        if type(held) is not ShardedParameter:
            return held
        source: Read = module.__dict__[READS][name]
        if torch.compiler.is_compiling():
            return ops.parameter(source.shard, *source.arguments)
        return eager.read(source)

    return read


# Dynamo inlines a property where it traces the caller. Where it does not trace the caller, the
# property must not become a graph of its own: outside captured code it reads eagerly.
skip_code(_getter("").__code__)


def _flat_weights(module: Any) -> list[Tensor]:
    """What RNN modules pass to their kernel; they would otherwise keep a list of old parameters."""
    return [getattr(module, name) for name in module._flat_weights_names]


def _get_parameter(module: nn.Module, target: str) -> nn.Parameter:
    """The parameter itself; nn.Module's own method would read the attribute, which gathers."""
    path, _, name = target.rpartition(".")
    held = module.get_submodule(path)._parameters.get(name)
    if held is None:
        raise AttributeError(f"{target} is no parameter of {type(module).__name__}")
    return held


def _register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """What assigning a parameter and `load_state_dict(assign=True)` call: not over a shard."""
    if name in module.__dict__[READS]:
        raise ModelError(
            f"{module.__dict__[READS][name].slot.name} is sharded, and another parameter in its "
            "place would not be; copy into it with p.copy_(…) or load_state_dict(…)"
        )
    cast(Any, super(type(module), module)).register_parameter(name, param)


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Conversions such as `.to()` reach buffers and children; parameters must stay as they are."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, ShardedParameter):
            with torch.no_grad():
                converted = fn(parameter)
            if converted is not parameter and (
                converted.dtype != parameter.dtype or converted.device != parameter.device
            ):
                raise ModelError(
                    f"{module.__dict__[READS][name].slot.name}: would become {converted.dtype} on "
                    f"{converted.device}; convert or move a model before zg.compile, or choose "
                    "dtypes with zg.MixedPrecision"
                )
    kept, module._parameters = module._parameters, {}
    try:
        # The class above the generated one may have an `_apply` of its own.
        return cast(Any, super(type(module), module))._apply(fn, recurse)
    finally:
        module._parameters = kept
