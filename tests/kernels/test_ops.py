"""The ops as torch sees them: in traced graphs, under torch.compile, on streams, in CUDA graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zgraph_kernels as zk
from tests.support.kernels import HAS_GPU, assert_same_bits

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="needs 1 CUDA device(s)"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def calls(device: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """(overload, arguments) of each op."""
    ops = torch.ops.zgraph_kernels
    flat = torch.randn(600, device=device)
    grads = [torch.randn(20, 30, device=device), torch.randn(5, 7, device=device).t()]
    integers, scales = zk.quantize(flat, 8, 64)
    shard = [flat.clone(), flat * 2, torch.zeros_like(flat), torch.zeros_like(flat)]
    step = torch.ones((), device=device)
    low = torch.empty(600, device=device, dtype=torch.bfloat16)
    return {
        "pack": (ops.pack.default, (grads, [0, 608], 650, torch.bfloat16, 0.5)),
        "chunk_cat": (ops.chunk_cat.default, (grads, 3, torch.float32, 1.0)),
        "unpack": (ops.unpack.default, (flat, 2, [20, 20, 20, 10], [2, 2], torch.float32)),
        "accumulate": (ops.accumulate.default, (flat.clone(), flat.half(), 0.5)),
        "quantize": (ops.quantize.default, (flat, 4, 64)),
        "dequantize": (ops.dequantize.default, (integers, scales, 600, 8, 64, torch.float16)),
        "adamw_flat": (
            ops.adamw_flat.default,
            (*shard, step, low, 1e-3, None, 0.9, 0.999, 1e-8, 0.01),
        ),
    }


NAMES = sorted(calls("cpu"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_schema_fakes_and_tracing_agree_with_what_runs(name: str, device: str) -> None:
    overload, arguments = calls(device)[name]
    torch.library.opcheck(overload, arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_no_op_can_be_differentiated_by_mistake(device: str) -> None:
    weight = torch.ones(4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="pack has no derivative"):
        zk.pack([torch.ones(4, device=device), weight * 2], [0, 4], 8, torch.float32)
    with torch.no_grad():
        assert zk.pack([weight], [0], 4, torch.float32).sum() == 4
    with pytest.raises(RuntimeError, match="requires grad"):
        zk.accumulate(weight, torch.ones(4, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_autograd_notices_what_is_changed(device: str) -> None:
    weight = torch.ones(4, device=device, requires_grad=True)
    saved = torch.ones(4, device=device)
    loss = (weight * saved).sum()
    zk.accumulate(saved, torch.ones(4, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_holds_the_ops(device: str) -> None:
    def step(grads: list[Tensor], into: Tensor) -> Tensor:
        flat = zk.pack([grad * 2 for grad in grads], [0, 16], 24, torch.float32)
        zk.accumulate(into, flat, 0.5)
        return zk.dequantize(*zk.quantize(into, 8, 16), 24, 8, 16)

    grads = [torch.randn(4, 4, device=device), torch.randn(2, 4, device=device)]
    ours, theirs = torch.zeros(24, device=device), torch.zeros(24, device=device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(grads, ours), step(grads, theirs))
    assert_same_bits(ours, theirs)


def results(overload: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    """What a call returns, and what it writes."""
    returned = overload(*arguments)
    tensors = [returned] if isinstance(returned, Tensor) else list(returned or ())
    written = [a for a in arguments if isinstance(a, Tensor)]
    return [tensor.clone() for tensor in (*tensors, *written)]


class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("name", NAMES)
    def test_the_kernel_equals_the_definition(self, name: str) -> None:
        overload, arguments = calls("cuda")[name]
        copies = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, arguments)
        ours = results(overload, arguments)
        definition = "dequantize_reference" if name == "dequantize" else "reference"
        module = {"dequantize": "quantize", "adamw_flat": "adamw"}.get(name, name)
        reference = getattr(__import__(f"zgraph_kernels.{module}", fromlist=["x"]), definition)
        for a, b in zip(ours, results(reference, copies), strict=True):
            if name == "adamw_flat":  # whose sums torch adds in another order
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            else:
                assert_same_bits(a, b)

    @pytest.mark.parametrize("name", NAMES)
    def test_from_the_second_call_on_nothing_waits_or_is_copied(self, name: str) -> None:
        overload, arguments = calls("cuda")[name]
        overload(*arguments)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        torch.cuda.set_sync_debug_mode("error")
        # Without poison, which is a kernel of its own.
        torch.use_deterministic_algorithms(False)
        try:
            with torch.profiler.profile(activities=activities) as profile:
                overload(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        names = [event.name for event in profile.events()]
        assert any(n.startswith(("cuLaunchKernel", "cudaLaunchKernel")) for n in names), names
        assert not [n for n in names if "emcpy" in n or ("Synchronize" in n and "Device" not in n)]

    @pytest.mark.parametrize("name", NAMES)
    def test_a_cuda_graph_replays_the_call_on_new_values(self, name: str) -> None:
        overload, arguments = calls("cuda")[name]
        results(overload, arguments)  # compiles, and copies tables
        tensors = [t for t in torch.utils._pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
        before = [tensor.clone() for tensor in tensors]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = results(overload, arguments)
        for round_ in range(2):
            start = [t.mul(1 + round_).to(t.dtype) if t.is_floating_point() else t for t in before]
            for tensor, value in zip(tensors, start, strict=True):
                tensor.copy_(value)
            graph.replay()
            replayed = [tensor.clone() for tensor in captured]
            for tensor, value in zip(tensors, start, strict=True):
                tensor.copy_(value)
            for a, b in zip(replayed, results(overload, arguments), strict=True):
                assert_same_bits(a, b)

    def test_shapes_first_met_in_a_capture_are_refused(self) -> None:
        tensors = [torch.randn(size, device="cuda") for size in (3, 1237)]
        warm = [torch.randn(5, device="cuda"), torch.randn(6, device="cuda")]
        zk.pack(warm, [0, 5], 11, torch.float16)
        refused = pytest.raises(RuntimeError, match="call it once before the capture")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            zk.pack(tensors, [0, 3], 1240, torch.float16)

    @pytest.mark.parametrize("name", NAMES)
    def test_calls_follow_the_current_stream(self, name: str) -> None:
        overload, arguments = calls("cuda")[name]
        expected = results(
            overload, torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, arguments)
        )
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = torch.utils._pytree.tree_map_only(Tensor, torch.empty_like, arguments)
            torch.cuda._sleep(20_000_000)  # the values come late, and on this stream only
            pairs = zip(
                torch.utils._pytree.tree_leaves(late),
                torch.utils._pytree.tree_leaves(arguments),
                strict=True,
            )
            for into, value in pairs:
                if isinstance(into, Tensor):
                    into.copy_(value)
            ours = results(overload, late)
        torch.cuda.current_stream().wait_stream(stream)
        for a, b in zip(ours, expected, strict=True):
            assert_same_bits(a, b)

    def test_inductors_own_cuda_graphs_hold_the_ops(self) -> None:
        def step(grads: list[Tensor]) -> Tensor:
            return zk.pack([grad * 2 for grad in grads], [0, 4096], 5333, torch.bfloat16)

        compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):
            grads = [torch.randn(64, 64, device="cuda"), torch.randn(1237, device="cuda")]
            expected = torch.cat([(grad * 2).flatten() for grad in grads]).bfloat16()
            assert_same_bits(compiled(grads).clone(), expected)
            del grads, expected

    def test_gradients_that_move_need_no_new_table(self) -> None:
        offsets, numel = [0, 4096], 5000
        first: Callable[[], list[Tensor]] = lambda: [  # noqa: E731
            torch.randn(4096, device="cuda"),
            torch.randn(900, device="cuda"),
        ]
        zk.pack(first(), offsets, numel, torch.bfloat16)
        elsewhere = first()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours = zk.pack(elsewhere, offsets, numel, torch.bfloat16)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        zeros = torch.zeros(4, device="cuda")
        assert_same_bits(ours, torch.cat([*elsewhere, zeros]).bfloat16())
