"""Graphs as text: Python-like code grouped by module, and what a pass changed as a diff.

One statement a line. A collective says its unit, bytes, dtype and mesh axis; at the right stand the
gathered bytes alive while the statement runs, on one rank:

    # layers.0.up
    gather_head: f32[64] = gather(primals_3)  # all-gather head, 256 B f32, shard=2  | 1,408
    addmm: f32[8, 16] = aten.addmm(layers_0_up_bias, view, t)                        | 1,408

Nothing in it depends on the process, the rank or the run, so texts can be compared.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from zgraph._torch import OpOverload
from zgraph.ir import ops

if TYPE_CHECKING:
    from zgraph.ir.graph import Graph

_WIDTH = 100
_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
# Arguments of the dialect's ops that the note at the right of a statement says better.
_SHOWN_ARGUMENTS: dict[Any, int] = {
    ops.gather: 1,
    ops.whole: 1,
    ops.pack: 2,
    ops.scatter: 1,
    ops.reduce: 1,
}


@dataclass(frozen=True)
class Line:
    """One statement.

    Attributes:
        node: the node that it shows.
        module: name of the module that it belongs to; "" for the root and what passes inserted.
        statement: code, with its result's dtype and shape.
        note: what a collective moves, or "".
        live_bytes: gathered bytes alive while it runs.
    """

    node: Node
    module: str
    statement: str
    note: str
    live_bytes: int

    @property
    def code(self) -> str:
        """Statement and note, without live bytes: what a diff compares."""
        return f"{self.statement}  # {self.note}" if self.note else self.statement

    def __str__(self) -> str:
        return f"{self.code:<{_WIDTH}} | {self.live_bytes:,}"


def lines(graph: Graph) -> list[Line]:
    """Every statement of the graph, in program order."""
    live = dict(graph.live_bytes())
    module = ""
    found = []
    for node in graph.fx.nodes:
        module = module_of(node) or module
        found.append(Line(node, module, _statement(node), _note(graph, node), live[node]))
    return found


def text(graph: Graph) -> str:
    """The program; see this module's docstring."""
    shown = [f"{graph.stage + ' graph':<{_WIDTH}} | gathered bytes alive"]
    module = ""
    for line in lines(graph):
        if line.module != module:
            module = line.module
            shown.append(f"# {module}")
        shown.append(str(line))
    return "\n".join(shown)


def collectives(graph: Graph) -> list[str]:
    """The collectives that the graph starts, in order, one a line: what ranks must share."""
    return [f"{graph.stage}: {_note(graph, node)}" for node in graph.starts()]


def around(graph: Graph, node: Node, context: int = 3) -> str:
    """The statements around `node`, it marked by ">". Works on graphs that break rules."""
    nodes = list(graph.fx.nodes)
    at = nodes.index(node)
    near = nodes[max(0, at - context) : at + context + 1]
    return "\n".join(f"{'>' if other is node else ' '} {_statement(other)}" for other in near)


def diff(before: Graph, after: Graph, context: int = 2) -> str:
    """What changed between two texts of one program, as a unified diff; "" for nothing.

    Statements are compared without the live bytes, and shown with them.
    """
    return "\n".join(f"{tag}{line}" for tag, line in changes(before, after, context))


def changes(before: Graph, after: Graph, context: int = 2) -> Iterator[tuple[str, Line | str]]:
    """The lines of `diff`: ("@", where), (" ", unchanged), ("-", removed), ("+", added)."""
    old, new = lines(before), lines(after)
    matcher = difflib.SequenceMatcher(
        None, [line.code for line in old], [line.code for line in new], autojunk=False
    )
    for group in matcher.get_grouped_opcodes(context):
        yield "@", f" {new[min(group[0][3], len(new) - 1)].module or 'model'}"
        for tag, old_start, old_stop, new_start, new_stop in group:
            if tag == "equal":
                yield from ((" ", line) for line in new[new_start:new_stop])
                continue
            yield from (("-", line) for line in old[old_start:old_stop])
            yield from (("+", line) for line in new[new_start:new_stop])


def module_of(node: Node) -> str:
    """Name of the module whose forward computes the node, or whose gradient it is; "" unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^[LG]\['[^']*'\]\.?", "", path)  # what the module is called where it is called
    path = re.sub(r"_modules\['([^']*)'\]", r"\1", path)
    return re.sub(r"\.slice\([^)]*\)|\[(\d+)\]", lambda m: f".{m[1]}" if m[1] else "", path)


def _statement(node: Node) -> str:
    if node.op == "output":
        return f"return {_shown(node.args[0])}"
    result = f"{node.name}: {_type(node.meta.get('val'))}"
    if node.op == "placeholder":
        return f"{result} = input()"
    if node.op == "get_attr":
        return f"{result} = self.{node.target}"
    args = node.args[: _SHOWN_ARGUMENTS.get(node.target, len(node.args))]
    if node.target is operator.getitem:
        return f"{result} = {_shown(args[0])}[{_shown(args[1])}]"
    arguments = [*map(_shown, args), *(f"{k}={_shown(v)}" for k, v in node.kwargs.items())]
    return f"{result} = {_called(node)}({', '.join(arguments)})"


def _called(node: Node) -> str:
    name = str(getattr(node.target, "__name__", node.target))
    if isinstance(node.target, OpOverload):
        name = str(node.target).removeprefix("zgraph.").removesuffix(".default")
    return name.removesuffix(".Tensor")


def _note(graph: Graph, node: Node) -> str:
    if node.op == "placeholder":
        reads = (ops.parameter, ops.gather, ops.whole)
        read = next((user for user in node.users if user.target in reads), None)
        return f"flat shard of {read.args[ops.BUFFER_ARGUMENT[read.target]]}" if read else ""
    if node.target not in _SHOWN_ARGUMENTS:
        return ""
    buffer = str(node.args[ops.BUFFER_ARGUMENT[node.target]])
    if node.target is ops.pack:
        return f"gradients of {buffer}"
    if node.target is ops.whole:
        return f"{buffer}, kept whole"
    size = f"{graph.moved_bytes(node):,} B {_shown(node.meta['val'].dtype)}"
    return f"{ops.STARTS[node.target]} {buffer}, {size}, {graph.axis_of(node) or 'one rank'}"


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_shown(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, Sequence):
        return f"({', '.join(map(_type, value))})"
    return type(value).__name__ if value is not None else "None"


def _shown(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, torch.dtype):
        return _SHORT.get(value, str(value))
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)
