"""Tests and benchmarks that run seldom import names that the package has."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def names_of(module: str) -> set[str]:
    """Return what a module of the package defines or imports, its own modules among them."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    named = {each.stem for each in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            named.add(node.name)
        elif isinstance(node, ast.alias):
            named.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            named.add(node.id)
    return named


def imported() -> Iterator[tuple[Path, str, str]]:
    """Yield file, module and name of each import of a name of the package."""
    for folder in ("tests", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("envpipe_"):
                    yield from ((file, node.module or "", each.name) for each in node.names)


def test_all_names_that_are_imported_exist():
    found = list(imported())
    known = {module: names_of(module) for module in {module for _, module, _ in found}}
    missing = [each for each in found if each[2] not in known[each[1]]]
    assert len(found) > 1000
    assert not missing
