"""What zg.capture takes and returns: calls of every kind, steps, graphs, diffs, errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zgraph as zg
from tests.capture.offline_models import (
    HSDP,
    PASSES,
    STAGES,
    TOKENS,
    Broken,
    Mixing,
    Normed,
    Remembering,
    Single,
    offline,
)
from tests.capture.steps import frozen_tower, small_tower, tied_tower
from zgraph.ir.show import collectives


def inputs(graph: zg.Graph) -> list[str]:
    """Types of what the graph reads beside flat shards, in order."""
    shown = [line for line in graph.text().splitlines() if " = input()" in line]
    return [line.split(": ")[1].split(" = ")[0] for line in shown if "flat shard" not in line]


# ------------------------------------------------------------------ what a call may be


def test_frozen_parameters_are_gathered_and_get_no_gradient() -> None:
    backward = offline(frozen_tower, *PASSES[:2]).graph("backward")
    scattered = {backward.unit_of(scatter) for scatter in backward.scatters()}
    assert scattered == {"layers.0", "layers.2", "layers.3", "norm..head"}


def test_a_tied_parameter_is_gathered_once() -> None:
    units = [
        line.split()[2] for line in collectives(offline(tied_tower, *PASSES[:2]).graph("forward"))
    ]
    assert len(units) == len(set(units))


def test_each_piece_between_graph_breaks_is_a_frame() -> None:
    traced = zg.capture(Broken(), (torch.ones(2, 4),), passes=PASSES[:1], world_size=2)
    assert len(traced.frames) == 2
    first, second = traced.graph("forward"), traced.graph("forward", frame=1)
    assert "# first" in first.text() and "# first" not in second.text()
    assert "# second" in second.text() and "# second" not in first.text()
    assert [step.made_by for step in traced.steps("backward", frame=1)][-1] == "lower"
    assert "+scatter_model" in traced.diff("partition", "joint", frame=1)
    with pytest.raises(zg.GraphError, match="frame 2: this call has 2, counted from 0"):
        traced.graph("forward", frame=2)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_one_inference_graph(
    context: Callable[[], torch.no_grad],
) -> None:
    with context():
        traced = zg.capture(Single(), (torch.ones(2, 4),), world_size=2)
    assert len(traced.graph("inference").gathers()) == 1
    assert not traced.graph("inference").scatters()
    with pytest.raises(zg.GraphError, match="frame 0 has no forward graph; it has joint, infer"):
        traced.graph("forward")


def test_keyword_arguments_are_those_of_the_call() -> None:
    args, scale = (torch.ones(2, 4), torch.ones(4)), torch.ones(2, 1)
    traced = zg.capture(Mixing(), args, {"scale": scale, "double": True}, PASSES[:1], world_size=2)
    assert inputs(traced.graph("forward")) == ["f32[2, 4]", "f32[4]", "f32[2, 1]"]
    assert [n for n in traced.graph("forward").compute() if "mul" in str(n.target)][1].args[1] == 2
    assert traced.input_bytes == 32 + 16 + 8


def test_an_argument_given_twice_is_one_input() -> None:
    x = torch.ones(2, 4)
    traced = zg.capture(Mixing(), (x, x), passes=PASSES[:1], world_size=2)
    assert inputs(traced.graph("forward")) == ["f32[2, 4]"]


def test_strides_and_gradients_of_arguments_are_kept() -> None:
    x = torch.ones(4, 2).t().requires_grad_()
    traced = zg.capture(Mixing(), (x, torch.ones(4)), passes=PASSES[:1], world_size=2)
    fakes = [n.meta["val"] for n in traced.graph("forward").fx.nodes if n.op == "placeholder"]
    assert fakes[1].stride() == (1, 2)
    # One gradient for the shard and one for x, none for the bias that is added.
    assert [value is not None for value in traced.graph("backward").outputs()] == [
        True,
        True,
        False,
    ]


def test_an_earlier_capture_of_other_sizes_does_not_make_sizes_dynamic() -> None:
    for batch in (3, 5):
        args = torch.ones(batch, 4), torch.ones(4)
        traced = zg.capture(Mixing(), args, passes=PASSES[:1], world_size=2)
        assert inputs(traced.graph("forward")) == [f"f32[{batch}, 4]", "f32[4]"]


def test_dynamic_sizes_are_symbols() -> None:
    args = torch.ones(3, 4), torch.ones(4)
    traced = zg.capture(Mixing(), args, passes=PASSES[:1], world_size=2, dynamic=True)
    assert "SymInt" in inputs(traced.graph("forward"))
    assert "all-gather model, 96 B f32, shard=2" in traced.graph("forward").text()


def test_buffers_are_inputs_that_come_out_changed() -> None:
    traced = zg.capture(Normed(), (torch.ones(2, 4),), passes=PASSES[:1], world_size=2)
    forward = traced.graph("forward")
    assert inputs(forward).count("f32[4]") == 2 and "i64[]" in inputs(forward)
    assert "_native_batch_norm_legit_functional" in forward.text()
    assert traced.buffer_bytes == 4 * 4 + 4 * 4 + 8


def test_tensors_in_plain_attributes_are_inputs() -> None:
    traced = zg.capture(Remembering(), (torch.ones(2, 4),), passes=PASSES[:1], world_size=2)
    assert inputs(traced.graph("forward")) == ["f32[2, 4]", "f32[4]", "f32[4]"]


# ------------------------------------------------------------------ steps, graphs and diffs


def test_steps_are_the_passes_that_edit_the_stage() -> None:
    traced = offline(small_tower, *PASSES)
    made = {stage: [step.made_by for step in traced.steps(stage)] for stage in STAGES}
    assert made["joint"] == ["capture", "partition", "reshard"]
    cut = "partition into forward and backward"
    assert made["forward"] == made["backward"] == [cut, "partition", "prefetch", "lower"]
    assert str(traced).splitlines()[-1] == "backward: lower"


def test_a_graph_is_the_scheduled_one_or_as_a_pass_left_it() -> None:
    traced = offline(small_tower, *PASSES)
    steps = traced.steps("forward")
    assert traced.graph("forward") is steps[-2].graph
    for wanted in ("prefetch", zg.Prefetch(1)):
        assert traced.graph("forward", after=wanted) is steps[2].graph
    assert traced.graph("forward", after="lower") is steps[3].graph
    assert not traced.graph("joint", after="capture").gathers()
    assert "gather(" not in traced.graph("forward", after="lower").text()


@zg.graph_pass(stage="joint")
def look(graph: zg.Graph, plan: zg.Plan) -> None:
    """Edits nothing."""


def test_a_pass_is_found_by_its_name_by_its_text_and_by_its_functions_name() -> None:
    passes = (zg.Partition(), zg.Prefetch(2, backward_units=0), look)
    traced = offline(small_tower, *passes)
    for wanted in (passes[1], "prefetch", "prefetch{units=2,backward_units=0}"):
        assert traced.graph("forward", after=wanted) is traced.graph("forward")
    for wanted in (look, str(look), "look"):
        assert traced.diff(wanted, "joint") == ""


def test_a_diff_is_what_one_pass_changed() -> None:
    traced = offline(small_tower, *PASSES)
    diff = traced.diff("prefetch", "forward").splitlines()
    assert diff[0].startswith("@ ")
    assert {line[0] for line in diff} == {"@", " ", "-", "+"}
    assert traced.diff(zg.Prefetch(1), "forward") == traced.diff("prefetch", "forward")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda c: c.graph("forwards"), "no forwards graph; it has joint, forward, backward"),
        (lambda c: c.graph("forward", frame=1), "frame 1: this call has 1, counted from 0"),
        (lambda c: c.steps("forward", frame=-1), "frame -1: this call has 1, counted from 0"),
        (
            lambda c: c.graph("forward", after="prefech"),
            "no step of the forward graph is called 'prefech'; nearest: prefetch",
        ),
        (
            lambda c: c.graph("joint", after=zg.Prefetch(1)),
            "no step of the joint graph is called 'prefetch'; nearest: ",
        ),
        (
            lambda c: c.diff("prefetch{units=3}", "forward"),
            r"called 'prefetch\{units=3\}'; nearest: prefetch",
        ),
        (
            lambda c: c.diff("capture", "joint"),
            "capture is where the joint graph begins: nothing to compare",
        ),
    ],
)
def test_a_graph_that_is_not_there_is_an_error_with_what_is(
    ask: Callable[[zg.Captured], Any], message: str
) -> None:
    with pytest.raises(zg.GraphError, match=message):
        ask(offline(small_tower, *PASSES))


# ------------------------------------------------------------------ arguments that cannot work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"shard": 2}, "world_size": 2}, "both mesh and world_size; give one"),
        (
            {"passes": HSDP, "world_size": 2},
            r'world_size=2 does not say how long each is; say mesh=\{"replicate": …, "shard": …\}',
        ),
        ({"world_size": 0}, "shard=0: expected a number of ranks, 1 or more"),
        ({"world_size": "2"}, "shard='2': expected a number of ranks"),
        ({"passes": zg.Partition()}, "passes is a Partition; expected a list of passes"),
        ({"world_size": True}, "shard=True: expected a number of ranks"),
        ({"mesh": {"shard": 2.0}}, "shard=2.0: expected a number of ranks"),
        ({"mesh": [2, 4]}, r"mesh=\[2, 4\]: expected a device mesh, or ranks by axis"),
        ({"mesh": {"dp": 2}}, "Partition.shard='shard'.: the mesh has no such axis; it has dp"),
        ({"mesh": {"shard": 2, "dp": 2}}, "2 ranks along 'dp', which Partition does not name"),
    ],
)
def test_a_mesh_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(zg.PassError, match=message):
        zg.capture(Single(), (torch.ones(2, 4),), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": TOKENS}, r"args is a Tensor; expected a tuple .*, such as \(tokens,\)"),
        ({"args": "tokens"}, "args is a str; expected a tuple"),
        ({"args": None}, "args is a NoneType; expected a tuple"),
        ({"kwargs": [TOKENS]}, "kwargs is a list; expected a dict of arguments"),
        ({"device_type": "tpu"}, 'device_type=\'tpu\': expected "cpu" or "cuda"'),
    ],
)
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(zg.ModelError, match=message):
        zg.capture(Single(), **{"args": (torch.ones(2, 4),), **options})


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(zg.ModelError, match="expected an nn"):
        zg.capture("model")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch can trace for CUDA")
def test_cuda_is_refused_by_a_torch_that_was_built_without_it() -> None:
    message = 'this torch was built without CUDA, .*; use device_type="cpu"'
    with pytest.raises(zg.ModelError, match=message):
        zg.capture(Single(), (TOKENS,), device_type="cuda")


def test_errors_of_forward_reach_the_caller() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        zg.capture(Single())
