"""Settings read from the environment, once, when zgraph is imported."""

import os
from dataclasses import dataclass

from zgraph.errors import ZGraphError


@dataclass(frozen=True)
class Config:
    """Process-wide settings.

    Attributes:
        agree_timeout_s: seconds that a rank waits for the others' plans before it raises.
        graph_timeout_s: seconds that it waits for the others to compile a graph like its own.
        verify: whether graphs are verified after every pass.
    """

    agree_timeout_s: float = 45.0
    graph_timeout_s: float = 300.0
    verify: bool = True


def _positive_seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ZGraphError(f"{variable}={text!r}: expected a number of seconds above 0, such as 45")
    return value


def _switch(variable: str) -> bool:
    text = os.environ.get(variable, "1")
    if text not in ("0", "1"):
        raise ZGraphError(f"{variable}={text!r}: expected 0 or 1")
    return text == "1"


config = Config(
    agree_timeout_s=_positive_seconds("ZGRAPH_AGREE_TIMEOUT_S", Config.agree_timeout_s),
    graph_timeout_s=_positive_seconds("ZGRAPH_GRAPH_TIMEOUT_S", Config.graph_timeout_s),
    verify=_switch("ZGRAPH_VERIFY"),
)
