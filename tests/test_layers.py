"""A module of dkfm imports only from the floors above its own in the table, functions included."""

import ast
import sys
from pathlib import Path

import pytest

import dkfm

ROOT = Path(dkfm.__file__).parent
FLOORS = [
    {"errors", "printing", "tiling", "budget", "chunking", "sizing", "ahead", "display", "starting"},
    {
        "kernels",
        "links",
        "model",
        "triangular",
        "narrow",
        "apply",
        "root",
        "spectrum",
        "cholesky",
        "lanczos",
        "pca",
        "fisher",
        "shrinkage",
        "affine",
        "preimage",
        "sweep",
        "certificate",
        "discriminant_certificate",
        "dense",
    },
    {
        "documents",
        "codecs",
        "refusals",
        "filesystems",
        "remote",
        "bounded",
        "formats",
        "files",
        "scratch",
        "stamps",
        "decoded",
        "plain",
        "store",
        "csr",
        "npy",
        "npz",
        "listing",
        "footers",
        "parquet",
        "streamed",
        "record",
        "transfer",
        "places",
        "remote_rows",
        "memory_rows",
        "owned",
        "apart",
        "sources",
        "chunks",
        "tables",
        "journal",
        "outputs",
        "completion",
        "inspection",
    },
    {
        "parting",
        "slurm_spec",
        "slurm_jobs",
        "slurm",
        "clusters",
        "ssh",
        "executors",
        "workers",
        "preflight",
        "fitness",
        "schedulers",
        "progress",
        "job",
        "gram",
        "panels",
        "lazy",
        "planning",
        "tasks",
        "preparing",
        "report",
        "scoring",
        "readers",
        "verification",
    },
    {"estimators"},
    {
        "drawn",
        "canvas",
        "planes",
        "plotting",
        "tsne",
        "page",
        "comparison",
        "labelled",
        "compare",
        "demo",
        "bench",
        "arguments",
        "dashboard",
        "fitting",
        "commands",
        "program",
        "cli",
        "__main__",
        "__init__",
    },
]
OUTSIDE = [
    set(),
    {"numpy", "scipy", "numba"},
    {"numpy", "scipy", "zarr", "numcodecs", "google_crc32c", "pyarrow", "fsspec"},
]


def module_files():
    return [
        path
        for path in ROOT.rglob("*.py")
        if path.parent == ROOT or path.parent.name in ("kernels", "estimators", "bench")
    ]


def floor_of(name):
    return next(i for i, floor in enumerate(FLOORS) if name in floor)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ([f"{node.module}.{a.name}" for a in node.names] if node.module == "dkfm" else [node.module])


@pytest.mark.parametrize("path", module_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_from_its_own_floor_and_those_before(path):
    own = path.parent.name if path.parent != ROOT else path.stem
    floor = floor_of(own)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "dkfm" and len(parts) > 1 and not parts[1].startswith("__version"):
            assert floor_of(parts[1]) <= floor, f"{own} imports {name}"
        elif floor < len(OUTSIDE) and parts[0] != "dkfm":
            assert parts[0] in OUTSIDE[floor] | set(sys.stdlib_module_names), f"{own} imports {name}"


def test_no_module_is_longer_than_400_lines():
    assert {p.name: n for p in module_files() if (n := len(p.read_text().splitlines())) > 400} == {}


def test_no_module_of_the_kernels_is_longer_than_250_lines():
    longest = {p.name: n for p in (ROOT / "kernels").glob("*.py") if (n := len(p.read_text().splitlines())) > 250}
    assert longest == {}


def test_imports_of_a_floor_have_no_cycles():
    graph = {}
    for path in module_files():
        if path.parent == ROOT and path.stem != "__init__":
            graph[path.stem] = {n.split(".")[1] for n in imports(path) if n.startswith("dkfm.")} - {"__version__"}
    done = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail, name])
        for other in graph.get(name, ()) if name not in done else ():
            visit(other, [*trail, name])
        done.add(name)

    for name in graph:
        visit(name, [])


def test_importing_dkfm_loads_nothing_heavy():
    import subprocess

    code = (
        "import sys, dkfm; print([m for m in ('dask', 'zarr', 'numpy', 'sklearn', 'distributed') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
