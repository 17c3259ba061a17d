"""Every wrong pass is rejected, by the rule that names its fault."""

import re
from dataclasses import replace

import pytest
import torch

import zgraph as zg
from tests.capture.steps import small_tower
from tests.verifier import faults_in_compute, faults_in_gathers, faults_in_gradients
from tests.verifier.faults import FAULTS, TOKENS
from zgraph.ir import verify

MODULES = (faults_in_compute, faults_in_gathers, faults_in_gradients)  # they fill FAULTS
RULES = [rule for rules in verify.RULES for kind in rules for rule in kind]


def test_the_suite_holds_faults_of_every_kind() -> None:
    assert len(FAULTS) >= 80
    assert {fault.stage for fault in FAULTS.values()} == {"joint", "forward", "backward"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_pass_is_rejected_by_the_rule_that_names_its_fault(name: str) -> None:
    fault = FAULTS[name]
    with pytest.raises(zg.GraphError) as caught:
        fault.verify()
    summary, *program = str(caught.value).splitlines()
    assert summary.startswith(f"{name} broke the rule {fault.rule} in the {fault.stage} graph: ")
    (marked,) = (line for line in program if line.startswith("> "))
    assert len(program) >= 2  # it, and what stands around it
    found = re.search(r" It is broken at (\w+)( of unit [\w.]+)?; the graph around it:$", summary)
    assert found is not None
    node, unit = found.groups()
    assert marked.startswith("> return " if node == "output" else f"> {node}: ")
    if re.search(r" = (gather|whole|pack|scatter|reduce)\(", marked):
        assert unit or fault.rule == "dialect_nodes_are_complete"


# One of each kind: what `verify` rejects, a capture rejects, and the pass is named.
@pytest.mark.parametrize(
    "name", ["drops_a_wait", "reduces_twice", "computes_something_else", "gathers_everything_first"]
)
def test_a_capture_with_a_wrong_pass_in_its_list_raises_as_the_verifier_does(name: str) -> None:
    fault = FAULTS[name]
    with pytest.raises(zg.GraphError, match=rf"faults\.{name}@\w+ broke the rule {fault.rule} "):
        fault.capture()


def test_graphs_without_gradients_are_verified_too() -> None:
    fault = replace(FAULTS["drops_a_wait"], stage="inference")
    with (
        torch.no_grad(),
        pytest.raises(zg.GraphError, match=f"{fault.rule} in the inference graph"),
    ):
        fault.capture()


def test_a_joint_pass_that_lets_gathered_memory_be_saved_is_found_out_in_forward() -> None:
    @zg.graph_pass(stage="joint")
    def forget_what_is_to_be_recomputed(graph: zg.Graph, plan: zg.Plan) -> None:
        for node in graph.fx.nodes:
            node.meta.pop("recompute", None)
            node.meta.pop("ac_graph_id", None)

    passes = [zg.Partition(), zg.Reshard(True), forget_what_is_to_be_recomputed]
    rule = "gathered_buffers_stay_in_their_graph in the forward graph"
    with pytest.raises(zg.GraphError, match=rule):
        zg.capture(small_tower(), (TOKENS,), passes=passes, world_size=2)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_rejects_a_fault_and_says_what_must_hold(rule: verify.GraphRule) -> None:
    assert any(fault.rule == rule.__name__ for fault in FAULTS.values())
    assert rule.__doc__ and rule.__doc__.strip().endswith(".")


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("drops_a_wait", "embed"),
        ("gathers_the_shard_of_another_unit", "layers.0"),
        ("reduces_twice", "norm..head"),
        ("packs_at_another_offset", "layers.1"),
    ],
)
def test_a_fault_at_a_units_node_names_the_unit(name: str, unit: str) -> None:
    with pytest.raises(zg.GraphError, match=f"of unit {unit};"):
        FAULTS[name].verify()
