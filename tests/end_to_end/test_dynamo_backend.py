"""`torch.compile(model, backend="zgraph")`: found through packaging, and equal to plain PyTorch."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import zgraph as zg
from tests.support.models import batches, build
from tests.support.training import STEPS, assert_same_bits, plain_run, train
from zgraph.backends.dynamo import zgraph as zgraph_backend

ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch
import zgraph as zg
from tests.support.models import batches, build
from tests.support.training import STEPS, assert_same_bits, plain_run, train

torch.set_num_threads(1)
seen = []
note = zg.graph_pass(stage="schedule")(lambda graph, plan: seen.append(graph.stage))
model = build("mlp")
model.compile(backend="zgraph", options={"passes": [note], "backend": "aot_eager"})
assert_same_bits(train(model, batches("mlp", STEPS)), plain_run("mlp"))
assert seen == ["forward", "backward"], seen
"""


def install_metadata(site: Path) -> None:
    """What an installed zgraph tells packaging about its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(header)
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def test_torch_compile_finds_the_backend_of_an_installed_zgraph(tmp_path: Path) -> None:
    install_metadata(tmp_path)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_graph_passes_see_forward_and_backward_and_change_no_bit() -> None:
    torch._dynamo.reset()
    seen: list[str] = []
    note = zg.graph_pass(stage="schedule")(lambda graph, plan: seen.append(graph.stage))
    model = build("mlp")
    model.compile(backend=zgraph_backend, options={"passes": [note], "backend": "aot_eager"})
    assert_same_bits(train(model, batches("mlp", STEPS)), plain_run("mlp"))
    assert seen == ["forward", "backward"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pases": []}, "no option 'pases'.*passes"),
        ({"mesh": None}, "zg.compile"),
        ({"backend": "jit"}, "expected one of auto, inductor, aot_eager"),
        ({"passes": [zg.MixedPrecision("bf16")]}, "gathers|zg.compile"),
    ],
    ids=["misspelt", "mesh", "backend", "precision"],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    torch._dynamo.reset()
    model = build("mlp")
    model.compile(backend=zgraph_backend, options=options)
    with pytest.raises(Exception, match=message):
        model(*batches("mlp", 1)[0])
