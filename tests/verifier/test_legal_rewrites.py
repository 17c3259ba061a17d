"""Random rewrites that change a schedule and nothing else are accepted: five hundred of them."""

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch.fx import Node

import zgraph as zg
from tests.capture.steps import frozen_tower, small_tower, tied_tower
from tests.verifier.faults import HSDP, TOKENS, Dropouts
from zgraph.ir.graph import Stage
from zgraph.ir.verify import Snapshot, verify

Rewrite = Callable[[zg.Graph, random.Random], None]
PER_GRAPH = 25
EDITS = 12


def move_somewhere_legal(graph: zg.Graph, node: Node, draw: random.Random) -> None:
    """Move a node to a random place behind what it reads and in front of what reads it."""
    nodes = list(graph.fx.nodes)
    order = {other: index for index, other in enumerate(nodes)}
    inputs = sum(other.op == "placeholder" for other in nodes)
    first = max([inputs - 1, *(order[source] for source in node.all_input_nodes)]) + 1
    last = min(order[user] for user in node.users) - 1
    places = [at for at in range(first, last + 1) if nodes[at] is not node]
    if places:
        graph.move_before(node, nodes[draw.choice(places)])


def move_a_collective(graph: zg.Graph, draw: random.Random) -> None:
    move_somewhere_legal(graph, draw.choice(graph.starts()), draw)


def move_a_wait(graph: zg.Graph, draw: random.Random) -> None:
    move_somewhere_legal(graph, draw.choice(graph.waits()), draw)


def move_a_computation(graph: zg.Graph, draw: random.Random) -> None:
    node = draw.choice(graph.compute())
    if node.users and not node.is_impure():
        move_somewhere_legal(graph, node, draw)


def move_a_view_or_pack(graph: zg.Graph, draw: random.Random) -> None:
    views = [view for gather in graph.gathers() for view in graph.gathered(gather).views]
    choices = [node for node in (*views, *graph.packs()) if node.users]
    if choices:
        move_somewhere_legal(graph, draw.choice(choices), draw)


def gather_again(graph: zg.Graph, draw: random.Random) -> None:
    """Give one use of a unit a gather, a wait and views of its own."""
    gathers = [gather for gather in graph.gathers() if graph.gathered(gather).uses]
    if not gathers:
        return
    item = graph.gathered(draw.choice(gathers))
    use = draw.choice(item.uses)
    memory = {item.wait, *item.views}
    if graph.stage == "joint" or use.op == "output":
        return
    copies = graph.copy_before([item.gather, item.wait, *item.views], use)
    for node in memory & set(use.all_input_nodes):
        use.replace_input_with(node, copies[node])
    graph.finish()


def merge_two_gathers(graph: zg.Graph, draw: random.Random) -> None:
    """Let the readers of a unit's later gather read its earlier one."""
    by_buffer: dict[str, list[Node]] = {}
    for gather in graph.gathers():
        by_buffer.setdefault(graph.buffer_of(gather).name, []).append(gather)
    several = [gathers for gathers in by_buffer.values() if len(gathers) > 1]
    if several:
        first, *_, last = draw.choice(several)
        kept, gone = graph.gathered(first).wait, graph.gathered(last).wait
        if all(kept < user for user in gone.users):
            gone.replace_all_uses_with(kept)
            graph.finish()


def split_a_view(graph: zg.Graph, draw: random.Random) -> None:
    """Let one reader of a view read a copy of it."""
    views = [view for gather in graph.gathers() for view in graph.gathered(gather).views]
    shared = [view for view in views if len(view.users) > 1]
    if shared:
        view = draw.choice(shared)
        reader = draw.choice(list(view.users))
        reader.replace_input_with(view, graph.copy_before([view], reader)[view])


def rename_a_node(graph: zg.Graph, draw: random.Random) -> None:
    node = draw.choice([node for node in graph.fx.nodes if node.op == "call_function"])
    node._rename(f"renamed_{node.name}")


def tag_for_recomputation(graph: zg.Graph, draw: random.Random) -> None:
    if graph.stage == "joint":
        graph.recompute(draw.sample(graph.compute(), 2))


REWRITES: tuple[Rewrite, ...] = (
    move_a_collective,
    move_a_wait,
    move_a_computation,
    move_a_view_or_pack,
    gather_again,
    merge_two_gathers,
    split_a_view,
    rename_a_node,
    tag_for_recomputation,
)

BF16 = zg.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
MODELS = {
    "plain": (small_tower, TOKENS, (zg.Partition(),), {"shard": 2}),
    "prefetched": (small_tower, TOKENS, (zg.Partition(), zg.Prefetch(2), BF16), {"shard": 8}),
    "hsdp": (small_tower, TOKENS, (zg.Partition(replicate="replicate"), zg.Prefetch(1)), HSDP),
    "persistent": (small_tower, TOKENS, (zg.Partition(), zg.Persist(16)), {"shard": 2}),
    "kept": (frozen_tower, TOKENS, (zg.Partition(), zg.Reshard(False)), {"shard": 2}),
    "tied": (tied_tower, TOKENS, (zg.Partition(), zg.Prefetch(1)), {"shard": 2}),
    "random": (
        Dropouts,
        torch.ones(4, 8),
        (zg.Partition(), zg.Group.by_class("Linear")),
        {"shard": 2},
    ),
}
STAGES: tuple[Stage, ...] = ("joint", "forward", "backward")
CASES = [(name, stage) for name in MODELS for stage in STAGES][:20]


@cache
def captured(name: str) -> zg.Captured:
    model, argument, passes, mesh = MODELS[name]
    return zg.capture(model(), (argument,), passes=passes, mesh=mesh)


def test_there_are_five_hundred_rewrites() -> None:
    assert len(CASES) * PER_GRAPH == 500


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_random_legal_rewrites_are_accepted(name: str, stage: Stage) -> None:
    source = captured(name)
    changed = 0
    for seed in range(PER_GRAPH):
        draw = random.Random(f"{name} {stage} {seed}")
        graph = source.graph(stage).copy()
        text, before = graph.text(), Snapshot.of(graph)
        for _ in range(EDITS):
            draw.choice(REWRITES)(graph, draw)
        verify(graph, source.plan, "a legal rewrite", before, False)
        changed += graph.text() != text
    assert changed > 0.7 * PER_GRAPH  # some draws find nothing to do in so small a graph


@pytest.mark.parametrize("rewrite", REWRITES[:-1], ids=lambda rewrite: rewrite.__name__)
def test_each_kind_of_rewrite_changes_some_graph(rewrite: Rewrite) -> None:
    def changes(name: str, stage: Stage, seed: int) -> bool:
        graph = captured(name).graph(stage).copy()
        if rewrite is merge_two_gathers:
            gather_again(graph, random.Random(seed))
        text = graph.text()
        rewrite(graph, random.Random(seed))
        return graph.text() != text

    assert any(changes("tied", stage, seed) for stage in STAGES[1:] for seed in range(20))
