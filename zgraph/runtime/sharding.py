"""From a model and its plan to shards: the one place where a model is changed.

Units are taken one at a time: materialised if they are on the meta device, copied piece by piece
into the flat shard, and freed, so that a rank never holds more than its shards and one unit beyond
what the model itself held before.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from zgraph._torch import group_by_name
from zgraph.errors import ModelError
from zgraph.layout import Layout, Slot
from zgraph.plan import Plan
from zgraph.runtime import modules as sharded_modules
from zgraph.runtime.eager import EagerReads
from zgraph.runtime.parameter import ShardedParameter
from zgraph.runtime.piece import Piece
from zgraph.runtime.storage import FlatShard, Groups

Owner = tuple[str, nn.Module, str]  # module name, module, attribute


def shard_model(
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    groups: Groups,
    device: torch.device,
    eager_reads: EagerReads,
) -> dict[str, FlatShard]:
    """Replace the partitioned parameters of `model` by `ShardedParameter`s, in place.

    There are no collectives in it, so the mesh need not exist; `repeat_first_replicas` follows
    where it does.

    Returns:
        The flat shards by buffer name.
    """
    owners = _owners(model, plan)
    shards: dict[str, FlatShard] = {}
    for unit in plan.units:
        readers = [module for name in unit.parameters for _, module, _ in owners[name]]
        _materialise(owners, readers, device)
        for buffer in layout.buffers:
            if buffer.unit != unit.name:
                continue
            flat = FlatShard(buffer, groups, device, eager_reads)
            for slot in buffer.slots:
                _, module, attribute = owners[slot.name][0]
                whole = module._parameters[attribute]
                assert whole is not None
                flat.fill(slot, whole)
                sharded = ShardedParameter(*_piece(flat, slot))
                # What users set on a parameter, such as a mark for their optimizer's groups.
                for key, value in vars(whole).items():
                    setattr(sharded, key, value)
                _replace(owners[slot.name], sharded)
                del whole
            shards[buffer.name] = flat
    _install(model, owners, layout, shards)
    # What owns no shards: ignored parameters, and buffers.
    _materialise(owners, model.modules(), device)
    _move_buffers(model, device)
    return shards


def check_materialisable(model: nn.Module) -> None:
    """Raise `ModelError` if a meta module cannot be built: it has no `reset_parameters`."""
    for name, module in model.named_modules():
        if _is_meta(module) and not hasattr(module, "reset_parameters"):
            raise ModelError(
                f"{name or 'the model'} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters(); add one that fills its direct parameters and buffers, or "
                "build the model on a real device"
            )


def _owners(model: nn.Module, plan: Plan) -> dict[str, list[Owner]]:
    """Every place where each parameter is registered, by canonical name."""
    canonical = plan.canonical
    owners: dict[str, list[Owner]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                full = canonical[f"{name}.{attribute}" if name else attribute]
                owners.setdefault(full, []).append((name, module, attribute))
    return owners


def _materialise(
    owners: dict[str, list[Owner]], modules: Iterable[nn.Module], device: torch.device
) -> None:
    """Give those of `modules` that are on the meta device storage, and let them fill it.

    All of a module's direct parameters at once, since its `reset_parameters` fills them all.
    """
    places = {
        parameter: rest
        for rest in owners.values()
        for _, module, attribute in rest[:1]
        if (parameter := module._parameters[attribute]) is not None and parameter.is_meta
    }
    stale = [module for module in dict.fromkeys(modules) if _is_meta(module)]
    for module in stale:
        for parameter in list(module._parameters.values()):
            if parameter is not None and parameter.is_meta:
                whole = torch.empty_like(parameter, device=device)
                _replace(places[parameter], nn.Parameter(whole, parameter.requires_grad))
    for module in stale:
        _fill_meta_module(module, device)


def _is_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def _fill_meta_module(module: nn.Module, device: torch.device) -> None:
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device)
    with torch.no_grad():
        module.reset_parameters()  # type: ignore[operator]


def _replace(places: list[Owner], parameter: torch.Tensor) -> None:
    for _, module, attribute in places:
        module._parameters[attribute] = parameter  # type: ignore[assignment]


def _piece(flat: FlatShard, slot: Slot) -> tuple[torch.Tensor, Piece, FlatShard, bool]:
    _, start, length = flat.buffer.piece(slot, flat.groups.shard_rank)
    piece = Piece(
        name=slot.name,
        shape=slot.shape,
        start=start,
        length=length,
        offset=slot.offset,
        shard_numel=flat.buffer.shard_numel,
        group=flat.groups.gather_group(flat.buffer),
    )
    return flat.piece(slot), piece, flat, flat.buffer.requires_grad


def repeat_first_replicas(shards: Mapping[str, FlatShard]) -> None:
    """What lies on several ranks must be equal: the first rank's values count.

    Slices of one buffer may come from differently seeded ranks; copies of one slice may not.
    """
    for flat in shards.values():
        for name in (flat.groups.shard if flat.buffer.persistent else "", flat.groups.replicate):
            if name:
                group = group_by_name(name)
                dist.broadcast(flat.data.detach(), dist.get_global_rank(group, 0), group=group)


def _install(
    model: nn.Module, owners: dict[str, list[Owner]], layout: Layout, shards: dict[str, FlatShard]
) -> None:
    reads: dict[nn.Module, dict[str, sharded_modules.Read]] = {}
    for buffer, slot in layout.slots():
        for name, module, attribute in owners[slot.name]:
            read = sharded_modules.Read.of(shards[buffer.name], slot, name)
            reads.setdefault(module, {})[attribute] = read
    tied = [slot.name for _, slot in layout.slots() if len(owners[slot.name]) > 1]
    with_tied = [name for key in tied for name, _, _ in owners[key]]
    for name, module in model.named_modules():
        has_tied = any(name in ("", other) or other.startswith(f"{name}.") for other in with_tied)
        if module in reads or has_tied or not name:
            sharded_modules.install(module, reads.get(module, {}), has_tied)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[key] = buffer.to(device)
