"""Errors for people: what was given, what was expected, what to do."""

import difflib
from collections.abc import Iterable


class ZGraphError(Exception):
    """Base of every error that zgraph raises on purpose."""


class PassError(ZGraphError, ValueError):
    """A pass list, or a pass's argument, that cannot work. Raised before the model is touched."""


class ModelError(ZGraphError, ValueError):
    """A model that cannot be sharded as asked. Raised before the model is touched."""


class RankError(ZGraphError, RuntimeError):
    """Ranks disagree, or one of them failed or stayed away. Raised on every rank."""


class WholeTensorError(ZGraphError, RuntimeError):
    """An op on a `ShardedParameter` needs the whole tensor."""


class GraphError(ZGraphError, RuntimeError):
    """A graph breaks a rule of the dialect. Names the pass, the node and the rule."""


def nearest(wanted: str, known: Iterable[str], count: int = 4) -> str:
    """The known names closest to `wanted`, as the end of an error message."""
    names = sorted(set(known))
    by_tail = {name.rsplit(".", 1)[-1]: name for name in names}
    close = difflib.get_close_matches(wanted, names, n=count, cutoff=0.4)
    tails = difflib.get_close_matches(wanted.rsplit(".", 1)[-1], by_tail, n=count, cutoff=0.6)
    close += [by_tail[tail] for tail in tails if by_tail[tail] not in close]
    shown = close[:count] or names[:count]
    label = "nearest" if close else "known"
    return f"{label}: {', '.join(shown)}" if shown else "there are none"
