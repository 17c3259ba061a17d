"""A schedule changes time and memory, never numbers: random models, random legal pass lists.

The reference is the plainest pass list. At two ranks every sum over ranks has two terms, so runs
have the same bits; at three, an all-reduce and a reduce-scatter may add in different orders, which
moves a tensor by some 1e-7 of its norm in three steps.
"""

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import zgraph as zg
from tests.support.pool import run_ranks
from tests.support.stacks import Blocks, blocks, build_stack, schedules, stack_batches
from tests.support.training import Run, assert_close, assert_same_bits, mesh_of, train

STEPS = 3
PLAINEST = [zg.Partition()]
HALF = zg.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train_each_way(described: Blocks, *pass_lists: list[zg.Pass]) -> list[Run]:
    mesh, data = mesh_of(), stack_batches(STEPS, dist.get_rank(), dist.get_world_size())
    runs = []
    for passes in pass_lists:
        model = build_stack(described)
        runs.append(train(zg.compile(model, passes, mesh, backend="aot_eager"), data))
    return runs


@given(data=st.data(), described=blocks, half=st.booleans())
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
def test_schedules_never_change_a_bit_at_two_ranks(
    data: st.DataObject, described: Blocks, half: bool
) -> None:
    precision: list[zg.Pass] = [HALF] if half else []
    passes = data.draw(schedules(described)) + precision
    for plain, scheduled in run_ranks(train_each_way, 2, described, PLAINEST + precision, passes):
        assert_same_bits(scheduled, plain)


@given(data=st.data(), described=blocks)
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
def test_schedules_change_nothing_but_rounding_at_three_ranks(
    data: st.DataObject, described: Blocks
) -> None:
    passes = data.draw(schedules(described))
    for plain, scheduled in run_ranks(train_each_way, 3, described, PLAINEST, passes):
        assert_close(scheduled, plain, 1e-6)
