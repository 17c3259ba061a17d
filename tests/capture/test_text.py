"""The text of graphs: what a line says, that nothing but the graph decides it, what passes do."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import zgraph as zg
from tests.capture import snapshot
from tests.capture.offline_models import HSDP, PASSES, STAGES, TOKENS, Single
from tests.passes.toys import Block, Tower
from zgraph.ir.graph import Stage
from zgraph.ir.show import collectives

ROOT = Path(__file__).resolve().parents[2]
BY_CLASS = zg.Group.by_class(Block)
MIXED = zg.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
AXES = {"replicate": 2, "shard": 4}


@cache
def single(*passes: zg.Pass) -> zg.Captured:
    return zg.capture(Single(), (torch.ones(2, 4),), passes=passes, world_size=2)


@cache
def block(*passes: zg.Pass) -> zg.Captured:
    """Two layers, the second of which is read in backward."""
    return zg.capture(Block(), (torch.ones(2, 4),), passes=passes, world_size=2)


@cache
def tower(*passes: zg.Pass, tied: bool = False) -> zg.Captured:
    """Two blocks of width 4 on two planned ranks."""
    model = Tower(depth=2)
    if tied:
        model.head.weight = model.embed.weight
    return zg.capture(model, (TOKENS,), passes=passes, world_size=2)


@cache
def hsdp() -> zg.Captured:
    """Two blocks in bf16 on a mesh of two axes, reduced in fp32: every kind of collective."""
    return zg.capture(Tower(depth=2), (TOKENS,), passes=(*HSDP, MIXED), mesh=AXES)


def all_texts() -> str:
    """Every text of one capture."""
    traced = tower(*PASSES)
    steps = [str(step.graph) for stage in STAGES for step in traced.steps(stage)]
    return "\n".join([str(traced), *steps, traced.diff("partition", "joint")])


def statements(text: str) -> list[str]:
    """The statements of a graph's text: no heading, no module names, no live bytes."""
    return [line.rpartition(" | ")[0].rstrip() for line in text.splitlines() if " | " in line][1:]


def column(text: str) -> list[int]:
    """The numbers at the right of a graph's text."""
    shown = [line.rpartition(" | ")[2] for line in text.splitlines() if " | " in line][1:]
    return [int(number.replace(",", "")) for number in shown]


# ------------------------------------------------------------------ nothing but the graph decides


def test_another_process_prints_the_same_bytes() -> None:
    code = "import sys, tests.capture.test_text as t; sys.stdout.write(t.all_texts())"
    # Hashes of strings are random in this process unless they were asked not to be.
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr.decode()
    assert ended.stdout == all_texts().encode()


def test_another_capture_prints_the_same() -> None:
    before = all_texts()
    tower.cache_clear()
    assert all_texts() == before


def test_no_address_is_printed() -> None:
    assert not re.search(r"0x[0-9a-f]{6}", all_texts())


# ------------------------------------------------------------------ what a line says


@pytest.mark.parametrize("stage", STAGES)
def test_each_node_is_one_line(stage: Stage) -> None:
    graph = hsdp().graph(stage)
    names = [node.name for node in graph.fx.nodes][:-1]
    shown = statements(graph.text())
    assert [line.partition(":")[0] for line in shown[:-1]] == names
    assert shown[-1].startswith("return [")


@pytest.mark.parametrize("stage", STAGES)
def test_the_right_column_is_the_gathered_bytes_alive(stage: Stage) -> None:
    graph = hsdp().graph(stage)
    assert column(graph.text()) == [total for _, total in graph.live_bytes()]
    assert max(column(graph.text())) == graph.peak_live_bytes() > 0


def test_a_collectives_line_says_unit_bytes_dtype_and_axis() -> None:
    words = {"gather": "all-gather", "scatter": "reduce-scatter", "reduce": "all-reduce"}
    seen = set()
    for stage in ("forward", "backward"):
        graph = hsdp().graph(stage)
        lines = {line.partition(":")[0]: line for line in statements(graph.text())}
        for start in graph.starts():
            buffer, kind = graph.buffer_of(start), str(start.target).split(".")[1]
            dtype, axis = ("bf16", "shard=4") if kind == "gather" else ("f32", "shard=4")
            size = buffer.shard_numel * 4 * (2 if dtype == "bf16" else 4)
            if kind == "reduce":
                size, axis = size // 4, "replicate=2"
            note = f"# {words[kind]} {buffer.unit}, {size:,} B {dtype}, {axis}"
            assert lines[start.name].endswith(note)
            seen.add(kind)
    assert seen == set(words)


@pytest.mark.parametrize("stage", STAGES)
def test_headings_are_names_of_the_models_modules(stage: Stage) -> None:
    lines = hsdp().graph(stage).text().splitlines()
    headings = [line[2:] for line in lines if line.startswith("# ")]
    names = {name for name, _ in Tower(depth=2).named_modules()}
    assert set(headings) <= names
    assert {"embed", "layers.0", "layers.1.up", "norm"} <= set(headings)
    # A heading stands where the module changes.
    assert all(one != following for one, following in pairwise(headings))


def test_printing_a_graph_prints_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    graph = tower(*PASSES).graph("forward")
    print(graph)
    assert capsys.readouterr().out == f"{graph.text()}\n"
    assert str(graph) == graph.text()
    assert graph.text().startswith("forward graph ")


def test_a_schedule_passes_diff_shows_only_lines_that_moved() -> None:
    for stage in ("forward", "backward"):
        diff = tower(*PASSES).diff("prefetch", stage).splitlines()
        code = [(line[0], line[1:].rpartition(" | ")[0].rstrip()) for line in diff]
        removed = sorted(text for tag, text in code if tag == "-")
        added = sorted(text for tag, text in code if tag == "+")
        assert removed == added != []


def test_a_diff_of_nothing_is_empty() -> None:
    passes = zg.Partition(), BY_CLASS, zg.Prefetch(1, backward_units=0)
    assert tower(*passes).diff("prefetch", "backward") == ""


# ------------------------------------------------------------------ what each shipped pass does


def shown_collectives(traced: zg.Captured) -> str:
    """All collectives of a step, one a line."""
    return "\n".join(
        line for stage in ("forward", "backward") for line in collectives(traced.graph(stage))
    )


def of_groups() -> str:
    groups = {
        "whole": zg.Group.whole(),
        "auto": zg.Group.auto(),
        "by_name": zg.Group.by_name([["embed", "head"], ["layers.0.up", "layers.1.up"]]),
    }
    return "\n\n".join(
        f"{name}\n{shown_collectives(tower(zg.Partition(), group))}"
        for name, group in groups.items()
    )


def of_mixed_precision() -> str:
    traced = single(zg.Partition(), MIXED)
    return f"{traced.graph('forward')}\n{shown_collectives(traced)}"


def of_reshard_false() -> str:
    passes = zg.Partition(), zg.Reshard(False)
    texts = str(block(*passes).graph("forward")), shown_collectives(tower(*passes, BY_CLASS))
    return "\n\n".join(texts)


def of_reshard_between_uses() -> str:
    passes = zg.Partition(), BY_CLASS, zg.Reshard(keep_between_uses=False)
    diff = tower(*passes, tied=True).diff("reshard", "forward")
    # Versions of torch number the copy of a view differently.
    return re.sub(r" +\| ", " | ", re.sub(r"\bt_\d+\b", "t_N", diff))


def of_partitions_schedule() -> str:
    traced = block(zg.Partition())
    return "\n\n".join(traced.diff("partition", stage) for stage in ("forward", "backward"))


SNAPSHOTS: dict[str, Callable[[], str]] = {
    "partition_joint": lambda: single(zg.Partition()).diff("partition", "joint"),
    "partition_schedule": of_partitions_schedule,
    "prefetch_forward": lambda: tower(*PASSES).diff("prefetch", "forward"),
    "reshard_between_uses": of_reshard_between_uses,
    "reshard_false": of_reshard_false,
    "group": of_groups,
    "persist": lambda: shown_collectives(tower(zg.Partition(), BY_CLASS, zg.Persist(max_numel=8))),
    "mixed_precision": of_mixed_precision,
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_what_a_pass_does_is_as_in_its_snapshot(name: str) -> None:
    snapshot.check(name, SNAPSHOTS[name]())


def test_every_snapshot_is_compared() -> None:
    assert {file.stem for file in snapshot.FOLDER.iterdir()} == set(SNAPSHOTS)


def test_a_missing_or_another_snapshot_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(snapshot.VARIABLE, raising=False)
    with pytest.raises(AssertionError, match=f"there is no snapshot .*; {snapshot.VARIABLE}=1"):
        snapshot.check("new", "one\ntwo", tmp_path)
    monkeypatch.setenv(snapshot.VARIABLE, "1")
    snapshot.check("new", "one\ntwo", tmp_path)
    monkeypatch.delenv(snapshot.VARIABLE)
    snapshot.check("new", "one\ntwo", tmp_path)
    with pytest.raises(AssertionError, match=r"not as in .*new.txt"):
        snapshot.check("new", "one\nthree", tmp_path)
