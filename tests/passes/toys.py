"""Small models and plans for the tests of passes."""

import torch
from torch import Tensor, nn

import zgraph as zg
from zgraph.passes import Pass, Pipeline
from zgraph.plan import ParameterPlan, Plan, describe, units_covering


class Block(nn.Module):
    """A residual layer; `width` * (2 * `width`) elements a weight."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tower(nn.Module):
    """Embedding, blocks, norm and head: what lies before, in and after the repeated part."""

    def __init__(self, depth: int = 4, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def planned(model: nn.Module, *passes: Pass) -> Plan:
    """The finished plan of `model` under these passes, behind `Partition`; no mesh."""
    if not any(isinstance(item, zg.Partition) for item in passes):
        passes = (zg.Partition(), *passes)
    plan = Pipeline(passes).plan(describe(model, "cpu"))
    return plan.changed(units=units_covering(plan, plan.units))


def members(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Parameter names by unit name."""
    assert len({unit.name for unit in plan.units}) == len(plan.units)
    return {unit.name: unit.parameters for unit in plan.units}


def parameters(plan: Plan) -> dict[str, ParameterPlan]:
    """The plan's partitioned parameters by name."""
    return {parameter.name: parameter for parameter in plan.partitioned()}
