"""When ranks do not agree, every rank says why, soon, and nothing hangs."""

import time
from dataclasses import dataclass
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zgraph as zg
from tests.support.models import Mlp, build
from tests.support.pool import renew_group, run_ranks
from tests.support.training import mesh_of, own_batches, train
from zgraph.config import Config
from zgraph.runtime import agree

# Far above what three busy ranks need to reach a store, far below the minute that is promised.
SOON_S = 20.0
IMPATIENT = Config(agree_timeout_s=1.0)


@dataclass(frozen=True)
class Outcome:
    """How compiling ended on one rank, and whether the model still is what it was."""

    error: str
    message: str
    seconds: float
    untouched: bool


def meet() -> DeviceMesh:
    """A mesh of ranks that are all ready now."""
    mesh = mesh_of()
    dist.barrier()
    return mesh


def attempt(mesh: DeviceMesh, model: Mlp, passes: list[zg.Pass]) -> Outcome:
    before = list(model.parameters())
    begin, error = time.monotonic(), None
    try:
        zg.compile(model, passes, mesh, backend="aot_eager")
    except Exception as caught:
        error = caught
    seconds = time.monotonic() - begin
    after = list(model.parameters())
    untouched = all(one is other for one, other in zip(before, after, strict=True))
    return Outcome(type(error).__name__, str(error), seconds, untouched)


def compile_different_widths() -> Outcome:
    return attempt(meet(), Mlp(width=16 if dist.get_rank() == 2 else 12), [zg.Partition()])


def compile_different_passes() -> Outcome:
    units = dist.get_rank()
    return attempt(meet(), Mlp(), [zg.Partition(), zg.Prefetch(units=units)])


def compile_with_a_mistake_on_one_rank() -> Outcome:
    passes: list[zg.Pass] = [zg.Partition()]
    if dist.get_rank() == 1:
        passes.append(zg.Group.by_class("MlpBlok"))
    return attempt(meet(), Mlp(), passes)


def compile_without_rank_zero() -> Outcome | None:
    mesh = meet()
    if dist.get_rank() == 0:
        return None
    with mock.patch.object(agree, "config", IMPATIENT):
        return attempt(mesh, Mlp(), [zg.Partition()])


def compile_late_on_rank_zero() -> Outcome:
    mesh = meet()
    if dist.get_rank() == 0:
        dist.barrier()  # the others have given up
    with mock.patch.object(agree, "config", IMPATIENT):
        outcome = attempt(mesh, Mlp(), [zg.Partition()])
    if dist.get_rank() != 0:
        dist.barrier()
    return outcome


def test_ranks_with_different_models_all_name_the_first_difference() -> None:
    for rank, outcome in enumerate(run_ranks(compile_different_widths, 3)):
        assert outcome.error == "RankError"
        assert "different plans" in outcome.message
        assert "enter.weight [12, 10]" in outcome.message
        assert "enter.weight [16, 10]" in outcome.message
        assert f"rank {rank} has" in outcome.message
        assert outcome.untouched
        assert outcome.seconds < SOON_S


def test_ranks_with_different_passes_all_name_the_first_difference() -> None:
    for outcome in run_ranks(compile_different_passes, 2):
        assert outcome.error == "RankError"
        assert "prefetch{units=0}" in outcome.message
        assert "passes: partition" in outcome.message
        assert outcome.untouched
        assert outcome.seconds < SOON_S


def test_when_one_rank_fails_the_others_name_it_and_its_error() -> None:
    outcomes = run_ranks(compile_with_a_mistake_on_one_rank, 3)
    assert [outcome.error for outcome in outcomes] == ["RankError", "PassError", "RankError"]
    for outcome in outcomes:
        assert "MlpBlok" in outcome.message
        assert "MlpBlock" in outcome.message
        assert outcome.untouched
        assert outcome.seconds < SOON_S
    assert "rank 1 failed" in outcomes[0].message
    assert "rank 1 failed" in outcomes[2].message


def test_a_rank_that_never_comes_is_named_after_the_timeout() -> None:
    try:
        missing, *waiting = run_ranks(compile_without_rank_zero, 3)
    finally:
        renew_group()  # ranks have counted different numbers of agreements
    assert missing is None
    for outcome in waiting:
        assert outcome.error == "RankError"
        assert "rank 0 did not reach zg.compile within 1 s" in outcome.message
        assert "ZGRAPH_AGREE_TIMEOUT_S" in outcome.message
        assert outcome.untouched
        assert 1.0 <= outcome.seconds < SOON_S


def test_a_rank_that_comes_too_late_does_not_go_on_alone() -> None:
    late, waiting = run_ranks(compile_late_on_rank_zero, 2)
    assert "rank 0 did not reach zg.compile within 1 s" in waiting.message
    assert late.error == "RankError"
    assert "rank 1 failed" in late.message
    assert waiting.message in late.message
    assert late.untouched


def compile_again_after_a_refusal() -> bool:
    refused = compile_different_passes()
    model = zg.compile(build("mlp"), [zg.Partition()], mesh_of(), backend="aot_eager")
    run = train(model, own_batches("mlp"))
    return refused.error == "RankError" and all(loss == loss for loss in run.losses)


def test_after_a_refusal_the_same_ranks_can_compile() -> None:
    assert run_ranks(compile_again_after_a_refusal, 2) == [True, True]
