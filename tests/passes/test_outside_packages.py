"""Passes from a package that knows zgraph, and that zgraph does not know, work by import alone."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import zgraph as zg
from tests.passes.toys import Tower
from tests.support.pool import run_ranks
from tests.support.training import mesh_of

FUNCTION = """
import zgraph as zg

seen = []

@zg.graph_pass(stage="schedule")
def gather_everything_first(graph, plan):
    first, *others = graph.gathers()
    for gather in reversed(others):
        graph.move_after(gather, first)
    seen.append((graph.stage, len(others)))
"""

CLASS = '''
from dataclasses import dataclass, replace

import zgraph as zg


@dataclass(frozen=True)
class KeepBiases(zg.Pass):
    """Keep parameters whose names end so whole on every rank."""

    name = "keep_biases"
    requires = frozenset({"gathers"})
    provides = frozenset({"persistence"})
    conflicts = frozenset({"persistence"})

    ending: str = "bias"

    def plan(self, plan):
        kept = (replace(p, persistent=p.name.endswith(self.ending)) for p in plan.parameters)
        return plan.changed(parameters=tuple(kept))
'''


@pytest.fixture
def package(tmp_path: Path) -> str:
    folder = tmp_path / "lab"
    (folder / "lab_passes").mkdir(parents=True)
    for name, text in {"__init__": "", "early": FUNCTION, "biases": CLASS}.items():
        (folder / "lab_passes" / f"{name}.py").write_text(text, encoding="utf-8")
    return str(folder)


def one_step(folder: str, *names: str) -> tuple[float, list[str], list[tuple[str, int]]]:
    """On a rank: loss of the second step, what persists, and what the function pass saw."""
    sys.path.insert(0, folder)
    try:
        early = importlib.import_module("lab_passes.early")
        biases = importlib.import_module("lab_passes.biases")
    finally:
        sys.path.remove(folder)
    early.seen.clear()
    available = {"early": early.gather_everything_first, "biases": biases.KeepBiases()}
    torch.manual_seed(0)
    passes = [zg.Partition(), *(available[name] for name in names)]
    model = zg.compile(Tower(depth=2, width=8), passes, mesh_of(), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.tensor(0.0)
    for _ in range(2):
        loss = model(torch.arange(8).view(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    persistent = [p.name for p in zg.inspect(model).plan.partitioned() if p.persistent]
    return loss.item(), persistent, early.seen


def test_a_decorated_function_and_a_class_are_used_by_import_only(package: str) -> None:
    plain, *_ = run_ranks(one_step, 2, package)
    loss, persistent, seen = run_ranks(one_step, 2, package, "early", "biases")[0]
    assert loss == plain[0]
    assert persistent and all(name.endswith("bias") for name in persistent)
    assert seen == [("forward", 3), ("backward", 2)]


def test_an_outside_class_takes_part_in_contracts(package: str) -> None:
    sys.path.insert(0, package)
    try:
        keep = importlib.import_module("lab_passes.biases").KeepBiases()
    finally:
        sys.path.remove(package)
        for name in ("lab_passes.biases", "lab_passes"):
            sys.modules.pop(name, None)
    with pytest.raises(zg.PassError, match=r"keep_biases comes after persist.*persistence"):
        zg.compile(Tower(), [zg.Partition(), zg.Persist(max_numel=8), keep], backend="aot_eager")
