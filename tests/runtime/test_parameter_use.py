"""What users do with parameters beside training them."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zgraph as zg
from tests.passes.toys import Block
from tests.runtime.ranks import on_ranks
from tests.support.training import mesh_of


class _Checkpointed(nn.Module):
    """A block in a checkpointed region, beside a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8)
        self.block.unused = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False).sum()


@on_ranks(2)
def test_unused_parameters_of_a_checkpointed_region_have_no_gradient() -> None:
    model = zg.compile(_Checkpointed(), [zg.Partition()], mesh=mesh_of(), backend="aot_eager")
    model(torch.ones(2, 8)).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == ["block.unused"]


@on_ranks(2)
def test_what_users_set_on_a_parameter_stays_set() -> None:
    model = Block(8)
    model.up.weight.no_weight_decay = True  # type: ignore[assignment]
    zg.compile(model, [zg.Partition()], mesh=mesh_of(), backend="aot_eager")
    marked = [n for n, p in model.named_parameters() if getattr(p, "no_weight_decay", False)]
    assert marked == ["up.weight"]


@on_ranks(2)
def test_writing_through_a_module_is_refused_where_it_would_be_lost() -> None:
    model = zg.compile(Block(8), [zg.Partition()], mesh=mesh_of(), backend="aot_eager")
    with torch.no_grad():
        model.up.weight.fill_(7.0)
    with pytest.raises(zg.WholeTensorError, match=r"named_parameters\(\)"):
        _ = model.up.weight


class _Clamps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=0.5)
        return (x * self.weight).sum()


@on_ranks(2)
def test_a_forward_that_changes_a_parameter_in_place_is_refused() -> None:
    model = zg.compile(_Clamps(), [zg.Partition()], mesh=mesh_of(), backend="aot_eager")
    with pytest.raises(Exception, match="forward changes weight in place by clamp_"):
        model(torch.ones(8))


@on_ranks(2)
def test_get_parameter_returns_the_parameter_without_gathering() -> None:
    model = zg.compile(Block(8), [zg.Partition()], mesh=mesh_of(), backend="aot_eager")
    assert model.get_parameter("up.weight") is dict(model.named_parameters())["up.weight"]
    assert model._zgraph.eager_reads.gathers == 0  # type: ignore[union-attr]


@on_ranks(2)
def test_norms_of_half_precision_gradients_do_not_overflow() -> None:
    model = zg.compile(Block(8).half(), [zg.Partition()], mesh=mesh_of(), backend="aot_eager")
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, 50.0, dtype=torch.float16)
    numel = sum(p.numel() for p in model.parameters())
    total = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    # fp16 keeps 11 bits of each parameter's norm.
    assert total.item() == pytest.approx(50.0 * numel**0.5, rel=2e-3)


@on_ranks(2)
def test_evaluation_in_inference_mode_leaves_training_possible() -> None:
    model = zg.compile(Block(8), [zg.Partition()], mesh=mesh_of(), backend="aot_eager")
    with torch.inference_mode():
        _ = model.up.weight
    (model.up.weight.sum() * 2).backward()
    grad = model.get_parameter("up.weight").grad
    assert grad is not None and grad.full_tensor().eq(2).all()  # type: ignore[attr-defined]
