"""Rules about where things lie and who imports whom, held by reading files, not by running them."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS, ZGRAPH, EXPERIMENTS = ROOT / "kernels", ROOT / "zgraph", ROOT / "experiments"
PRIVATE_TORCH = ZGRAPH / "_torch.py"

TOP_LEVEL_FOLDERS = {"zgraph", "kernels", "experiments", "tests", "scripts"}
TOP_LEVEL_FILES = {"README.md", "LICENSE", "CONTRIBUTING.md", "pyproject.toml"}
BY_PRODUCTS = {"__pycache__", "build", "dist"}  # git ignores them

LAYERS = {
    "kernels/zgraph_kernels": {"zgraph", "experiments", "tests"},
    "zgraph": {"experiments", "tests"},
    "experiments": {"tests"},
}
"""Each folder, with the packages that it must not import: they stand above it."""


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported absolutely: `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def attribute_chains(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each attribute access on a plain name, such as `torch._dynamo`."""
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name):
            yield node.lineno, ".".join([inner.id, *reversed(parts)])


def is_private_torch_module(name: str) -> bool:
    """Whether a dotted name reaches into a torch module with a leading underscore.

    Names below `torch.ops` are operators: their underscores say nothing about modules.
    """
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:
        return False
    for end, part in enumerate(parts[1:], start=2):
        if part.startswith("_") and not part.startswith("__"):
            return is_module(".".join(parts[:end]))
    return False


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what stands before the last dot is a class or a function
        return False


def private_torch_uses(path: Path) -> list[str]:
    """`file:line name` for each import of, or attribute path into, a private torch module.

    A name imported with an underscore counts even where it is no module.
    """
    tree = ast.parse(path.read_text())
    imports = {
        (line, name)
        for line, name in imported_names(tree)
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
    }
    accesses = {(line, name) for line, name in attribute_chains(tree)}
    accesses = {(line, name) for line, name in accesses if is_private_torch_module(name)}
    where = path.relative_to(ROOT)
    return [f"{where}:{line} {name}" for line, name in sorted(imports | accesses)]


def test_kernels_is_a_folder_and_not_a_package() -> None:
    assert not (KERNELS / "__init__.py").exists()


def test_importing_kernels_never_finds_this_repository() -> None:
    """A namespace package without an origin gives way to any real package of that name."""
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT)


def test_no_folder_of_tests_is_a_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_only_known_entries_stand_at_the_top() -> None:
    entries = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    unknown = entries - TOP_LEVEL_FOLDERS - TOP_LEVEL_FILES - BY_PRODUCTS
    assert not {name for name in unknown if not name.endswith(".egg-info")}


def test_private_torch_names_are_imported_in_one_module_only() -> None:
    files = python_files(ZGRAPH, KERNELS, EXPERIMENTS)
    assert not [use for path in files if path != PRIVATE_TORCH for use in private_torch_uses(path)]


@pytest.mark.parametrize("folder", LAYERS)
def test_imports_go_one_way(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in python_files(ROOT / folder)
        for line, name in imported_names(ast.parse(path.read_text()))
        if name.split(".")[0] in LAYERS[folder]
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("name", "private"),
    [
        ("torch._dynamo.config", True),
        ("torch.distributed._functional_collectives.all_reduce", True),
        ("torch._foreach_mul_", False),
        ("torch.Tensor._make_subclass", False),
        ("torch.ops._c10d_functional.wait_tensor", False),
        ("torch.nn.functional.linear", False),
    ],
)
def test_private_modules_are_told_from_private_functions(name: str, private: bool) -> None:
    assert is_private_torch_module(name) is private


@pytest.mark.parametrize("path", python_files(ZGRAPH / "passes"), ids=lambda path: path.stem)
def test_shipped_passes_edit_graphs_through_the_handle_only(path: Path) -> None:
    around = {"fx", "meta", "prepend", "replace_input_with", "replace_all_uses_with"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not used & around
