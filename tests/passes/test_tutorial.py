"""The tutorial beside the passes says what its code does: all of it runs here."""

import contextlib
import importlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

import zgraph as zg
from tests.support.pool import run_ranks
from tests.support.training import mesh_of

TUTORIAL = Path(zg.passes.__file__ or "").with_name("README.md").read_text(encoding="utf-8")
PASSES = ("report_hidden", "BatchScatters", "GatherInFp32")


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
    return [text for name, text in fences if name == language]


def load(folder: str) -> ModuleType:
    """The tutorial's code as one module. It captures as it is imported, and prints."""
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("zgraph_tutorial")
    finally:
        sys.path.remove(folder)


@dataclass(frozen=True)
class Tutorial:
    """The folder of the tutorial's code as a module, the module, and what it printed."""

    folder: str
    module: ModuleType
    printed: str


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tutorial]:
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "zgraph_tutorial.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        module = load(str(folder))
    yield Tutorial(str(folder), module, printed.getvalue())
    del sys.modules["zgraph_tutorial"]


@cache
def quoted() -> list[str]:
    """The lines of output that the tutorial shows."""
    return [line for block in blocks("") for line in block.splitlines()]


def test_the_output_that_the_tutorial_shows_is_what_its_code_prints(tutorial: Tutorial) -> None:
    assert len(quoted()) > 5
    for line in quoted():
        assert line in tutorial.printed.splitlines()


def test_the_line_of_output_in_prose_is_right(tutorial: Tutorial) -> None:
    (quote,) = re.findall(r"`(all-gather [^`]*)`", TUTORIAL)
    last_program = tutorial.printed.rpartition("forward graph")[2]
    assert quote in last_program


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_is_shorter_than_forty_lines(name: str) -> None:
    (block,) = [b for b in blocks("python") if f"class {name}" in b or f"def {name}" in b]
    code, _, _ = block.partition("\n\n\npasses = ")
    code, _, _ = code.partition("\n\n\nzg.capture")
    assert len([line for line in code.splitlines() if line.strip()]) < 40


def test_batching_moves_scatters_and_nothing_else(tutorial: Tutorial) -> None:
    passes = [zg.Partition(), tutorial.module.BatchScatters(min_bytes=200_000)]
    captured = zg.capture(
        tutorial.module.Model(), (tutorial.module.tokens,), passes=passes, world_size=8
    )
    before, after = (captured.graph("backward", item) for item in ("partition", "batch_scatters"))
    assert sorted(before.text().splitlines()) != before.text().splitlines()
    starts = [[graph.unit_of(n) for n in graph.scatters()] for graph in (before, after)]
    assert starts[0] == starts[1]
    order = after.positions()
    three, two = after.scatters()[1:3]
    assert order[two] == order[three] + 1  # blocks.3 and blocks.2 start one after the other


def losses_with(folder: str, batched: bool) -> list[float]:
    """On a rank: a few steps of the tutorial's model."""
    tutorial = load(folder)
    torch.manual_seed(0)
    extra = [tutorial.BatchScatters(min_bytes=200_000)] if batched else []
    passes = [zg.Partition(), zg.Prefetch(1), *extra]
    model = zg.compile(tutorial.Model(), passes, mesh_of(), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        tokens = torch.arange(16 * step, 16 * step + 16).view(2, 8)
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_with_batched_scatters_is_bit_for_bit_the_same(tutorial: Tutorial) -> None:
    plain = run_ranks(losses_with, 2, tutorial.folder, False)
    assert run_ranks(losses_with, 2, tutorial.folder, True) == plain


def test_only_the_named_parameter_is_gathered_in_fp32(tutorial: Tutorial) -> None:
    passes = [
        zg.Partition(),
        zg.MixedPrecision(param_dtype=torch.bfloat16),
        tutorial.module.GatherInFp32(("tokens.weight",)),
    ]
    captured = zg.capture(
        tutorial.module.Model(), (tutorial.module.tokens,), passes=passes, world_size=8
    )
    graph = captured.graph("forward")
    dtypes = {graph.unit_of(node): node.meta["val"].dtype for node in graph.gathers()}
    assert dtypes.pop("tokens") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_an_unknown_parameter_is_refused_before_anything_is_traced(tutorial: Tutorial) -> None:
    passes = [zg.Partition(), zg.MixedPrecision("bf16"), tutorial.module.GatherInFp32(("lost",))]
    with pytest.raises(zg.PassError, match="no parameter lost"):
        zg.compile(tutorial.module.Model(), passes, backend="aot_eager")
    with pytest.raises(zg.PassError, match=r"requires precision.*add zg.MixedPrecision"):
        zg.compile(tutorial.module.Model(), [zg.Partition(), passes[2]], backend="aot_eager")
