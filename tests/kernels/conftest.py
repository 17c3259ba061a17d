"""Results are poisoned: whatever a kernel forgets to write is NaN, or the largest integer."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _poisoned_results() -> Iterator[None]:
    assert torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
