"""Nodes: what one node of a graph is, does and holds, whatever graph it stands in."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from zgraph._torch import OpOverload, detect_fake_mode, pytree
from zgraph.errors import GraphError

_CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
# Ops that return a view of their input without saying so in their schema.
_UNMARKED_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)


def is_view(node: Node) -> bool:
    """Whether the node's result shares memory with its first input."""
    target = node.target
    if node.op != "call_function":
        return False
    if target is operator.getitem:  # one of the views that a split returns
        return is_view(node.all_input_nodes[0])
    return target in _UNMARKED_VIEWS or (isinstance(target, OpOverload) and target.is_view)


def is_cast(node: Node) -> bool:
    """Whether the node only changes its input's dtype."""
    return node.op == "call_function" and node.target in _CASTS


def summands(node: Node) -> tuple[Node, ...]:
    """The two nodes, or twice the one, whose plain sum the node is; () if it is something else."""
    add = torch.ops.aten.add.Tensor
    plain = node.target is add and len(node.args) == 2 and not node.kwargs
    nodes = tuple(arg for arg in node.args if isinstance(arg, Node)) if plain else ()
    return nodes if len(nodes) == 2 else ()


def arguments(node: Node) -> tuple[Any, ...]:
    """The node's positional arguments, of the types that the op's schema says."""
    return node.args


def bytes_of(node: Node) -> int:
    """Bytes of the node's result, of static size."""
    return bytes_in(node.meta["val"])


def bytes_in(value: Any) -> int:
    """Bytes of all tensors in a value: a tensor, or several in any nest of containers."""
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return sum(int(tensor.numel()) * tensor.dtype.itemsize for tensor in tensors)


def schema_of(node: Node) -> Any:
    """The schema of a torch op; None of another function."""
    return getattr(node.target, "_schema", None)


def written_by(node: Node) -> list[Node]:
    """The nodes whose memory a call writes."""
    schema = schema_of(node)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    written = [given.get(a.name) for a in schema.arguments if a.is_write]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Node)]


def fake_result(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What calling `target` on the nodes' fake values gives: shapes and dtypes without data."""
    given = (tuple(args), dict(kwargs))
    values = pytree.tree_map_only(Node, lambda node: node.meta["val"], given)
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    mode = detect_fake_mode(tensors)
    if mode is None:
        raise GraphError(f"{target} was called on values without a fake tensor mode")
    with mode:
        return target(*values[0], **values[1])
