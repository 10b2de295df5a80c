"""Every example runs as a user runs it, small, and what it prints holds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def run(name, folder, *arguments, **variables):
    """Run an example in an empty folder, and return what it printed; a warning is an error."""
    environment = {**os.environ, "DASK_TEMPORARY_DIRECTORY": str(folder), "TMPDIR": str(folder), **variables}
    command = [sys.executable, "-W", "error", EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, check=False, timeout=200, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(text, label):
    """Return the first number of what was printed after a label."""
    found = re.search(rf"^{re.escape(label)}\s+(-?[\d,.]+(?:e[-+]\d+)?)", text, re.M)
    assert found is not None, text
    return float(found[1].replace(",", ""))


def require_picture(path):
    """Assert that a picture has ink in each quarter."""
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    half = np.array(pixels.shape[:2]) // 2
    assert half.min() > 100
    for quarter in (pixels[i : i + half[0], j : j + half[1]] for i in (0, half[0]) for j in (0, half[1])):
        assert (quarter.min(axis=2) < 0.7).mean() > 0.002


@pytest.mark.slow
def test_the_first_map_is_exact_in_every_basis(tmp_path):
    printed = run("01_first_map.py", tmp_path, 200)
    assert number(printed, "error") < 1e-10
    assert number(printed, "error, spectral") < 1e-10
    assert number(printed, "error, cholesky") < 1e-10
    assert 1e-6 < number(printed, "error, both new") < 1


@pytest.mark.slow
def test_kernels_differ_in_what_they_make_of_digits(tmp_path):
    printed = run("02_which_kernel.py", tmp_path, 300)
    accuracies = {line[:35].strip(): float(line.split()[-1]) for line in printed.splitlines()[1:]}
    assert len(accuracies) == 10
    assert accuracies["Gaussian, median distance"] > 0.95
    assert accuracies["Gaussian, far too narrow"] < 0.3
    assert accuracies["plain inner products"] < accuracies["Gaussian, median distance"]


@pytest.mark.slow
def test_circles_are_parted_by_a_plane_after_three_components(tmp_path):
    printed = run("03_circles.py", tmp_path, 300, tmp_path)
    assert number(printed, "a line in the plane") < 0.7
    assert number(printed, "a plane in three components") > 0.97
    require_picture(tmp_path / "circles.png")


@pytest.mark.slow
def test_a_batch_job_that_was_killed_goes_on_and_is_verified(tmp_path):
    printed = run("05_batch_job.py", tmp_path, 40_000, tmp_path)
    again, chunks = map(int, re.search(r"^resumed +(\d+) of (\d+) chunks", printed, re.M).groups())
    assert chunks == 20
    assert again < chunks
    if again:  # the job had not finished when it was told to end
        assert "_COMPLETE" in printed
    assert number(printed, "verified") == chunks
    assert re.search(r"^scores +\(40000, 20\)", printed, re.M)


@pytest.mark.slow
def test_models_learn_from_features_on_disk(tmp_path):
    printed = run("06_out_of_core.py", tmp_path, 25_000)
    assert number(printed, "features") == 25_000
    assert number(printed, "a line") < 0.6
    assert number(printed, "classifier") > 0.9
    assert re.search(r"^components +20 of 150 explain 0\.[5-9]", printed, re.M)
    assert number(printed, "clusters") > 10


@pytest.mark.slow
def test_the_nine_is_found_among_digits_that_are_known(tmp_path):
    printed = run("07_novelty.py", tmp_path, 500)
    rows = re.findall(r"^(\S+) .*sigma = (\S+) +(\S+)$", printed, re.M)
    found = {(name, float(sigma)): float(area) for name, sigma, area in rows}
    assert len(found) == 3 * 3
    for sigma in (0.5, 1.0):
        assert found["residual", sigma] > 0.93
        assert found["reconstruction", sigma] > 0.92
    assert found["OneClassSVM", 1.0] < found["residual", 1.0]
    assert number(printed, "IsolationForest") < 0.85


@pytest.mark.slow
def test_pre_images_take_more_noise_from_digits_than_scikit_learns_example(tmp_path):
    printed = run("08_denoising.py", tmp_path, 500)
    ours = number(printed, "dkfm's preimage, 125 components")
    assert ours < 0.6 * number(printed, "as it came")
    assert ours < number(printed, "scikit-learn's KernelPCA, its example's numbers")
    assert number(printed, "PCA, 32 components") < number(printed, "as it came")


@pytest.mark.slow
def test_a_kernel_that_knows_of_shifts_needs_fewer_signals_and_one_that_is_none_is_refused(tmp_path):
    printed = run("09_own_kernel.py", tmp_path)
    assert number(printed, "Gaussian(sigma=4.0)") < 0.95
    assert number(printed, "Function(over_shifts)") > 0.97
    assert re.search(r"^Function\(best_shift\) +.*not positive semi-definite", printed, re.M)


@pytest.mark.slow
def test_a_grid_search_finds_a_kernel_and_its_width(tmp_path):
    printed = run("10_grid_search.py", tmp_path, 300)
    assert len(re.findall(r"^0\.\d{3}  kernel", printed, re.M)) == 7
    assert float(re.search(r"^0\.(\d{3}) of the others", printed, re.M)[1]) > 940
    assert "'exactfeaturemap__kernel" in printed


@pytest.mark.slow
def test_a_spectral_embedding_is_that_of_scikit_learn(tmp_path):
    printed = run("11_spectral_embedding.py", tmp_path, 400)
    cosines = re.search(r"\[([\d. ]+)\]$", printed, re.M)[1].split()
    assert min(map(float, cosines)) > 0.999
    assert number(printed, "new points on the right moon") > 0.95


@pytest.mark.slow
def test_ridge_regression_of_features_is_kernel_ridge_regression(tmp_path):
    printed = run("12_kernel_ridge.py", tmp_path, 300)
    assert number(printed, "scikit-learn's KernelRidge   root mean squared error") < 0.1
    differences = [float(found) for found in re.findall(r"at most (\S+)$", printed, re.M)]
    assert len(differences) == 3
    assert max(differences) < 1e-9


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_under_its_title_what_to_see_and_fits_a_screen(path):
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[:1] == ['"""']
    assert set(lines[2]) == {"="}
    assert len(lines[2]) == len(lines[1])
    assert " See " in " ".join(text.split('"""')[1].split())
    assert len(lines) < 85
    assert lines[-2] == 'if __name__ == "__main__":'
    # As the source notes mention them: a few lines on top of what there is.
    assert len(lines) <= 45 or not re.search("spectral|ridge", path.stem)


def test_every_notebook_is_named_in_the_gallery_and_every_example_runs_here():
    gallery, here = (EXAMPLES / "README.rst").read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")
    assert all(f"``{path.name}``" in gallery for path in NOTEBOOKS)
    assert all(f'"{path.name}"' in here for path in [*SCRIPTS, *NOTEBOOKS])


def executed(name, folder, rows):
    """Return an executed notebook, its kernel started in an empty folder."""
    reason = "needs the extra test-slow"
    nbformat, nbclient = (pytest.importorskip(module, reason=reason) for module in ("nbformat", "nbclient"))
    book = nbformat.read(EXAMPLES / name, as_version=4)
    variables = {"DKFM_EXAMPLE_ROWS": str(rows), "DASK_TEMPORARY_DIRECTORY": str(folder), "TMPDIR": str(folder)}
    nbclient.NotebookClient(book, timeout=200, resources={"metadata": {"path": str(folder)}}).execute(
        env={**os.environ, **variables, "IPYTHONDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    return book


def outputs(book):
    """Return the outputs of a notebook: what was printed, HTML, and pictures."""
    found = [output for cell in book.cells for output in cell.get("outputs", ())]
    printed = "".join(output["text"] for output in found if output.output_type == "stream")
    data = [output["data"] for output in found if "data" in output]
    return (
        printed,
        [d["text/html"] for d in data if "text/html" in d],
        [d["image/png"] for d in data if "image/png" in d],
    )


def require_pictures(encoded, folder):
    import base64

    for i, picture in enumerate(encoded):
        (folder / f"{i}.png").write_bytes(base64.b64decode(picture))
        require_picture(folder / f"{i}.png")


@pytest.mark.slow
def test_the_notebook_beside_the_dashboard_runs(tmp_path):
    printed, html, pictures = outputs(executed("notebook_dashboard.ipynb", tmp_path, 4000))
    assert "127.0.0.1" in html[0]
    assert "/status" in html[0]
    assert "Kernel Sum" in html[1]
    assert "sk-top-container" in html[2]
    assert "KernelPCA, fitted" in html[2]
    assert "dkfm-card" not in html[4]  # a pipeline
    assert "4,000 rows in 20 chunks" in printed
    assert len(pictures) == 1
    require_pictures(pictures, tmp_path)


@pytest.mark.slow
def test_the_notebook_of_the_papers_figures_runs(tmp_path):
    printed, html, pictures = outputs(executed("paper_figures.ipynb", tmp_path, 60))
    assert float(re.search(r"^([01]\.\d+) of the test images", printed, re.M)[1]) > 0.9
    assert re.search(r"^ *k1 .*\n *k2 ", printed, re.M)
    assert "KernelFisher, fitted" in html[-1]
    assert len(pictures) == 1
    require_pictures(pictures, tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_what_came_out_of_it(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert cells[0]["cell_type"] == "markdown"


@pytest.mark.slow
def test_the_papers_figures_show_that_k2_parts_what_k1_mixes(tmp_path):
    # Without a network and without MNIST it says so, and draws scikit-learn's digits.
    nowhere = "http://127.0.0.1:9"
    printed = run("04_paper_figures.py", tmp_path, 60, tmp_path, DKFM_MNIST="", https_proxy=nowhere, http_proxy=nowhere)
    assert "scikit-learn's digits instead" in printed
    require_picture(tmp_path / "paper_figures.png")
    if os.environ.get("DKFM_MNIST"):
        printed = run("04_paper_figures.py", tmp_path, 150, tmp_path)
        k1, k2 = (number(printed, f"k{i}  accuracy") for i in (1, 2))
        assert k2 > 0.93
        assert k2 > k1 + 0.03
        require_picture(tmp_path / "paper_figures.png")
