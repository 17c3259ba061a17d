"""Agreement: before anything is changed, every rank learns whether all have the same plan.

Ranks exchange text through the process group's store, never through a collective: a rank that
failed, or that never came, must not leave the others waiting inside one.
"""

import difflib
import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from zgraph._torch import default_store
from zgraph.config import config
from zgraph.errors import RankError

T = TypeVar("T")
_ROUND = "zgraph/rounds"


def agree(ranks: list[int], rank: int, make: Callable[[], T], text: Callable[[T], str]) -> T:
    """Run `make` on every rank and compare `text` of the results.

    Args:
        ranks: global ranks that must agree; `rank` is this one.
        make: what to compute; may raise.
        text: what must be equal, as lines.

    Returns:
        This rank's own result.

    Raises:
        RankError: on every rank alike, within `config.agree_timeout_s` of the first: a rank raised
            (its error is shown), did not come, or differs (the first different line is shown).
        Exception: what `make` raised, on the rank where it did.
    """
    if len(ranks) == 1:
        return make()
    store = dist.PrefixStore(_next_round(ranks, rank), default_store())
    try:
        result = make()
    except Exception as error:
        store.set(str(rank), f"error {type(error).__name__}: {error}")
        raise
    mine = text(result)
    digest = _digest(mine)
    # The text first: whoever sees the digest may ask for the text.
    store.set(f"{rank}/text", mine)
    store.set(str(rank), f"plan {digest}")
    for other in ranks:
        kind, _, theirs = _read(store, rank, other).partition(" ")
        if kind == "error":
            raise RankError(f"rank {other} failed in zg.compile with {theirs}")
        if theirs != digest:
            raise _difference(rank, mine, other, store.get(f"{other}/text").decode())
    return result


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _next_round(ranks: list[int], rank: int) -> str:
    """A key from this rank's own count of rounds among `ranks`, equal where the calls were."""
    members = f"{_ROUND}/{_digest(str(ranks))[:16]}"
    count = default_store().add(f"{members}/{rank}", 1)
    return f"{members}/round {count}"


def _read(store: dist.Store, rank: int, other: int) -> str:
    try:
        store.wait([str(other)], timedelta(seconds=config.agree_timeout_s))
    except dist.DistError as error:
        late = RankError(
            f"rank {other} did not reach zg.compile within {config.agree_timeout_s:g} s of this "
            "rank; every rank of the mesh must call it, in the same order (the time is "
            "ZGRAPH_AGREE_TIMEOUT_S)"
        )
        # A rank that comes later must not go on without this one. Differences and errors of others
        # need no such word: every rank finds them by itself, and says which ranks they concern.
        store.set(str(rank), f"error RankError: {late}")
        raise late from error
    return store.get(str(other)).decode()


def _difference(rank: int, mine: str, other: int, theirs: str) -> RankError:
    changed = [
        line
        for line in difflib.unified_diff(mine.splitlines(), theirs.splitlines(), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    here = next((line[1:].strip() for line in changed if line.startswith("-")), "nothing")
    there = next((line[1:].strip() for line in changed if line.startswith("+")), "nothing")
    return RankError(
        f"ranks {rank} and {other} have different plans; first difference: rank {rank} has "
        f"«{here}», rank {other} has «{there}». Build the same model and pass list on every rank"
    )
