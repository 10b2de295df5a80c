"""Dask's dashboard during a job, in a real browser: the names of the tasks on the page, and how it looks."""

import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import dkfm
from cluster.needs import needs
from dkfm import kernels
from helpers import harness
from helpers.browser import open_page

needs("chromium")


ROOT = Path(__file__).parent.parent.parent
STREAM = 'Bokeh.documents[0].get_model_by_name("task_stream").renderers[0].data_source.data.name'
"""Of each task on the page's stream, what one reads over it."""


TRANSFERS = {"transfer-dkfm-score", "disk-write-dkfm-score"}
PROGRESS = 'Bokeh.documents[0].get_model_by_name("task_progress").title.text'


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What a browser saw of a job: while it ran, and in its report."""
    folder, rng = tmp_path_factory.mktemp("seen"), np.random.default_rng(9)
    kernel = kernels.Matern(1.7, 6.0)  # Bessel functions take their time
    dkfm.KernelPCA(2, kernel=kernel).fit(rng.normal(size=(250, 20))).save(folder / "model")
    np.save(folder / "rows.npy", rng.normal(size=(100_000, 20)))
    paths = (str(folder / name) for name in ("model", "rows.npy", "scores.zarr"))
    options = ["--chunk-rows", "100", "--no-progress", "--report", str(folder / "report.html")]
    with harness.Site(folder / "site") as site:
        described = json.loads((site.folder / "scheduler.json").read_text())
        url = f"http://127.0.0.1:{described['services']['dashboard']}/status"
        command = [*harness.DKFM, "score", *paths, *options, "--scheduler", site.address]
        with open_page(url) as (page, _):
            return watch(page, command, folder)


def watch(page, command, folder):
    """Watch the dashboard while a job runs for a while, tell it to end, and open its report."""
    page.wait_for_function('[...window.drawn].some(word => word.startsWith("Progress"))')
    with harness.process(command, folder / "driver.log") as driver:
        page.wait_for_function(f"{STREAM}.length >= 40")
        page.wait_for_function('window.drawn.has("dkfm-score")')
        found = {"picture": page.screenshot(), "drawn": set(page.evaluate("[...window.drawn]"))}
        found |= {"tasks": page.evaluate(f"Array.from({STREAM})"), "progress": page.evaluate(PROGRESS)}
        driver.terminate()
        assert driver.wait(harness.LIMIT) == 130
    assert "goes on from there with the same command" in (folder / "driver.log").read_text()
    page.goto((folder / "report.html").as_uri())
    page.wait_for_function("document.title === 'Dask Performance Report' && Bokeh.documents.length")
    return found | {"reported": page.evaluate(f"Array.from({STREAM})")}


def test_the_page_shows_a_job_as_it_goes_by_the_names_of_its_tasks(seen):
    assert "dkfm-score" in seen["drawn"]
    assert set(seen["tasks"]) - TRANSFERS == {"dkfm-score"}
    assert re.match("Progress -- total: [1-9]", seen["progress"])
    assert not {word for word in seen["drawn"] if re.search("[0-9a-f]{32}", word)}


def test_its_picture_is_that_of_the_readme(seen):
    assert is_no_blank(seen["picture"])
    assert len(seen["picture"]) < 300_000
    if os.environ.get("DKFM_PICTURE"):
        Path(os.environ["DKFM_PICTURE"]).write_bytes(seen["picture"])
    kept = (ROOT / "cluster" / "dashboard.png").read_bytes()
    assert is_no_blank(kept)
    assert len(kept) < 300_000
    assert "](../../cluster/dashboard.png)" in (ROOT / "docs" / "user_guide" / "clusters.md").read_text()


def test_the_report_of_a_job_that_was_told_to_end_opens_without_a_network(seen):
    assert set(seen["reported"]) - TRANSFERS == {"dkfm-score"}
    assert len(seen["reported"]) >= 40


def is_no_blank(png):
    """Whether there is something in every quarter of a picture, and some of it has colours."""
    image = pytest.importorskip("matplotlib.image", reason="it reads pictures").imread(io.BytesIO(png))[..., :3]
    rows, columns = (half // 2 for half in image.shape[:2])
    quarters = [part for half in (image[:rows], image[rows:]) for part in (half[:, :columns], half[:, columns:])]
    return min(part.std() for part in quarters) > 0.02 and (np.ptp(image, axis=2) > 0.3).mean() > 0.01
