"""Snapshots: texts that tests expect, in files, to be read by whoever changes them.

`ZGRAPH_UPDATE_SNAPSHOTS=1` writes them anew. A missing one fails: a test that wrote it by itself
would pass whatever the text says.
"""

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).with_name("snapshots")
VARIABLE = "ZGRAPH_UPDATE_SNAPSHOTS"


def check(name: str, text: str, folder: Path = FOLDER) -> None:
    """Fail unless `text` is the snapshot called `name`; or write it, where one asks for that."""
    file = folder / f"{name}.txt"
    lines = [line.rstrip() for line in text.splitlines()]
    if os.environ.get(VARIABLE) == "1":
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    cure = f"{VARIABLE}=1 writes it; read it before you commit it"
    if not file.exists():
        raise AssertionError(f"there is no snapshot {file}; {cure}")
    kept = file.read_text(encoding="utf-8").splitlines()
    if lines != kept:
        changed = "\n".join(difflib.unified_diff(kept, lines, "snapshot", "now", lineterm="", n=1))
        raise AssertionError(f"the text is not as in {file} ({cure}):\n{changed}")
