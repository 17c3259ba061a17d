"""An 8B model is captured on a laptop: no weights, no ranks, little memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90
LIMIT_BYTES = 2 << 30

# In a process of its own, since the peak of this one's memory is that of all tests before.
PROGRAM = """
import json, resource, time

import torch

import zgraph as zg
from experiments.byte_llama.model import Llama, LlamaConfig

config = LlamaConfig(vocab=128256, dim=4096, layers=32, heads=32, ffn=14336, max_length=4096)
with torch.device("meta"):
    model = Llama(config)
    tokens = torch.zeros(1, 4096, dtype=torch.long)
passes = [
    zg.Partition(),
    zg.Group.auto(),
    zg.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    zg.Reshard(),
    zg.Prefetch(1),
]
start = time.perf_counter()
traced = zg.capture(model, (tokens, tokens), passes=passes, world_size=1024)
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "numel": sum(parameter.numel() for parameter in model.parameters()),
    "units": len(traced.plan.units),
    "gathers": [len(traced.graph(stage).gathers()) for stage in ("forward", "backward")],
    "scatters": len(traced.graph("backward").scatters()),
}))
"""


def test_an_8b_model_of_32_blocks_is_captured_for_1024_ranks() -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=4 * LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["seconds"] < LIMIT_S and found["peak_bytes"] < LIMIT_BYTES, found
    assert 8.8e9 < found["numel"] < 8.9e9  # keys and values have as many heads as queries
    # The blocks, and what lies before and behind them.
    assert found["units"] == found["scatters"] == 34
    # Backward needs no embedding.
    assert found["gathers"] == [34, 33]
