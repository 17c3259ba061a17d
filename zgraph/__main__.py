"""The command `zgraph`: explain a model under a pass list, on a mesh that need not exist.

    zgraph explain train.py:build --passes train.py:passes --world-size 64 --html out.html

`build` is a function without arguments that returns the model and the arguments of its call:
(model, args) or (model, args, kwargs). It runs under `torch.device("meta")`, so that a large model
takes no memory. `passes` is a list of passes, or a function that returns one. Either is given as
file.py:name or as module:name.
"""

import argparse
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch
from rich.console import Console

from zgraph.capture import Captured, capture, is_called
from zgraph.errors import GraphError, ModelError, ZGraphError, nearest
from zgraph.explain import explain
from zgraph.explain.explanation import OPTIMIZER_STATES
from zgraph.ir.graph import Stage


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        _explain(options)
    except ZGraphError as error:
        print(f"zgraph: {error}", file=sys.stderr)
        return 1
    return 0


def _explain(options: argparse.Namespace) -> None:
    captured = _capture(options)
    explanation = explain(captured, optimizer=options.optimizer, fused=options.fused)
    # What passes print of themselves has brackets, which rich would take for its markup.
    Console(markup=False, emoji=False).print(explanation.tables())
    for stage in options.text:
        _print_texts(captured, stage)
    for name in options.diff:
        _print_diffs(captured, name)
    if options.html is not None:
        try:
            explanation.to_html(options.html)
        except OSError as error:
            raise ZGraphError(f"cannot write {options.html}: {error.strerror}") from error
        print(f"wrote {options.html}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zgraph", description="Sharded training as graph passes.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "explain",
        help="show what a model holds and sends under a pass list, without running it",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("model", help="function that builds the model: file.py:name, module:name")
    command.add_argument("--passes", help="pass list, or a function that returns one")
    command.add_argument("--world-size", type=int, help="ranks to split over")
    command.add_argument(
        "--mesh",
        type=_axes,
        metavar="AXIS=RANKS,…",
        help="the mesh, such as replicate=4,shard=8",
    )
    command.add_argument("--device-type", choices=["cpu", "cuda"], help="default: cpu")
    command.add_argument("--optimizer", choices=sorted(OPTIMIZER_STATES), default="adamw")
    command.add_argument(
        "--fused", action="store_true", help="count memory as of a compiler that fuses"
    )
    command.add_argument("--text", action="append", default=[], choices=get_args(Stage))
    command.add_argument("--diff", action="append", default=[], metavar="PASS")
    command.add_argument("--html", type=Path, metavar="FILE", help="write the pass explorer")
    return parser


def _axes(text: str) -> dict[str, int]:
    axes = {}
    for part in text.split(","):
        name, _, ranks = part.partition("=")
        if not name or not ranks.isdigit():
            raise argparse.ArgumentTypeError(f"{part!r}: expected axis=ranks, such as shard=8")
        axes[name] = int(ranks)
    return axes


def _capture(options: argparse.Namespace) -> Captured:
    passes: Any = []
    if options.passes:
        named: Any = _named(options.passes)
        passes = named() if callable(named) else named
    build = _named(options.model)
    if not callable(build):
        raise ModelError(
            f"{options.model} is a {type(build).__name__}; expected a function that builds the "
            "model"
        )
    with torch.device("meta"):
        built = build()
    if not (isinstance(built, tuple) and len(built) in (2, 3)):
        raise ModelError(
            f"{options.model} returned a {type(built).__name__}; expected (model, args) or "
            "(model, args, kwargs)"
        )
    return capture(
        *built,
        passes=passes,
        mesh=options.mesh,
        world_size=options.world_size,
        device_type=options.device_type,
    )


def _named(target: str) -> Any:
    """What `file.py:name` or `module:name` stands for."""
    place, _, name = target.rpartition(":")
    if not place:
        raise ModelError(f"{target!r}: expected file.py:name or module:name")
    is_file = place.endswith(".py")
    folder = str(Path(place).resolve().parent if is_file else Path.cwd())
    sys.path.insert(0, folder)
    try:
        module = _loaded(Path(place).resolve()) if is_file else importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ModelError(f"{target!r}: {error}") from error
    finally:
        sys.path.remove(folder)
    if not hasattr(module, name):
        raise ModelError(f"{place} has no {name!r}; {nearest(name, vars(module))}")
    return getattr(module, name)


def _loaded(file: Path) -> ModuleType:
    """The file as a module, run once, also where another module has its name already."""
    name = file.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(file):
        name = re.sub(r"\W+", "_", str(file))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ModelError(f"there is no file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _print_texts(captured: Captured, stage: Stage) -> None:
    """The graphs at a stage, frame after frame."""
    frames = [index for index, frame in enumerate(captured.frames) if stage in frame.stages]
    for index in frames or [0]:  # the first frame's error says which stages there are
        print(captured.graph(stage, frame=index))


def _print_diffs(captured: Captured, name: str) -> None:
    """What a pass, given by its name or as it prints, changed in each graph that it edits."""
    known: list[str] = []
    printed = False
    for index, frame in enumerate(captured.frames):
        for stage in frame.stages:
            for step in captured.steps(stage, index)[1:]:
                known.append(step.made_by)
                if is_called(step, name):
                    printed = True
                    print(f"{step.made_by} in the {stage} graph")
                    print(captured.diff(step.made_by, stage, index) or "changed nothing")
    if not printed:
        raise GraphError(f"no pass called {name!r} edited a graph; {nearest(name, known)}")


if __name__ == "__main__":
    sys.exit(main())
