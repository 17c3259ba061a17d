"""A changed pass never meets a graph that was compiled before the change, caches on."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import zgraph as zg
from tests.support.pool import run_ranks
from tests.support.training import mesh_of

# One file, one function, one line number: only the constant in its body differs.
PASS = """
import torch
import zgraph as zg

@zg.graph_pass(stage="joint", changes_compute=True)
def scale(graph, plan):
    out = graph.outputs()
    mul, end = torch.ops.aten.mul.Tensor, graph.output()
    out[0] = graph.call(mul, out[0], {factor}, before=end, role="scale")
    graph.set_outputs(out)
"""

RUN = """
import torch, zgraph as zg
from torch import nn
from torch._dynamo.utils import counters
from changing import scale

torch.manual_seed(0)
model = zg.compile(nn.Linear(4, 4), [zg.Partition(), scale], backend="inductor")
with torch.no_grad():
    value = model(torch.ones(2, 4)).sum().item()
print(value, counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


def run_in_a_new_process(folder: Path, factor: int) -> tuple[float, int, int]:
    """The model's output, and the hits and misses of Inductor's cache, which lies in `folder`."""
    (folder / "changing.py").write_text(PASS.format(factor=factor), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    value, hits, misses = done.stdout.split()
    return float(value), int(hits), int(misses)


def test_a_new_process_reuses_the_graph_of_the_same_pass_and_never_that_of_another(
    tmp_path: Path,
) -> None:
    first, _, misses = run_in_a_new_process(tmp_path, factor=2)
    again, hits, _ = run_in_a_new_process(tmp_path, factor=2)
    changed, *_ = run_in_a_new_process(tmp_path, factor=3)
    assert misses and hits  # the cache works
    assert again == first
    assert changed == pytest.approx(first * 1.5, rel=1e-6)


class Scale(zg.Pass):
    """A pass with an option, set on the instance."""

    name = "scale"
    changes_compute = True

    def __init__(self, factor: float) -> None:
        object.__setattr__(self, "factor", factor)

    def joint(self, graph: zg.Graph, plan: zg.Plan) -> None:
        factor: float = self.factor  # type: ignore[attr-defined]
        outputs = graph.outputs()
        mul = torch.ops.aten.mul.Tensor
        outputs[0] = graph.call(mul, outputs[0], factor, before=graph.output(), role="scale")
        graph.set_outputs(outputs)


def test_another_option_in_the_same_process_is_another_graph() -> None:
    def run(factor: float) -> float:
        torch.manual_seed(0)
        model = zg.compile(nn.Linear(4, 4), [zg.Partition(), Scale(factor)], backend="inductor")
        with torch.no_grad():
            return model(torch.ones(2, 4)).sum().item()

    one, two, again = run(1.0), run(2.0), run(1.0)
    assert two == pytest.approx(2 * one, rel=1e-6)
    assert again == one


def orders() -> list[list[str]]:
    """On a rank: gathers of a forward graph, under two options of a schedule pass."""
    found = []
    for units in (0, 2):
        torch.manual_seed(0)
        model = zg.compile(
            nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))),
            [zg.Partition(), zg.Group.auto(), zg.Prefetch(units)],
            mesh_of(),
            backend="inductor",
        )
        model(torch.ones(2, 8)).sum().backward()
        (record,) = zg.inspect(model).graphs("forward")
        lines = record.text.splitlines()
        found.append([line.split(":")[0] for line in lines if "gather" in line.split(":")[0]])
    return found


def test_another_option_of_a_shipped_pass_is_another_schedule() -> None:
    for without, ahead in run_ranks(orders, 2):
        assert sorted(without) == sorted(ahead)
        assert without != ahead
