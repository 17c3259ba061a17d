"""What every test of the suite shares."""

import os
from collections.abc import Iterator

import pytest
import torch

# Where there is no GPU, Triton's kernels run in its interpreter. Triton asks when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Before anything imports it: its assertions explain themselves as a test's own do.
pytest.register_assert_rewrite("tests.support.training")

from tests.support import pool  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tests are small, and sums over one thread are repeatable."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _workers_end_with_the_session() -> Iterator[None]:
    yield
    pool.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
