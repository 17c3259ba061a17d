"""What is captured once stays captured; what is captured names nothing of this process."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import zgraph as zg
from tests.capture.steps import captured_on_all, compiled, small_tower, tied_tower, tower
from tests.passes.toys import Block
from tests.support.pool import run_ranks

BY_CLASS = zg.Group.by_class(Block)
Stages = list[str]


def stages(model: nn.Module) -> Stages:
    """Stage of every graph captured so far."""
    return [graph.stage for frame in zg.inspect(model).frames for graph in frame.graphs]


def tokens(rows: int = 2) -> Tensor:
    return torch.arange(4 * rows).view(rows, 4) % 8


def train_four_steps() -> tuple[list[Stages], int]:
    """On a rank: the stages captured after each step of a training loop, and Dynamo's own count."""
    model = compiled(small_tower, (zg.Partition(), BY_CLASS, zg.Prefetch(1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen, before = [], counters["stats"]["unique_graphs"]
    for _ in range(4):
        model(tokens()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(stages(model))
    return seen, counters["stats"]["unique_graphs"] - before


def test_a_training_loop_captures_in_its_first_step_only() -> None:
    seen, graphs = run_ranks(train_four_steps, 2)[0]
    assert seen == [["forward", "backward"]] * 4
    assert graphs == 1


def train_and_evaluate() -> list[Stages]:
    """On a rank: the stages captured after each of: evaluate, train, evaluate, train."""
    model, seen = compiled(small_tower, (zg.Partition(), BY_CLASS)), []
    for _ in range(2):
        with torch.no_grad():
            model(tokens())
        seen.append(stages(model))
        model(tokens()).square().mean().backward()
        seen.append(stages(model))
    return seen


def test_evaluation_without_gradients_is_one_more_graph() -> None:
    seen = run_ranks(train_and_evaluate, 2)[0]
    both = ["inference", "forward", "backward"]
    assert seen == [["inference"], both, both, both]


def change_batch_size(dynamic: bool | None) -> list[int]:
    """On a rank: frames captured after batches of 2, 3, 4, 5 rows."""
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    passes = [zg.Partition(), BY_CLASS]
    model = zg.compile(small_tower(), passes, mesh=mesh, backend="aot_eager", dynamic=dynamic)
    counts = []
    for rows in (2, 3, 4, 5):
        model(tokens(rows)).square().mean().backward()
        counts.append(len(zg.inspect(model).frames))
    return counts


@pytest.mark.parametrize(
    ("dynamic", "expected"), [(None, [1, 2, 2, 2]), (True, [1] * 4), (False, [1, 2, 3, 4])]
)
def test_new_shapes_recompile_as_torch_compile_would(
    dynamic: bool | None, expected: list[int]
) -> None:
    assert run_ranks(change_batch_size, 2, dynamic)[0] == expected


def captures_of_two_models() -> list[list[Stages]]:
    """On a rank: two models of one class, with different passes, trained in turn."""
    models = [
        compiled(small_tower, (zg.Partition(), BY_CLASS)),
        compiled(small_tower, (zg.Partition(), zg.Group.whole(), zg.MixedPrecision("bf16"))),
    ]
    seen = []
    for _ in range(2):
        for model in models:
            model(tokens()).float().square().mean().backward()
        seen.append([stages(model) for model in models])
    gathers = [zg.inspect(model).graphs("forward")[0].gathers for model in models]
    assert [len(found) for found in gathers] == [4, 1]
    return seen


def test_two_models_of_one_class_have_graphs_of_their_own() -> None:
    step = [["forward", "backward"]] * 2
    assert run_ranks(captures_of_two_models, 2)[0] == [step, step]


def texts_of_models_with_other_batches() -> list[str]:
    """On a rank: the forward of two models of one class, each called with its own batch size."""
    texts = []
    for rows in (2, 3):
        model = compiled(small_tower, (zg.Partition(), BY_CLASS))
        model(tokens(rows)).square().mean().backward()
        texts.append(zg.inspect(model).graphs("forward")[0].text)
    return texts


def test_a_models_sizes_do_not_make_another_models_dynamic() -> None:
    for text in run_ranks(texts_of_models_with_other_batches, 2)[0]:
        assert not re.search(r"\bs\d+\b", text)


@pytest.mark.parametrize("make", [tower, tied_tower])
def test_graphs_hold_no_ids_or_addresses(make: Callable[[], nn.Module]) -> None:
    passes = (BY_CLASS, zg.Persist(16), zg.Prefetch(1))
    first, second = captured_on_all(make, *passes)
    for stage in ("forward", "backward"):
        one, other = getattr(first, stage).text, getattr(second, stage).text
        assert one == other  # of two processes
        assert not re.search(r"0x[0-9a-f]{4}|\d{9}", one)
