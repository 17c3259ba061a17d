"""The pass explorer: one HTML page, without anything to fetch, of what passes made of a model.

Its parts lie in the folder `web`, and stand in the page in this order of scripts.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_SCRIPTS = ("basics", "tables", "program", "timeline", "pointing", "search", "passes", "start")


def render(data: Mapping[str, Any]) -> str:
    """The page that shows `data`, complete.

    Args:
        data: JSON values. Bytes are those of one rank, times are microseconds, a unit "" is none.
            title: heading of the page.
            plan: `passes` (names), `axes` ({name, ranks}), `facts` ([label, value]) and `units`
                ({name, numel, shard_bytes, gathered_bytes, parameters}); a parameter is
                {name, shape, numel, dtypes, traits}.
            collectives: {unit, stage, kind, axis, count, bytes}. `stage` is "forward", "backward"
                or "inference", `kind` "all-gather", "reduce-scatter" or "all-reduce"; `bytes` is
                what all `count` of them send in one step.
            memory: `rows` ([label, bytes]), `peak_bytes`, `peak_stage` and `peak_node`. The first
                rows make up the peak and fill its bar; any after them are of other moments.
            assumptions: one sentence on where the times come from.
            programs: {name, stage, lines}; a line is [text, module, unit, kind, gathered bytes
                alive, bytes alive, start, end]. `kind` is "input", "compute", "view", "gather",
                "scatter", "reduce", "wait", "pack" or "output". A collective ends when its data
                has arrived; a wait lasts as long as compute stands still.
            passes: {name, stage, program, added, removed, moved, diff}, one a pass and graph. A
                diff is [tag, text] with tag " ", "+", "-" or "@" (header), or empty.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # Inside a script element only "<" can end the element or begin a comment; it stands in JSON
    # strings alone, where an escape means the same. What is not ASCII is escaped already.
    text = text.replace("<", "\\u003c")
    scripts = "\n".join(_part(f"{name}.js") for name in _SCRIPTS)
    page = _part("page.html").replace("__STYLE__", _part("page.css"), 1)
    # The data last: it may hold any text, placeholders too.
    return page.replace("__SCRIPT__", scripts, 1).replace("__DATA__", text, 1)


def _part(name: str) -> str:
    return files("zgraph.explain").joinpath("web", name).read_text(encoding="utf-8")
