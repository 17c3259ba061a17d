"""Verifier: rules that hold after every pass. A rule's docstring is its error text."""

from collections.abc import Callable

from torch.fx import Node

from zgraph.errors import GraphError
from zgraph.ir import ops
from zgraph.ir.graph import Graph
from zgraph.plan import Plan

Rule = Callable[[Graph, Plan, Node], bool]
_STARTS = (ops.gather, ops.scatter, ops.reduce)


def _starts_are_waited_for_once(graph: Graph, plan: Plan, node: Node) -> bool:
    """The result of a collective is read by exactly one wait, and by nothing else."""
    return node.target not in _STARTS or [user.target for user in node.users] == [ops.wait]


def _waits_wait_for_a_collective(graph: Graph, plan: Plan, node: Node) -> bool:
    """A wait reads the start of a collective."""
    source = node.args[0] if node.target is ops.wait else None
    return source is None or (isinstance(source, Node) and source.target in _STARTS)


def _gathered_buffers_stay_in_their_graph(graph: Graph, plan: Plan, node: Node) -> bool:
    """No gathered buffer is saved from forward for backward, unless Reshard(False) says so."""
    if node.target is not ops.gather or graph.stage != "forward" or not plan.reshard_after_forward:
        return True
    saved = graph.output().args[0][graph.user_outputs or 0 :]  # type: ignore[index]
    item = graph.gathered(node)
    return not set(saved) & {item.wait, *item.views}  # type: ignore[arg-type]


def _captured_ops_are_replaced(graph: Graph, plan: Plan, node: Node) -> bool:
    """Reads of parameters and their gradients became gathers and scatters in the joint graph."""
    return graph.stage == "joint" or node.target not in (ops.parameter, ops.gradient)


RULES: tuple[Rule, ...] = (
    _starts_are_waited_for_once,
    _waits_wait_for_a_collective,
    _gathered_buffers_stay_in_their_graph,
    _captured_ops_are_replaced,
)


def verify(graph: Graph, plan: Plan, pass_name: str) -> None:
    """Raise `GraphError`, naming pass, node and rule, if program order or a rule is broken."""
    where = f"after {pass_name}, in the {graph.stage} graph"
    try:
        graph.fx.lint()
    except RuntimeError as error:
        raise GraphError(f"{where}: {error}") from error
    for node in graph.fx.nodes:
        for rule in RULES:
            if node.op == "call_function" and not rule(graph, plan, node):
                raise GraphError(
                    f"{where}, node {node.name} breaks a rule: {rule.__doc__} "
                    f"The node is: {node.format_node()}"
                )
