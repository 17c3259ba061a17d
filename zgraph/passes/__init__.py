"""The shipped passes, one file each, and the protocol they share with yours."""

from zgraph.passes.base import GraphPass, Pass, Pipeline, graph_pass
from zgraph.passes.group import Group
from zgraph.passes.partition import Partition
from zgraph.passes.persist import Persist
from zgraph.passes.precision import MixedPrecision
from zgraph.passes.prefetch import Prefetch
from zgraph.passes.reshard import Reshard

__all__ = [
    "GraphPass",
    "Group",
    "MixedPrecision",
    "Partition",
    "Pass",
    "Persist",
    "Pipeline",
    "Prefetch",
    "Reshard",
    "graph_pass",
]
