"""An explanation as tables, as a page, and of a model that has run."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import zgraph as zg
from tests.capture.steps import compiled, small_tower, step
from tests.support.pool import run_ranks
from zgraph.explain.timeline import timeline

TOKENS = torch.arange(8).view(2, 4)
PASSES = (zg.Partition(), zg.Prefetch(1))


@cache
def explained() -> zg.Explanation:
    return zg.explain(small_tower(), (TOKENS,), passes=PASSES, world_size=2)


def test_the_tables_hold_units_collectives_and_memory() -> None:
    text = str(explained())
    for row in explained().collectives:
        assert f"{row.sent_bytes:,}" in text
        assert row.unit in text and row.kind in text and f"{row.axis}={row.ranks}" in text
    assert f"{explained().memory.peak_bytes:,}" in text
    assert f"at {explained().memory.peak.node}" in text
    assert "partition" in text and "prefetch" in text


def totals_of_a_run() -> tuple[int, int, int, int]:
    """On a rank: the explanation of a model that has trained, also on another shape."""
    model = compiled(small_tower, PASSES)
    step(model)
    model(torch.arange(6).view(2, 3)).square().mean().backward()
    with torch.no_grad():
        model(TOKENS)
    step(model)
    found = zg.explain(model)
    memory = found.memory
    return found.sent_bytes(), memory.parameters, memory.optimizer_states, len(found.graphs)


def test_a_model_that_ran_is_explained_as_its_capture_is() -> None:
    expected = explained()
    memory = expected.memory
    for totals in run_ranks(totals_of_a_run, 2):
        assert totals == (expected.sent_bytes(), memory.parameters, memory.optimizer_states, 2)


def test_the_page_holds_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    text = explained().to_html(path)
    assert path.read_text(encoding="utf-8") == text
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["title"] == "Tower over shard=2"
    assert sum(row["bytes"] for row in data["collectives"]) == explained().sent_bytes()
    assert data["memory"]["peak_bytes"] == explained().memory.peak_bytes
    assert [program["name"] for program in data["programs"]] == ["forward", "backward"]
    for program, graph in zip(data["programs"], explained().graphs, strict=True):
        gathered = [line[4] for line in program["lines"]]
        assert gathered == [alive for _, alive in graph.live_bytes()]
        assert max(line[5] for line in program["lines"]) <= explained().memory.peak_bytes
    moved = {
        entry["program"]: entry["moved"] for entry in data["passes"] if entry["name"] == "prefetch"
    }
    # Every gather but the first moves; backward does not gather the embedding.
    assert moved == {"forward": 3, "backward": 2}


def test_spans_follow_one_another_and_collectives_of_an_axis_do_not_overlap() -> None:
    for graph in explained().graphs:
        compute = collectives = 0.0
        for span in timeline(graph, zg.Machine()):
            assert span.end_us >= span.start_us >= 0
            if graph.axis_of(span.node) if span.node in graph.starts() else False:
                assert span.start_us >= collectives
                collectives = span.end_us
            else:
                assert span.start_us >= compute
                compute = span.end_us


def test_a_faster_link_makes_a_step_shorter() -> None:
    def length(machine: zg.Machine) -> float:
        return max(span.end_us for g in explained().graphs for span in timeline(g, machine))

    slow, fast = zg.Machine(link_bytes=1e6), zg.Machine(link_bytes=1e9)
    assert length(slow) > length(fast)


def test_a_model_that_has_not_run_has_nothing_to_explain() -> None:
    model = zg.compile(small_tower(), list(PASSES), backend="aot_eager")
    with pytest.raises(zg.ModelError, match="has not run yet; run a step first"):
        zg.explain(model)


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(zg.PassError, match=r"optimizer='lion': expected one of sgd, .*adamw"):
        zg.explain(nn.Linear(2, 2), (torch.zeros(1, 2),), optimizer="lion")


def test_what_was_captured_already_takes_no_further_options() -> None:
    captured = zg.capture(nn.Linear(2, 2), (torch.zeros(1, 2),))
    with pytest.raises(zg.PassError, match="captured already"):
        zg.explain(captured, passes=[zg.Partition()])


class Skipped(nn.Linear):
    @torch.compiler.disable
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.after = nn.Linear(4, 4), Skipped(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.between(self.before(x)))


def test_modules_that_read_outside_the_graphs_are_named_as_not_counted() -> None:
    found = zg.explain(Broken(), (torch.ones(2, 4),), world_size=2)
    assert found.outside == ("between",)
    assert "outside captured graphs: between" in str(found)
    assert [graph.stage for graph in found.graphs] == ["forward", "backward"] * 2


def test_parameters_that_are_not_split_count_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    passes = [zg.Partition(ignore=["0"])]
    memory = zg.explain(model, (torch.ones(2, 8),), passes=passes, world_size=4).memory
    whole, share = 4 * 64, 4 * 64 // 4
    assert memory.parameters == memory.gradients == whole + share
    assert memory.optimizer_states == 2 * memory.parameters
