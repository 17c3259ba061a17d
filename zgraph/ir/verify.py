"""Verifier: rules that hold after every pass. A rule's docstring is its error text."""

from collections.abc import Callable

from torch import fx

from zgraph.errors import GraphError
from zgraph.ir import ops
from zgraph.ir.graph import Graph

Rule = Callable[[Graph, fx.Node], bool]
_STARTS = (ops.gather, ops.scatter, ops.reduce)


def _starts_are_waited_for_once(graph: Graph, node: fx.Node) -> bool:
    """The result of a collective is read by exactly one wait, and by nothing else."""
    return node.target not in _STARTS or [user.target for user in node.users] == [ops.wait]


def _waits_wait_for_a_collective(graph: Graph, node: fx.Node) -> bool:
    """A wait reads the start of a collective."""
    return node.target is not ops.wait or node.args[0].target in _STARTS  # type: ignore[union-attr]


def _gathered_buffers_stay_in_their_graph(graph: Graph, node: fx.Node) -> bool:
    """No gathered buffer is saved from forward for backward when the plan reshards."""
    return True


RULES: tuple[Rule, ...] = (_starts_are_waited_for_once, _waits_wait_for_a_collective)


def verify(graph: Graph, pass_name: str) -> None:
    """Raise `GraphError` if the program order or a rule is broken."""
    try:
        graph.fx.lint()
    except RuntimeError as error:
        raise GraphError(f"after {pass_name}, in the {graph.stage} graph: {error}") from error
    for node in graph.fx.nodes:
        for rule in RULES:
            if node.op == "call_function" and not rule(graph, node):
                raise GraphError(
                    f"after {pass_name}, in the {graph.stage} graph, node {node.name} breaks a rule: "
                    f"{rule.__doc__} It is: {node.format_node()}"
                )
