"""`zg.explain` counts the memory that the allocator measures, on one of eight ranks.

The other seven need not be there: torch's "fake" process group allocates what a collective returns
and sends nothing, so this rank's memory is what it would be.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import zgraph as zg
from experiments.byte_llama.model import Block, Llama, LlamaConfig
from tests.gpu.devices import needs_gpus
from zgraph.backends.base import BackendName
from zgraph.runtime.agree import Meeting

pytestmark = [pytest.mark.gpu, needs_gpus[1]]

# 0.95 billion parameters, of which a rank of eight holds 1.4 GiB with its optimizer states.
CONFIG = LlamaConfig.benchmark(max_length=2048)
RANKS = 8


@pytest.fixture(autouse=True)
def one_of_eight() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    # Nobody answers in a fake store.
    with mock.patch("zgraph.compile.Meeting", lambda ranks, rank: Meeting([rank], rank)):
        yield
    dist.destroy_process_group()
    torch.compiler.reset()
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class Peaks:
    """Peak bytes of forward and backward: counted, and allocated."""

    counted: int
    allocated: int


def peaks(backend: BackendName, reshard: bool, batch: int) -> Peaks:
    """The peak of the third step, between optimizer steps."""
    passes = [
        zg.Partition(),
        zg.Group.by_class(Block),
        zg.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        zg.Reshard(after_forward=reshard),
        zg.Prefetch(units=1),
    ]
    mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("shard",))
    with torch.device("meta"):
        model = Llama(CONFIG)
    model = zg.compile(model, passes, mesh=mesh, backend=backend)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, CONFIG.vocab, (batch, CONFIG.max_length), device="cuda")
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(tokens, tokens).backward()
        torch.cuda.synchronize()
        allocated = torch.cuda.max_memory_allocated()
        adamw.step()
        adamw.zero_grad()
    counted = zg.explain(model).memory.peak_bytes + tokens.numel() * tokens.dtype.itemsize
    return Peaks(counted, allocated)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_counted_peak_is_within_a_tenth_of_the_allocated(
    backend: BackendName, reshard: bool, batch: int
) -> None:
    measured = peaks(backend, reshard, batch)
    assert measured.counted == pytest.approx(measured.allocated, rel=0.1)
