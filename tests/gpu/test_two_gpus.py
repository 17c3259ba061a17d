"""Two GPUs over NCCL: equal to FSDP2, schedules that change no number, memory."""

import pytest
import torch
from torch import nn

import zgraph as zg
from tests.gpu import training
from tests.gpu.devices import needs_gpus, run_on_gpus
from tests.gpu.training import with_fsdp2, with_zgraph

pytestmark = [pytest.mark.gpu, needs_gpus[2]]

BF16 = zg.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FOREACH = {"foreach": True}


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
def test_training_equals_fsdp2_bit_for_bit(mixed: bool) -> None:
    ours = run_on_gpus(with_zgraph, 2, [BF16] if mixed else [], "aot_eager", FOREACH)
    assert ours == run_on_gpus(with_fsdp2, 2, mixed)


def test_schedules_change_no_number() -> None:
    plain = run_on_gpus(with_zgraph, 2, [], "aot_eager", FOREACH)
    changed = [zg.Persist(max_numel=200), zg.Reshard(after_forward=False), zg.Prefetch(units=2)]
    assert run_on_gpus(with_zgraph, 2, changed, "aot_eager", FOREACH) == plain


def test_inductor_stays_within_compiler_rounding() -> None:
    eager = run_on_gpus(with_zgraph, 2, [zg.Prefetch()], "aot_eager", FOREACH)
    compiled = run_on_gpus(with_zgraph, 2, [zg.Prefetch()], "inductor", FOREACH)
    # fp32 throughout; Adam carries a few ulps of each gradient into each of five steps.
    for a, b in zip(eager, compiled, strict=True):
        assert b == pytest.approx(a, rel=1e-4)


def test_fused_foreach_and_loop_optimizers_agree() -> None:
    loop, foreach, fused = (
        run_on_gpus(with_zgraph, 2, [], "aot_eager", kind)
        for kind in ({"foreach": False}, {"foreach": True}, {"fused": True})
    )
    # The same formula in another order of operations: some ulps a step.
    for other in (foreach, fused):
        for a, b in zip(loop[0], other[0], strict=True):
            assert b == pytest.approx(a, rel=1e-5)


def _skips_when_one_rank_overflows() -> tuple[bool, float]:
    half = zg.MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = zg.compile(training.llama(), [zg.Partition(), half], mesh=training.mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
    scaler.scale(model(*training.batch(0))).backward()
    first = next(iter(model.parameters()))
    if torch.distributed.get_rank() == 1:
        first.grad.to_local().fill_(torch.inf)  # type: ignore[union-attr]
    before = first.full_tensor()  # type: ignore[attr-defined]
    scaler.step(optimizer)
    scaler.update()
    after = first.full_tensor()  # type: ignore[attr-defined]
    return bool(torch.equal(before, after)), scaler.get_scale()


def test_grad_scaler_skips_the_step_on_all_ranks_when_one_overflows() -> None:
    assert run_on_gpus(_skips_when_one_rank_overflows, 2) == [(True, 2.0**7)] * 2


class _Stack(nn.Module):
    """Eight equal layers of 4 MiB, large beside the allocator's rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


def _peak_while_sharding(device: str) -> tuple[int, int, int]:
    with torch.device(device):
        model = _Stack()
    torch.cuda.reset_peak_memory_stats()
    zg.compile(model, [zg.Partition()], mesh=training.mesh())
    unit = 1024 * 1024 * 4
    return torch.cuda.max_memory_allocated(), zg.inspect(model).shard_bytes, unit


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_sharding_needs_the_shards_and_one_unit(device: str) -> None:
    for peak, shards, unit in run_on_gpus(_peak_while_sharding, 2, device):
        assert shards <= peak <= shards + unit


def _peak_while_training(reshard: bool) -> int:
    passes = [zg.Partition(), zg.Reshard(after_forward=reshard), zg.Prefetch()]
    model = zg.compile(_Stack(), passes, mesh=training.mesh(), backend="aot_eager")
    x = torch.randn(16, 1024, device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(x).backward()
        model.zero_grad()
    return torch.cuda.max_memory_allocated()


def test_resharding_frees_gathered_units_during_training() -> None:
    freed = run_on_gpus(_peak_while_training, 2, True)
    kept = run_on_gpus(_peak_while_training, 2, False)
    # Kept are all eight units at the end of forward, against two at a time.
    assert kept[0] - freed[0] >= 4 * 1024 * 1024 * 4
