"""What a model holds goes with it."""

import gc
import weakref

import pytest
import torch

import zgraph as zg
from tests.passes.toys import Block
from tests.runtime.ranks import on_ranks
from tests.support.training import mesh_of
from zgraph.backends.base import BackendName


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2)
def test_shards_are_freed_with_the_model(backend: BackendName) -> None:
    model = zg.compile(Block(8), [zg.Partition()], mesh=mesh_of(), backend=backend)
    model(torch.ones(2, 8)).sum().backward()
    shards = [weakref.ref(flat.data) for flat in model._zgraph.shards.values()]  # type: ignore[union-attr]
    del model

    gc.collect()
    assert [shard() for shard in shards] == [None] * len(shards)
