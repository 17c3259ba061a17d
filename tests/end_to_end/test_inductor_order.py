"""Inductor emits the starts of collectives in the order of the scheduled graph, at any size."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import zgraph as zg
from tests.support.pool import run_ranks
from tests.support.training import mesh_of

KINDS = {"all_gather_into_tensor": "G", "reduce_scatter_tensor": "S", "all_reduce": "R"}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(nn.functional.gelu(self.a(self.norm(x))))


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def emitted_and_scheduled(rows: int) -> list[tuple[str, str]]:
    """On a rank: for forward and backward, starts in the generated code and in the graph."""
    passes = [zg.Partition(), zg.Persist(32), zg.Prefetch()]
    model = zg.compile(_Stack(), passes, mesh=mesh_of(), backend="inductor")
    _, codes = run_and_get_code(lambda: model(torch.randn(rows, 32)).backward())
    found = []
    for code, graph in zip(codes, zg.inspect(model).frames[0].graphs, strict=True):
        calls = re.findall(r"_c10d_functional\.(\w+?)_?\.default\(", code)
        emitted = "".join(KINDS.get(name, "") for name in calls)
        starts = re.findall(r" = (gather|scatter|reduce)\(", graph.text)
        found.append((emitted, "".join({"gather": "G"}.get(s, s[0].upper()) for s in starts)))
    return found


@pytest.mark.parametrize("rows", [1, 33])
def test_starts_are_emitted_in_the_order_of_the_graph(rows: int) -> None:
    for forward, backward in run_ranks(emitted_and_scheduled, 2, rows):
        assert forward[0] == forward[1] == "GGG"
        assert backward[0] == backward[1]
        assert sorted(backward[1]) == sorted("GGG" + "SSS" + "RRR")
