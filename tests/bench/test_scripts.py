"""What scripts take from dkfm is there: they run in a part of the tests that comes last, and takes long."""

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path for folder in ("tests/benchmarks", "cluster", "examples") for path in (ROOT / folder).glob("*.py")
)


def find(module, name):
    """Return what a module calls by a name, or has as a module in its folder."""
    found = import_module(module)
    return getattr(found, name) if hasattr(found, name) else import_module(f"{module}.{name}")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_names_that_a_script_takes_from_dkfm_are_there(path):
    tree = ast.parse(path.read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    taken = {
        alias.asname or alias.name: find(node.module, alias.name)
        for node in imported
        if node.module.partition(".")[0] == "dkfm"
        for alias in node.names
    }
    for node in ast.walk(tree):
        owner = (
            taken.get(node.value.id) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else None
        )
        if isinstance(owner, ModuleType):
            assert hasattr(owner, node.attr), f"line {node.lineno}: {owner.__name__} has no {node.attr}"
