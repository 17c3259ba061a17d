"""Graphs lowered to zgraph's kernels train as those lowered to torch's do.

`options={"kernels": "triton"}` is for CUDA; what it lowers to also runs on the CPU, by the kernels'
definitions. tests/gpu/test_kernels_in_training.py runs the kernels.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zgraph as zg
from tests.support.models import batches, build
from tests.support.pool import run_ranks
from tests.support.training import STEPS, Run, assert_close, assert_same_bits, mesh_of, train
from zgraph.backends.base import BackendName
from zgraph.lowering import Kernels, choose_kernels

POLICIES = {
    "fp32": zg.MixedPrecision(),
    "bf16, reduced in fp32": zg.MixedPrecision(torch.bfloat16, torch.float32),
    # fp16 is divided before the sum too, which the pack does on the way.
    "fp16": zg.MixedPrecision(torch.float16, torch.float16),
}


def _train_with(kernels: Kernels, policy: str, backend: BackendName) -> Run:
    data = batches("llama", STEPS, dist.get_rank(), dist.get_world_size())
    passes = [zg.Partition(), zg.Group.auto(), POLICIES[policy], zg.Prefetch()]
    with mock.patch("zgraph.compile.choose_kernels", lambda options, device: kernels):
        return train(zg.compile(build("llama"), passes, mesh_of(), backend=backend), data)


@pytest.mark.parametrize("policy", POLICIES)
def test_kernels_change_no_bit(policy: str) -> None:
    ours = run_ranks(_train_with, 2, "triton", policy, "aot_eager")
    theirs = run_ranks(_train_with, 2, "torch", policy, "aot_eager")
    for mine, its in zip(ours, theirs, strict=True):
        assert_same_bits(mine, its)


def test_inductor_calls_them() -> None:
    ours = run_ranks(_train_with, 2, "triton", "fp32", "inductor")
    theirs = run_ranks(_train_with, 2, "torch", "fp32", "inductor")
    for mine, its in zip(ours, theirs, strict=True):
        assert_close(mine, its, 1e-6)


@pytest.mark.parametrize(("kernels", "packs"), [("triton", 4), ("torch", 0)])
def test_lowered_graphs_hold_one_kernel_a_scatter(kernels: Kernels, packs: int) -> None:
    with mock.patch("zgraph.capture.choose_kernels", lambda options, device: kernels):
        passes = [zg.Partition(), zg.Group.by_name(["0", "1", "2", "3"])]
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        captured = zg.capture(model, (torch.ones(2, 8),), passes=passes, world_size=2)
    backward = captured.graph("backward", after="lower")
    assert len(backward.nodes(torch.ops.zgraph_kernels.pack.default)) == packs


@pytest.mark.parametrize(
    ("options", "device", "says"),
    [
        ({"kernel": "torch"}, "cuda", "options has kernel: the only one is kernels"),
        ({"kernels": "cuda"}, "cuda", '\'cuda\': expected "triton" or "torch"'),
        ({"kernels": "triton"}, "cpu", "needs CUDA devices, and the model is on cpu"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: dict[str, str], device: str, says: str
) -> None:
    with pytest.raises(zg.PassError, match=says):
        choose_kernels(options, device)


def test_the_model_is_left_as_it_was_when_options_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(zg.PassError, match="needs CUDA devices"):
        zg.compile(model, [zg.Partition()], options={"kernels": "triton"})
    assert type(model) is torch.nn.Linear and type(model.weight) is torch.nn.Parameter


def test_the_device_decides_where_nothing_is_said() -> None:
    assert choose_kernels(None, "cuda") == "triton"
    assert choose_kernels({}, "cpu") == choose_kernels({"kernels": "torch"}, "cuda") == "torch"
