"""The data of the pass explorer's page; `zgraph.explain.page.render` gives its form."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

from torch.fx import Node

from zgraph.explain import tables
from zgraph.explain.timeline import Machine, timeline
from zgraph.frames import Step
from zgraph.ir import ops, show
from zgraph.ir.graph import Graph, Stage
from zgraph.ir.nodes import is_view
from zgraph.layout import Layout
from zgraph.plan import Plan

if TYPE_CHECKING:
    from zgraph.explain.explanation import Explanation

_KINDS: dict[Any, str] = {
    ops.gather: "gather",
    ops.scatter: "scatter",
    ops.reduce: "reduce",
    ops.wait: "wait",
    ops.pack: "pack",
}


def data(explanation: "Explanation") -> dict[str, Any]:
    """Everything that the page shows, as JSON values."""
    plan, memory = explanation.plan, explanation.memory
    return {
        "title": f"{explanation.name} over {tables.mesh(plan)}",
        "plan": {
            "passes": list(plan.passes),
            "axes": [{"name": axis.name, "ranks": axis.size} for axis in plan.axes],
            "facts": _facts(plan),
            "units": _units(plan, explanation.layout),
        },
        "collectives": [
            {
                "unit": entry.unit,
                "stage": entry.stage,
                "kind": entry.kind,
                "axis": entry.axis,
                "count": entry.count,
                "bytes": entry.sent_bytes,
            }
            for entry in explanation.collectives
        ],
        "memory": {
            "rows": [[f"{label}, {when}", count] for label, when, count in tables.rows(memory)],
            "peak_bytes": memory.peak_bytes,
            "peak_stage": memory.peak.stage,
            "peak_node": memory.peak.node,
        },
        "assumptions": f"Times are estimates, not measurements; they assume {explanation.machine}.",
        "programs": list(_programs(explanation)),
        "passes": [
            entry for history in _named_histories(explanation) for entry in _diffs(*history)
        ],
    }


def _facts(plan: Plan) -> list[list[str]]:
    ahead = f"{plan.prefetch_forward} in forward, {plan.prefetch_backward} in backward"
    facts = {
        "device": plan.device_type,
        "reshard after forward": plan.reshard_after_forward,
        "keep between uses": plan.keep_between_uses,
        "units prefetched": ahead,
        "live bytes, at most": plan.max_live_bytes,
        "inputs cast to": plan.cast_inputs,
        "outputs cast to": plan.output_dtype,
    }
    shown = {label: str(value).removeprefix("torch.") for label, value in facts.items()}
    return [[label, shown[label]] for label, value in facts.items() if value is not None]


def _units(plan: Plan, layout: Layout) -> list[dict[str, Any]]:
    names = plan.names
    units = []
    for unit in plan.units:
        size = layout.size(unit.name)
        parameters = [names[name] for name in unit.parameters]
        units.append(
            {
                "name": unit.name,
                "numel": size.numel,
                "shard_bytes": size.shard_bytes,
                "gathered_bytes": size.gathered_bytes,
                "parameters": [
                    {
                        "name": p.name,
                        "shape": list(p.shape),
                        "numel": p.numel,
                        "dtypes": f"{p.master_dtype}/{p.param_dtype}/{p.reduce_dtype}".replace(
                            "torch.", ""
                        ),
                        "traits": " ".join(
                            word
                            for word, on in (
                                ("persistent", p.persistent),
                                ("frozen", not p.requires_grad),
                                ("tied", p.aliases),
                            )
                            if on
                        ),
                    }
                    for p in parameters
                ],
            }
        )
    return units


def _names(graphs: Sequence[Graph]) -> list[str]:
    """The stage of each graph, numbered where there are several of one."""
    stages: Counter[str] = Counter()
    names = []
    for graph in graphs:
        stages[graph.stage] += 1
        number = stages[graph.stage]
        names.append(graph.stage if number == 1 else f"{graph.stage} {number}")
    return names


def _programs(explanation: "Explanation") -> Iterator[dict[str, Any]]:
    for index, name in enumerate(_names(explanation.graphs)):
        graph = explanation.graphs[index]
        alive = _alive(explanation, index)
        lines = list(_lines(graph, alive, explanation.machine))
        yield {"name": name, "stage": graph.stage, "lines": lines}


def _alive(explanation: "Explanation", index: int) -> dict[str, int]:
    """Bytes alive at each node of one graph, by name. Lowering gave some nodes others' names."""
    memory = explanation.memory
    return {m.node: memory.resident + m.total for m in memory.moments if m.graph == index}


def _lines(graph: Graph, alive: dict[str, int], machine: Machine) -> Iterator[list[Any]]:
    units = _unit_of_nodes(graph)
    now = next(iter(alive.values()), 0)
    for line, span in zip(show.lines(graph), timeline(graph, machine), strict=True):
        node = line.node
        now = alive.get(node.name, now)
        times = [round(span.start_us, 3), round(span.end_us, 3)]
        where = [line.module, units.get(node, ""), _kind(node)]
        yield [line.code, *where, line.live_bytes, now, *times]


def _kind(node: Node) -> str:
    if node.op in ("placeholder", "output"):
        return "input" if node.op == "placeholder" else "output"
    return _KINDS.get(node.target, "view" if is_view(node) else "compute")


def _unit_of_nodes(graph: Graph) -> dict[Node, str]:
    """Units of collectives, of the views of what they gather, and of what computes with these."""
    units: dict[Node, str] = {}
    for node in graph.nodes(*ops.BUFFER_ARGUMENT):
        units[node] = graph.unit_of(node)
        for user in node.users:
            if user.target is ops.wait:
                units[user] = units[node]
    for gather in graph.gathers():
        item = graph.gathered(gather)
        for node in (*item.views, *item.uses):
            units.setdefault(node, units[gather])
    return units


def _named_histories(explanation: "Explanation") -> Iterator[tuple[str, list[Step]]]:
    """The steps of each graph with the name of its program, joint graphs first."""
    histories = [
        [step for step in history if step.graph.stage == stage and step.made_by != "lower"]
        for history in explanation.history
        for stage in get_args(Stage)
    ]
    found = [steps for steps in histories if steps]
    return zip(_names([steps[-1].graph for steps in found]), found, strict=True)


def _diffs(program: str, steps: list[Step]) -> Iterator[dict[str, Any]]:
    for before, after in pairwise(steps):
        changes = list(show.changes(before.graph, after.graph))
        lines = [(tag, line) for tag, line in changes if isinstance(line, show.Line)]
        # A statement that left one place and stands in another was moved.
        codes = {sign: Counter(line.code for tag, line in lines if tag == sign) for sign in "+-"}
        moved = codes["+"] & codes["-"]
        yield {
            "name": after.made_by,
            "stage": after.graph.stage,
            "program": program,
            "added": (codes["+"] - moved).total(),
            "removed": (codes["-"] - moved).total(),
            "moved": moved.total(),
            "diff": [[tag, str(line)] for tag, line in changes],
        }
