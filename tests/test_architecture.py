"""The folders of dkfm are floors: pyproject.toml lists their order, and no import goes up or in a circle."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dkfm

ROOT = Path(dkfm.__file__).parent
FOLDERS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["dkfm"][
    "folders"
]
OUTSIDE = {
    "errors": set(),
    "core.display": {"jinja2", "_typeshed"},
    "core": {"numpy", "scipy"},
    "kernels.pairwise": {"numpy", "scipy", "numba", "llvmlite"},
    "kernels": {"numpy", "scipy"},
    "numerics.eigensolvers": {"numpy", "scipy"},
    "numerics": {"numpy", "scipy"},
    "numerics.supervised": {"numpy", "scipy"},
    "numerics.certificates": {"numpy", "scipy"},
    "files": {"numpy", "fsspec", "pyarrow"},
    "storage": {"numpy", "scipy", "zarr", "numcodecs", "google_crc32c"},
    "sources.parquet_files": {"numpy", "pyarrow"},
    "sources": {"numpy", "scipy", "zarr", "numcodecs", "google_crc32c", "pyarrow", "fsspec"},
    "estimators.stored": {"numpy"},
}
"""What else a folder may import beside the standard library; the others may import anything."""

PATHS = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem == "errors")


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PATHS}


def folder_of(module):
    """Return the folder that a module lies in, or is."""
    return module if module in FOLDERS else module.rpartition(".")[0]


def imports(path):
    """Yield the modules that a file imports, those inside its functions too; those of dkfm without its name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name.removeprefix("dkfm.") in MODULES else node.module for name in names)


def of_dkfm(path):
    return {name.removeprefix("dkfm.") for name in imports(path) if name.startswith("dkfm.")} & set(MODULES)


@pytest.mark.parametrize("path", PATHS, ids=module_of)
def test_a_folder_imports_only_from_itself_and_those_above(path):
    own = folder_of(module_of(path))
    allowed = OUTSIDE.get(own)
    for name in imports(path):
        if name.startswith("dkfm."):
            other = folder_of(name.removeprefix("dkfm."))
            assert FOLDERS.index(other) <= FOLDERS.index(own), f"{own} imports {name}"
        elif allowed is not None and name != "dkfm":
            assert name.partition(".")[0] in allowed | set(sys.stdlib_module_names), f"{own} imports {name}"


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: of_dkfm(path) - {module} for module, path in MODULES.items()}
    done = set()

    def visit(module, trail):
        assert module not in trail, " -> ".join([*trail, module])
        for other in graph[module] if module not in done else ():
            visit(other, [*trail, module])
        done.add(module)

    for module in graph:
        visit(module, [])


def test_every_folder_is_in_the_list():
    assert {folder_of(module) for module in MODULES} == set(FOLDERS)


def test_no_module_is_longer_than_400_lines():
    tests = list(Path(__file__).parent.rglob("*.py"))
    assert {p.name: n for p in [*PATHS, *tests] if (n := len(p.read_text(encoding="utf-8").splitlines())) > 400} == {}


def test_no_folder_has_more_than_12_modules():
    folders = {path.parent for path in PATHS} - {ROOT}
    assert {f.name: n for f in folders if (n := len([p for p in f.glob("*.py") if p.stem != "__init__"])) > 12} == {}
    assert len([p for p in ROOT.iterdir() if p.name != "__pycache__"]) <= 18


def test_the_page_of_the_architecture_is_drawn_from_the_imports():
    script = Path(__file__).parents[1] / "docs" / "draw_architecture.py"
    subprocess.run([sys.executable, script, "--check"], check=True)


def test_importing_dkfm_loads_nothing_heavy():
    code = (
        "import sys, dkfm; print([m for m in ('dask', 'zarr', 'numpy', 'sklearn', 'distributed') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
