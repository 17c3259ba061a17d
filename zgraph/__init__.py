"""zgraph: sharded training as passes over one captured graph."""

from zgraph.capture import Captured, capture
from zgraph.compile import compile
from zgraph.errors import (
    GraphError,
    ModelError,
    PassError,
    RankError,
    WholeTensorError,
    ZGraphError,
)
from zgraph.explain import Explanation, Machine, explain
from zgraph.ir.graph import Graph
from zgraph.passes import (
    Group,
    MixedPrecision,
    Partition,
    Pass,
    Persist,
    Prefetch,
    Reshard,
    graph_pass,
)
from zgraph.plan import Plan
from zgraph.report import Report, inspect
from zgraph.runtime.parameter import ShardedParameter

__all__ = [
    "Captured",
    "Explanation",
    "Graph",
    "GraphError",
    "Group",
    "Machine",
    "MixedPrecision",
    "ModelError",
    "Partition",
    "Pass",
    "PassError",
    "Persist",
    "Plan",
    "Prefetch",
    "RankError",
    "Report",
    "Reshard",
    "ShardedParameter",
    "WholeTensorError",
    "ZGraphError",
    "capture",
    "compile",
    "explain",
    "graph_pass",
    "inspect",
]
