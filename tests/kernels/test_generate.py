"""The generator: what it writes, and how little of it."""

import torch

from tests.support.kernels import kernel, on_each_device
from zgraph_kernels import launch
from zgraph_kernels.generate import Flat, Kernel, Tensors
from zgraph_kernels.steps import Accumulate, Cast, Scale

CAST = Cast(torch.float32, torch.bfloat16)

ACCUMULATE = """\
import triton.language as tl


def accumulate(source, destination, numel: 'i64', scale):
    start = tl.program_id(0).to(tl.int64) * 2048
    full = start + 2048 <= numel
    lane = tl.arange(0, 2048)
    if full:
        index = start + lane
        x = tl.load(source + index)
        x = x.to(tl.float32) * scale
        x = tl.load(destination + index) + x
        tl.store(destination + index, x)
    else:
        index = start + lane
        part = index < numel
        filled = part
        x = tl.load(source + index, mask=filled, other=0)
        x = x.to(tl.float32) * scale
        x = tl.load(destination + index, mask=filled, other=0) + x
        tl.store(destination + index, x, mask=part)
"""


def test_a_kernel_reads_like_one_written_by_hand() -> None:
    steps = (Scale(torch.bfloat16), Cast(torch.float32, torch.float32), Accumulate())
    assert Kernel("accumulate", Flat(), Flat(), steps).text == ACCUMULATE


def test_equal_descriptions_share_one_function() -> None:
    one, two = (Kernel("pack", Tensors(4), Flat(), (CAST,)) for _ in range(2))
    assert one is not two and one.function() is two.function()
    assert (
        Kernel("pack", Tensors(4), Flat(), (CAST,), aligned=False).function() is not one.function()
    )


@on_each_device
def test_one_kernel_serves_every_shape(device: str) -> None:
    pack = kernel("pack")
    launch._plans.clear()
    for sizes in ([3, 5], [4000, 77, 1], [0, 2048, 9, 1]):
        tensors = [torch.randn(size, device=device) for size in sizes]
        numel = sum(sizes)
        offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        pack.triton(tensors, offsets, numel, torch.float16)
    calls = [call for plan in launch._plans.values() for call in plan]
    assert len(calls) == 3
    assert len({call.launcher for call in calls}) == 1
