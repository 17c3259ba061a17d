"""The command `zgraph explain`: tables, texts, diffs, a page, and errors for people."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from zgraph.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import torch
from torch import nn

import widths  # a file beside this one
import zgraph as zg


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(widths.WIDTH, 8), nn.Linear(8, widths.WIDTH)

    def forward(self, x, scale=1.0):
        return self.second(self.first(x)) * scale


class Broken(Model):
    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def build():
    model = Model()
    assert all(parameter.is_meta for parameter in model.parameters())
    return model, (torch.ones(2, widths.WIDTH),)


def keywords():
    return Model(), (torch.ones(2, widths.WIDTH),), {"scale": 2.0}


def broken():
    return Broken(), (torch.ones(2, widths.WIDTH),)


def model_only():
    return Model()


number = 3
units = zg.Group.by_name([["first"], ["second"]])
passes = [zg.Partition(), units, zg.Prefetch(1)]


def hybrid():
    return [zg.Partition(replicate="replicate"), units]
"""


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with train.py and its neighbour."""
    path, before = tmp_path_factory.mktemp("command"), Path.cwd()
    known, paths = set(sys.modules), list(sys.path)
    (path / "train.py").write_text(TRAIN)
    (path / "widths.py").write_text("WIDTH = 4\n")
    os.chdir(path)
    yield path
    os.chdir(before)
    assert sys.path == paths
    for name in ("train", "widths", *(set(sys.modules) - known)):
        if getattr(sys.modules.get(name), "__file__", "") in map(str, path.rglob("*.py")):
            del sys.modules[name]


@pytest.fixture
def explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs `zgraph explain …`, which must succeed; returns what it printed."""
    monkeypatch.setenv("COLUMNS", "120")  # rich cuts tables that a terminal is too narrow for

    def run(*arguments: str) -> str:
        assert main(["explain", *arguments]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        return shown.out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `zgraph explain …`, which must fail with status 1; returns its error."""

    def run(*arguments: str) -> str:
        assert main(["explain", *arguments]) == 1
        error = capsys.readouterr().err
        assert error.startswith("zgraph: ") and error.count("\n") == 1
        return error

    return run


def title_of(printed: str) -> str:
    """The title of the first table, which may be wrapped."""
    return " ".join(printed.split("┏")[0].split())


def test_it_prints_tables_of_units_collectives_and_memory(explained: Callable[..., str]) -> None:
    printed = explained("train.py:build", "--passes", "train.py:passes", "--world-size", "8")
    groups = "group_by_name{groups=[[first] [second]]}"
    assert title_of(printed) == f"plan: partition reshard {groups} prefetch, over shard=8"
    assert "collectives of one step" in printed and "memory of one rank" in printed
    rows = [line.replace("│", " ").split() for line in printed.splitlines()]
    # 40 elements of `first`, in eight shards of 16-byte pieces.
    assert ["first", "40", "32", "256"] in rows
    assert ["forward", "first", "all-gather", "shard=8", "1", "224"] in rows


def test_a_module_on_the_path_is_named_without_py(explained: Callable[..., str]) -> None:
    printed = explained("train:build", "--passes", "train:hybrid", "--mesh", "replicate=2,shard=4")
    assert title_of(printed).endswith(", over replicate=2 × shard=4")
    assert "all-reduce" in printed


def test_a_file_is_found_by_its_path(folder: Path, explained: Callable[..., str]) -> None:
    printed = explained(f"{folder}/train.py:keywords", "--text", "forward")
    assert "aten.mul(addmm_1, 2.0)" in printed


def test_texts_and_diffs_follow_the_tables(explained: Callable[..., str]) -> None:
    shown = ["--text=joint", "--text=backward", "--diff=prefetch", "--diff=partition"]
    printed = explained("train.py:build", "--passes=train.py:passes", "--world-size=2", *shown)
    marks = [
        "memory of one rank",
        "joint graph  ",
        "backward graph  ",
        "prefetch in the forward graph\n@ model",
        "prefetch in the backward graph\n",
        "partition in the joint graph\n@ model",
        "partition in the forward graph\n",
    ]
    places = [printed.index(mark) for mark in marks]
    assert places == sorted(places)


def test_texts_are_of_every_frame_that_has_the_stage(explained: Callable[..., str]) -> None:
    printed = explained("train.py:broken", "--text", "forward")
    assert printed.count("forward graph  ") == 2
    assert "\n# first\n" in printed and "\n# second\n" in printed


def test_the_page_is_written_to_the_file(folder: Path, explained: Callable[..., str]) -> None:
    printed = explained("train.py:build", "--world-size", "2", "--html", "page.html")
    assert printed.endswith("wrote page.html\n")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>") and "Model" in page


def test_the_optimizer_decides_what_its_states_take(explained: Callable[..., str]) -> None:
    def states(optimizer: str) -> list[str]:
        printed = explained("train.py:build", "--optimizer", optimizer)
        rows = [line.split("│") for line in printed.splitlines()]
        return [cell.strip() for row in rows if "optimizer states" in str(row) for cell in row]

    assert states("adamw")[3] == f"{2 * 76 * 4}"
    assert states("sgd")[3] == "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build"], "'build': expected file.py:name or module:name"),
        (["missing.py:build"], "there is no file "),
        (["missing:build"], "No module named 'missing'"),
        (["train.py:biuld"], "train.py has no 'biuld'; nearest: build"),
        (["train.py:number"], "train.py:number is a int; expected a function that builds"),
        (["train.py:model_only"], "train.py:model_only returned a Model; expected (model, args)"),
        (["train.py:build", "--passes", "train.py:number"], "passes is a int; expected a list"),
        (["train.py:build", "--world-size", "2", "--mesh", "shard=2"], "both mesh and world_size"),
        (["train.py:build", "--world-size", "0"], "shard=0: expected a number of ranks"),
        (["train.py:build", "--text", "inference"], "no inference graph; it has joint, forward"),
        (["train.py:build", "--diff", "prefetch"], "no pass called 'prefetch' edited a graph"),
        (["train.py:build", "--html", "no/folder/page.html"], "cannot write no/folder/page.html"),
    ],
)
def test_what_cannot_work_is_one_line_on_stderr(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["explain"], "required: model"),
        (["explain", "train.py:build", "--mesh", "shard"], "'shard': expected axis=ranks, such as"),
        (["explain", "train.py:build", "--world-size", "two"], "invalid int value: 'two'"),
        (["explain", "train.py:build", "--text", "sideways"], "invalid choice: 'sideways'"),
        (["explain", "train.py:build", "--device-type", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_a_wrong_command_line_exits_with_its_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: zgraph") and message in error


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch can trace for CUDA")
def test_cuda_needs_a_torch_that_was_built_with_it(refused: Callable[..., str]) -> None:
    assert "built without CUDA" in refused("train.py:build", "--device-type", "cuda")


def test_a_file_is_not_mistaken_for_a_module_of_its_name(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "json.py").write_text("def build():\n    return 'mine'\n")
    assert "json.py:build returned a str" in refused(f"{tmp_path}/json.py:build")
    assert sys.modules["json"] is json


def test_python_m_zgraph_explain_does_so_in_a_process_of_its_own(folder: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    ended = subprocess.run(
        [sys.executable, "-m", "zgraph", "explain", "train.py:build", "--diff", "partition"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "plan: partition group_auto reshard, over one rank" in ended.stdout
    assert "+gather_model" in ended.stdout
