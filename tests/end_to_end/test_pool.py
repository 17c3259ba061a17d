"""The pool that runs multi-process tests."""

import os
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import RankFailed, RanksTimedOut, renew_group, run_ranks


@dataclass(frozen=True)
class Doubled:
    """A class of this file, to be sent both ways."""

    value: int


def describe_group(offset: int) -> tuple[int, int, int, int]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank() + offset, dist.get_world_size(), int(total), torch.get_num_threads()


def process_id() -> int:
    return os.getpid()


def first_random_number() -> float:
    return torch.rand(()).item()


def double(given: Doubled) -> Doubled:
    return Doubled(2 * given.value)


def add_ones(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.add_(1)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise RuntimeError("no shard for you")
    dist.barrier()


def fail_everywhere() -> None:
    raise KeyError(f"rank {dist.get_rank()}")


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def test_ranks_run_in_a_group_of_the_size_asked_for_and_reply_in_order() -> None:
    for size in (2, 3, 2, 1):
        sum_of_ranks = size * (size - 1) // 2
        expected = [(10 + rank, size, sum_of_ranks, 1) for rank in range(size)]
        assert run_ranks(describe_group, size, 10) == expected


def test_workers_are_reused_and_seeded_alike_each_time() -> None:
    assert run_ranks(process_id, 2) == run_ranks(process_id, 2)
    assert run_ranks(first_random_number, 2) == run_ranks(first_random_number, 2)


def test_a_renewed_group_still_meets() -> None:
    before = run_ranks(process_id, 2)
    renew_group()
    assert run_ranks(process_id, 2) == before


def test_classes_of_a_test_file_are_sent_both_ways() -> None:
    assert run_ranks(double, 2, Doubled(4)) == [Doubled(8), Doubled(8)]


def test_tensors_are_sent_by_value() -> None:
    sent = torch.zeros(3)
    first, second = run_ranks(add_ones, 2, sent)
    assert first.tolist() == second.tolist() == [1.0, 1.0, 1.0]
    assert sent.tolist() == [0.0, 0.0, 0.0]


def test_a_rank_that_raises_while_another_waits_is_named_and_all_recover() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 failed[\s\S]*no shard for you"):
        run_ranks(fail_on, 2, 1)
    assert [size for _, size, _, _ in run_ranks(describe_group, 2, 0)] == [2, 2]


def test_workers_outlive_an_error_that_every_rank_raises() -> None:
    before = run_ranks(process_id, 2)
    with pytest.raises(RankFailed, match="KeyError") as caught:
        run_ranks(fail_everywhere, 2)
    assert sorted(caught.value.tracebacks) == [0, 1]
    assert run_ranks(process_id, 2) == before


def test_a_rank_that_hangs_is_shown_with_its_stack_and_replaced() -> None:
    before = run_ranks(process_id, 2)
    with pytest.raises(RanksTimedOut, match=r"ranks \[1\][\s\S]*sleep_on"):
        run_ranks(sleep_on, 2, 1, timeout_s=1.0)
    assert not set(run_ranks(process_id, 2)) & set(before)


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankFailed, match="exit code 7"):
        run_ranks(die_on, 2, 0)
    assert len(run_ranks(process_id, 2)) == 2


def test_functions_inside_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="top-level"):
        run_ranks(lambda: None, 2)
