"""The README and the pages of docs/ are the manual: their commands, examples, numbers and links hold."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dkfm
from dkfm import kernels
from dkfm.core import budget
from dkfm.kernels import serialization

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
FOLDERS = (DOCS, *(DOCS / name for name in ("getting_started", "user_guide", "explanation", "reference")))
FILES = {
    page.stem if page.parent in (ROOT, DOCS) else f"{page.parent.name}/{page.stem}": page
    for page in [README, *(page for folder in FOLDERS for page in sorted(folder.glob("*.md")))]
}
PAGES = {name: page.read_text(encoding="utf-8") for name, page in FILES.items()}
PYTHON = [(name, code) for name, text in PAGES.items() for code in re.findall(r"```python\n(.*?)```", text, re.S)]
SHELL = {
    name: "".join(found) for name, text in PAGES.items() if (found := re.findall(r"```bash\n(.*?)```", text, re.S))
}


@pytest.fixture
def folder(tmp_path, rng):
    """A folder with the rows, labels and modules that the pages name."""
    np.save(tmp_path / "train.npy", rng.normal(size=(200, 5)))
    np.save(tmp_path / "labels.npy", rng.integers(0, 3, 200))
    np.save(tmp_path / "targets.npy", rng.normal(size=(200, 2)))
    np.save(tmp_path / "test.npy", rng.normal(size=(500, 5)))
    table = {"id": np.arange(1000, 1500), **dict(zip("abcde", np.load(tmp_path / "test.npy").T, strict=True))}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    save_named_scripts(tmp_path)
    return tmp_path


def save_named_scripts(folder):
    """Save the examples whose first line is their name."""
    for _, code in PYTHON:
        if (name := re.match(r"# (\w+\.py)\n", code)) is not None:
            (folder / name[1]).write_text(code)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [pytest.param(code, id=name) for name, code in PYTHON if "kinds.parquet" not in code]
)  # that one runs after the commands of its page, below
def test_every_python_example_runs(code, folder, monkeypatch):
    code = code.replace("1_000_000", "20_000").replace("3000", "300").replace("20_000, 2", "2000, 2")
    if "open_scores" in code and "batch_score" not in code:  # of the commands before it
        rows = folder / "test.npy"
        dkfm.KernelPCA(20).fit(np.load(folder / "train.npy")).save(folder / "model")
        dkfm.batch_score(folder / "model", rows, folder / "scores.zarr", progress=False)
    if re.search(r"Client|cluster|__main__|(?m:^(def|class) )", code) is None:
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        exec(compile(code, "example.py", "exec"), {"__name__": "example"})
        return
    # What a notebook may do at the top, a script that starts processes must guard.
    guarded = "if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in code.splitlines())
    (folder / "example.py").write_text(guarded)
    environment = {**os.environ, "DASK_TEMPORARY_DIRECTORY": str(folder)}
    subprocess.run([sys.executable, "example.py"], cwd=folder, check=True, timeout=120, env=environment)


def run_shell(commands, folder, timeout=200):
    """Run commands; if they do not end in time, each Python process among them writes where its threads wait."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            print(started.communicate(timeout=timeout)[0])
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                print(started.communicate(timeout=10)[0])  # all of it, as bash ends first
            raise
    assert started.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("page", SHELL)
def test_the_commands_of_every_page_run_in_order(page, folder, tmp_path):
    if page == "README" or page.startswith("getting_started/"):  # as pasted, in an empty folder
        folder = tmp_path / "empty"
        folder.mkdir()
        save_named_scripts(folder)
    run_shell(SHELL[page], folder)
    if page in ("README", "user_guide/batch_scoring"):
        assert dkfm.open_scores(folder / "scores.zarr").shape == (100_000 if page == "README" else 500, 20)
    if page == "getting_started/shell":
        code = re.search(r"```python\n(.*?)```", PAGES[page], re.S)[1]
        assert "(100000, 20)" in subprocess.check_output([sys.executable, "-c", code], cwd=folder, text=True)
    if page == "getting_started/table":
        code = re.search(r"```python\n(import dkfm\n.*?)```", PAGES[page], re.S)[1]
        assert "class_2 " in subprocess.check_output([sys.executable, "-c", code], cwd=folder, text=True)
    if page == "user_guide/kernels":
        assert dkfm.open_scores(folder / "cauchy.zarr").shape == (500, 5)
    if page == "user_guide/fisher_discriminants":
        assert dkfm.open_scores(folder / "labels.zarr").dtype == np.int64
    if page == "user_guide/ridge_regression":
        assert dkfm.open_scores(folder / "predictions.zarr").shape == (500, 2)
        assert dkfm.open_scores(folder / "classes.zarr", "predict").dtype == np.int64
    if page == "user_guide/comparing_kernels":
        assert (folder / "compare.html").read_text().count("<img ") == 3 * 4
    if page == "user_guide/sources_and_outputs":
        table = dkfm.open_scores(folder / "scores.parquet").compute(scheduler="synchronous")
        assert table.columns.tolist() == ["id", *(f"kernelpca{i}" for i in range(20)), "reconstruction_error"]
        assert table["id"].tolist() == list(range(1000, 1500))


def test_every_page_with_commands_is_known():
    guide = {
        *("batch_scoring", "comparing_kernels", "fisher_discriminants", "kernel_pca", "kernels", "memory_and_sizing"),
        *("ridge_regression", "sources_and_outputs"),
    }
    assert set(SHELL) == {
        "README",
        "getting_started/shell",
        "getting_started/table",
        *(f"user_guide/{name}" for name in guide),
    }


def test_the_file_of_slurm_in_the_guide_is_a_part_of_that_in_the_repository():
    import yaml

    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGES["user_guide/clusters"], re.S)
    shown, whole = (
        yaml.safe_load(shown),
        yaml.safe_load((ROOT / "cluster" / "slurm" / "dkfm.yaml").read_text(encoding="utf-8")),
    )
    assert shown["jobqueue"]["slurm"].items() <= whole["jobqueue"]["slurm"].items()
    assert shown["dkfm"].items() <= whole["dkfm"].items()


def test_examples_are_short():
    lengths = {code: len([line for line in code.splitlines() if line.strip()]) for _, code in PYTHON}
    assert max(lengths.values()) <= 12
    assert next(length for code, length in lengths.items() if "def cauchy" in code) == 1 + 3


@pytest.mark.parametrize("name", sorted(set(PAGES) - {"README"}))
def test_links_lead_to_files_that_are_there(name):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[name]):
        assert (FILES[name].parent / target).exists(), target


def test_links_of_the_readme_are_addresses_of_pages_that_are_there():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    pages, repository = f"{urls['Documentation']}/en/latest/", urls["Homepage"]
    targets = re.findall(r"\]\(([^)]+)\)", PAGES["README"])
    assert targets
    for target in targets:
        path = re.sub(rf"^{re.escape(pages)}|^{re.escape(repository)}/blob/main/", "", target)
        path = re.sub(rf"^{re.escape(repository.replace('github.com', 'raw.githubusercontent.com'))}/main/", "", path)
        file = DOCS / path.replace(".html", ".md") if target.startswith(pages) else ROOT / path
        assert ":" not in path, target
        assert file.exists(), target


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for name, text in PAGES.items():
        for block in re.findall(r"```{toctree}\n(.*?)```", text, re.S):
            entries = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed |= {str((FILES[name].parent / f"{entry}.md").relative_to(DOCS)) for entry in entries}
    pages = {str(page.relative_to(DOCS)) for name, page in FILES.items() if name not in ("README", "index")}
    assert pages == listed - {"gallery/index.md"}


def test_every_public_name_is_in_the_reference():
    text = "\n".join(page for name, page in PAGES.items() if name.startswith("reference/"))
    listed = set(re.findall(r"^(?:   (?:\w+\.)?|\.\. py:data:: )(\w+)$", text, re.M))
    names = set(dkfm.__all__) - {"kernels", "plotting"} | set(kernels.__all__) | set(dkfm.plotting.__all__)
    classes = {name for name, item in vars(dkfm.errors).items() if getattr(item, "__module__", "") == "dkfm.errors"}
    classes = {name for name in classes if isinstance(getattr(dkfm.errors, name), type)}
    assert names | classes | {"Folded", "FoldedTransformer", "embed", "sizing"} <= listed


def test_the_readme_is_short_and_its_first_screen_has_the_two_commands():
    lines = PAGES["README"].splitlines()
    assert len(lines) <= 150
    assert "    python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/dkfm demo" in lines[:24]
    assert "    python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest -n 2" in lines[:24]


def test_the_kernels_of_the_table_are_those_that_have_a_name():
    rows = re.findall(r"^\| `(\w+)\(([\w, ]*)\)` \| .* \| ([\w, ]*)\|$", PAGES["user_guide/kernels"], re.M)
    named = {name: kernel for name, kernel in vars(kernels).items() if is_named(kernel)}
    assert {name for name, _, _ in rows} == set(named) - {"Precomputed"}
    (count,) = re.findall(r"\*\*Any kernel.\*\* (\d+) are built in", PAGES["README"])
    assert int(count) == len(rows)
    for name, parameters, notes in rows:
        kernel = named[name]()
        assert [field.name for field in dataclasses.fields(kernel)] == [p for p in parameters.split(", ") if p]
        assert ("s" in notes.replace(",", " ").split()) == kernel.supports_sparse
        assert ("conditional" in notes) == (kernel.definiteness is kernels.Definiteness.CONDITIONAL)
        assert ("indefinite" in notes) == (kernel.definiteness is kernels.Definiteness.INDEFINITE)


def is_named(kernel):
    return isinstance(kernel, type) and kernel in serialization._NUMERIC.values()


def test_the_table_of_limits_is_what_the_budget_predicts():
    table = PAGES["user_guide/memory_and_sizing"].partition("**All** eigenvectors")[2]
    rows = re.findall(r"^\| ([\d,]+) \| ([\d.]+) GB \|", table, re.M)
    assert len(rows) == 6
    for n, gigabytes in rows:
        assert f"{budget.fit_bytes(int(n.replace(',', '')), 50) / 1e9:.2g}" == f"{float(gigabytes):.2g}"


def test_the_test_commands_of_contributing_select_tests():
    commands = re.findall(
        r"^\| `\.venv/bin/pytest (tests/\S+) -k (\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M
    )
    assert commands
    for file, word in commands:
        assert re.search(rf"^def test_\w*{word}", (ROOT / file).read_text(encoding="utf-8"), re.M), (file, word)


def test_the_files_and_names_that_contributing_lists_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    places = re.findall(r"`((?:dkfm|tests|docs|cluster)/[\w./]*\w)/?`", text)
    assert len(places) > 20
    assert [place for place in places if not (ROOT / place).exists()] == []
    for name, place in re.findall(r"`(_?\w+)` of\s+`((?:dkfm|tests)/[\w/]+\.py)`", text):
        assert re.search(rf"\b{name}\b", (ROOT / place).read_text(encoding="utf-8")), (name, place)


def test_one_version_stands_in_all_files():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert dkfm.__version__ == project["version"]
    files = [ROOT / "CITATION.cff", DOCS / "explanation" / "mathematics.md", *(ROOT / "cluster").glob("*/*")]
    names = {".cff", ".md", ".yaml", ""}  # a Dockerfile has none
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.suffix in names and file.is_file()}
    pattern = r"(?:dkfm:|REGISTRY/dkfm:|^version: |version = \{)(\d+\.\d+\.\d+)"
    found = {file: set(re.findall(pattern, text, re.M)) for file, text in texts.items()}
    assert len([file for file, versions in found.items() if versions]) >= 5
    assert {file: versions for file, versions in found.items() if versions - {project["version"]}} == {}


def test_the_lowest_versions_of_the_page_are_those_of_the_package():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    lowest = dict(re.fullmatch(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", text).groups() for text in needed)
    row = re.search(r"^\| needed \|.*$", PAGES["getting_started/install"], re.M)[0]
    told = re.findall(r"(Dask and distributed|NumPy|SciPy|Zarr|scikit-learn) ([\d.]*\d)", row)
    assert {name.split()[0].lower(): version for name, version in told} == {
        name: lowest[name] for name in ("dask", "numpy", "scipy", "zarr", "scikit-learn")
    }
    assert all(name in row.lower() for name in lowest)
