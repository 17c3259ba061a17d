"""Agreement: ranks learn whether all have the same plan and the same graphs, or why not.

Ranks exchange text through the process group's store, never through a collective: a rank that
failed, or that never came, must not leave the others waiting inside one. Plans are compared before
anything is changed, and the collectives of every new graph before it runs.

Note [Comparing graphs]
Ranks recompile at different times: one meets a new batch size, and the others do not. What must be
equal is the order of collectives, and a graph for another batch size has the same as the one that
it replaces. So each rank counts the distinct orders of collectives that it has compiled, and its
n-th must equal the others' n-th. An order that was agreed on before is compared with nobody: no
rank waits for one that has nothing to compile.
"""

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist

from zgraph._torch import default_store
from zgraph.config import config
from zgraph.errors import RankError

T = TypeVar("T")
_ROUND = "zgraph/rounds"


class Meeting:
    """The ranks of one `zg.compile`, and the store through which they compare.

    Args:
        ranks: global ranks that must agree; `rank` is this one.
    """

    def __init__(self, ranks: list[int], rank: int) -> None:
        self.ranks = ranks
        self.rank = rank
        self._store = None if len(ranks) == 1 else _open_round(ranks, rank)
        self._agreed: list[str] = []
        self._broken: RankError | None = None

    def agree(self, make: Callable[[], T], text: Callable[[T], str]) -> T:
        """Run `make` on every rank and compare `text` of the results.

        Args:
            make: what to compute; may raise.
            text: what must be equal, as lines.

        Returns:
            This rank's own result.

        Raises:
            RankError: on every rank alike, within about `config.agree_timeout_s` of the first: a
                rank raised (its error is shown), did not come, or differs (the first different
                line is shown).
            Exception: what `make` raised, on the rank where it did.
        """
        if self._store is None:
            return make()
        store, seconds = self._store, config.agree_timeout_s
        try:
            result = make()
        except Exception as error:
            self._say(store, f"error {type(error).__name__}: {error}")
            raise
        late = (
            f"did not reach zg.compile within {seconds:g} s of this rank; every rank of the mesh "
            "must call it, in the same order (the time is ZGRAPH_AGREE_TIMEOUT_S)"
        )
        self._compare(store, text(result), "zg.compile", late, seconds)
        # A rank that gave up on a late one says so here to those for whom it was not late.
        self._say(dist.PrefixStore("accepted", store), "yes")
        for other in self.ranks:
            self._heard(dist.PrefixStore("accepted", store), other, "zg.compile", late, seconds)
        return result

    def compare(self, collectives: Sequence[str]) -> None:
        """Compare the collectives of a graph, one a line. See Note [Comparing graphs].

        Raises:
            RankError: on every rank that compiles: another's differ, it failed, or it compiled
                nothing within `config.graph_timeout_s`.
        """
        text = "\n".join(collectives)
        if self._store is None or not text or text in self._agreed:
            return
        if self._broken is not None:
            # What ranks have said of this graph stays in the store, and may mislead them now.
            raise RankError(f"these ranks have disagreed before: {self._broken}")
        seconds = config.graph_timeout_s
        late = (
            f"compiled no graph to match within {seconds:g} s, while this rank compiled one with "
            f"collectives that it had not had before:\n{text}\nRanks must take the same branches "
            "of the model, in the same order (the time is ZGRAPH_GRAPH_TIMEOUT_S)"
        )
        try:
            self._compare(self._graph_store(self._store), text, "compiling a graph", late, seconds)
        except RankError as error:
            self._broken = error
            raise
        self._agreed.append(text)

    def failed(self, error: Exception) -> None:
        """Tell ranks that wait to compare this rank's next graph that there will be none."""
        if self._store is not None:
            self._say(self._graph_store(self._store), f"error {type(error).__name__}: {error}")

    def _graph_store(self, store: dist.Store) -> dist.Store:
        return dist.PrefixStore(f"graph {len(self._agreed)}", store)

    def _compare(self, store: dist.Store, mine: str, doing: str, late: str, seconds: float) -> None:
        digest = _digest(mine)
        # The text first: whoever sees the digest may ask for the text.
        store.set(f"{self.rank}/text", mine)
        self._say(store, f"has {digest}")
        for other in self.ranks:
            theirs = self._heard(store, other, doing, late, seconds)
            if theirs != digest:
                raise self._difference(mine, other, store.get(f"{other}/text").decode(), doing)

    def _say(self, store: dist.Store, word: str) -> None:
        store.set(str(self.rank), word)

    def _heard(self, store: dist.Store, other: int, doing: str, late: str, seconds: float) -> str:
        """What `other` said. Raises `RankError` if it failed, or said nothing in time."""
        try:
            store.wait([str(other)], timedelta(seconds=seconds))
        except dist.DistError as error:
            silent = RankError(f"rank {other} {late}")
            # A rank that comes later must not go on without this one. Differences and errors of
            # others need no such word: every rank finds them by itself.
            for place in (store, dist.PrefixStore("accepted", store)):
                self._say(place, f"error RankError: {silent}")
            raise silent from error
        kind, _, word = store.get(str(other)).decode().partition(" ")
        if kind == "error":
            raise RankError(f"rank {other} failed in {doing} with {word}")
        return word

    def _difference(self, mine: str, other: int, theirs: str, doing: str) -> RankError:
        pairs = zip_longest(mine.splitlines(), theirs.splitlines(), fillvalue="nothing")
        here, there = next(
            ((one.strip(), line.strip()) for one, line in pairs if one != line),
            ("this", "something else by now"),
        )
        what, cure = (
            ("plans", "Build the same model and pass list on every rank")
            if doing == "zg.compile"
            else ("collectives", "Take the same branches and edit graphs alike on every rank")
        )
        return RankError(
            f"ranks {self.rank} and {other} have different {what}; first difference: rank "
            f"{self.rank} has «{here}», rank {other} has «{there}». {cure}"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _open_round(ranks: list[int], rank: int) -> dist.Store:
    """The store under a key from this rank's own count of rounds, equal where the calls were."""
    members = f"{_ROUND}/{_digest(str(ranks))[:16]}"
    count = default_store().add(f"{members}/{rank}", 1)
    return dist.PrefixStore(f"{members}/round {count}", default_store())
