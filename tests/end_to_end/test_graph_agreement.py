"""Ranks compare the collectives of their graphs: a difference raises everywhere, and soon; a rank
that compiles alone holds nobody up."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph as zg
from tests.capture.steps import small_tower
from tests.passes.toys import Block
from tests.support.pool import run_ranks
from tests.support.training import mesh_of
from zgraph.config import Config
from zgraph.runtime import agree
from zgraph.runtime.agree import Meeting

# Far above what busy ranks need to reach a store, far below the minutes that the default waits.
SOON_S = 30.0
IMPATIENT = Config(graph_timeout_s=2.0)


@dataclass(frozen=True)
class Outcome:
    """How a step ended on one rank, and after how long."""

    error: str
    message: str
    seconds: float


def attempt(model: nn.Module, *args: object) -> Outcome:
    begin, error = time.monotonic(), None
    try:
        model(*args).square().mean().backward()
    except Exception as caught:
        error = caught
    return Outcome(type(error).__name__, str(error), time.monotonic() - begin)


def tokens(length: int = 4) -> Tensor:
    return (torch.arange(2 * length) % 8).view(2, length)


@zg.graph_pass(stage="schedule")
def swap_two_gathers_on_rank_one(graph: zg.Graph, plan: zg.Plan) -> None:
    if graph.stage == "forward" and dist.get_rank() == 1:
        first, second = graph.gathers()[:2]
        graph.move_before(second, first)


@zg.graph_pass(stage="joint")
def fail_on_rank_one(graph: zg.Graph, plan: zg.Plan) -> None:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("a pass with a mistake")


def step_with(name: str) -> Outcome:
    passes = [
        zg.Partition(),
        {"swap": swap_two_gathers_on_rank_one, "fail": fail_on_rank_one}[name],
    ]
    model = zg.compile(small_tower(), passes, mesh_of(), backend="aot_eager")
    return attempt(model, tokens())


def test_two_ranks_with_swapped_collectives_both_raise_with_the_difference() -> None:
    outcomes = run_ranks(step_with, 2, "swap")
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == "RankError"
        assert f"ranks {rank} and {1 - rank} have different collectives" in outcome.message
        assert "forward: all-gather embed" in outcome.message
        assert outcome.seconds < SOON_S


def test_when_a_pass_fails_on_one_rank_the_others_learn_its_error() -> None:
    zero, one, two = run_ranks(step_with, 3, "fail")
    assert "a pass with a mistake" in one.message and one.error != "RankError"
    for outcome in (zero, two):
        assert outcome.error == "RankError"
        assert "rank 1 failed in compiling a graph with ZeroDivisionError" in outcome.message
        assert outcome.seconds < SOON_S


def exchanges_of_one_rank_recompiling() -> tuple[list[int], int, list[float]]:
    """Numbers of exchanges after each step, frames, and losses; rank 1's lengths differ."""
    model = zg.compile(
        small_tower(), [zg.Partition()], mesh_of(), backend="aot_eager", dynamic=False
    )
    counts, losses = [], []
    with mock.patch.object(Meeting, "_compare", autospec=True, side_effect=Meeting._compare) as met:
        for step in range(3):
            length = 4 + step if dist.get_rank() == 1 else 4
            loss = model(tokens(length)).square().mean()
            loss.backward()
            counts.append(met.call_count)
            losses.append(loss.item())
    return counts, len(zg.inspect(model).frames), losses


def test_a_rank_that_recompiles_alone_asks_nobody_and_the_others_go_on() -> None:
    results = run_ranks(exchanges_of_one_rank_recompiling, 2)
    assert [frames for _, frames, _ in results] == [1, 3]
    for counts, _, losses in results:
        assert counts == [1, 1, 1]  # one exchange for the first graph, none for what followed
        assert all(loss == loss for loss in losses)


class Forked(nn.Module):
    """Runs one of two blocks, by an argument: ranks with different arguments must not meet."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return self.left(x) if left else self.right(x)


def take_different_branches() -> Outcome:
    passes = [zg.Partition(), zg.Group.by_class(Block)]
    model = zg.compile(Forked(), passes, mesh_of(), backend="aot_eager")
    return attempt(model, torch.ones(2, 4), dist.get_rank() == 0)


def test_ranks_that_take_different_branches_raise_instead_of_waiting_for_each_other() -> None:
    for outcome in run_ranks(take_different_branches, 2):
        assert outcome.error == "RankError"
        assert "all-gather left" in outcome.message and "all-gather right" in outcome.message
        assert outcome.seconds < SOON_S


def train_until_rank_one_leaves_the_path() -> None:
    """In a process of its own: rank 1 takes another branch once both have trained on one."""
    dist.init_process_group("gloo")
    passes = [zg.Partition(), zg.Group.by_class(Block)]
    model = zg.compile(Forked(), passes, mesh_of(), backend="aot_eager")
    model(torch.ones(2, 4), True).sum().backward()
    with mock.patch.object(agree, "config", IMPATIENT):
        model(torch.ones(2, 4), dist.get_rank() == 0).sum().backward()


def test_a_rank_alone_with_new_collectives_raises_and_its_end_frees_the_others() -> None:
    code = f"from {__name__} import train_until_rank_one_leaves_the_path as run; run()"
    with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {**os.environ, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**common, "RANK": str(rank), "PYTHONPATH": os.pathsep.join(sys.path)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            errors = [process.communicate(timeout=90)[1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    assert all(process.returncode for process in ranks)
    assert "rank 0 compiled no graph to match within 2 s" in errors[1]
    assert "all-gather right" in errors[1]
    assert "RankError" not in errors[0]  # its connection to rank 1 was closed
