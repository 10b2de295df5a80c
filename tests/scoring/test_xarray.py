"""Outputs open in xarray with named dimensions, and in Zarr without a warning about the files of a job."""

import json

import numpy as np
import pytest
import zarr

import dkfm
from dkfm.errors import UnsupportedStoreError
from dkfm.files.location import locate
from dkfm.scoring import output_store

OUTPUTS = ["scores", "reconstruction_error"]


@pytest.fixture
def target(made, tmp_path):
    path = tmp_path / "scores.zarr"
    dkfm.batch_score(made / "unnamed", made / "rows.npy", path, output=OUTPUTS, chunk_rows=20, progress=False)
    return path


def edit(file, change):
    metadata = json.loads(file.read_bytes())
    change(metadata)
    file.write_text(json.dumps(metadata))


def test_xarray_opens_an_output_lazily_with_named_dimensions(target):
    xr = pytest.importorskip("xarray")
    with xr.open_zarr(target) as found:
        assert set(found) == set(OUTPUTS)
        for name in OUTPUTS:
            assert found[name].dims == ("row", f"{name}_column")
            assert found[name].chunks[0][0] == 20
            np.testing.assert_array_equal(found[name], np.asarray(dkfm.open_scores(target, name)))


def test_zarr_lists_the_arrays_of_a_finished_and_of_an_unfinished_output_without_a_warning(target):
    """Warnings are errors in this suite."""
    (target / "_COMPLETE").unlink()
    (target / "_journal").mkdir(exist_ok=True)
    group = zarr.open_group(target, mode="r")
    assert sorted(name for name, _ in group.members()) == sorted(name for name, _ in group.arrays()) == sorted(OUTPUTS)


def test_consolidated_metadata_are_those_of_the_arrays(target):
    consolidated = json.loads((target / "zarr.json").read_bytes())["consolidated_metadata"]["metadata"]
    assert consolidated == {name: json.loads((target / name / "zarr.json").read_bytes()) for name in OUTPUTS}


def test_an_output_of_an_earlier_version_without_names_opens_and_resumes(made, target):
    expected = np.asarray(dkfm.open_scores(target, "scores"))
    edit(target / "zarr.json", lambda m: m.pop("consolidated_metadata"))
    for name in OUTPUTS:
        edit(target / name / "zarr.json", lambda m: m.pop("dimension_names"))
    np.testing.assert_array_equal(dkfm.open_scores(target, "scores"), expected)
    (target / "scores" / "c" / "1" / "0").unlink()
    dkfm.batch_score(made / "unnamed", made / "rows.npy", target, output=OUTPUTS, progress=False)
    np.testing.assert_array_equal(dkfm.open_scores(target, "scores"), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["metadata"].pop("scores"),
        lambda c: c["metadata"].update(other=c["metadata"]["scores"]),
        lambda c: c["metadata"].update(scores=7),
        lambda c: c["metadata"]["scores"].update(codecs=[{"name": "gzip"}]),
        lambda c: c.update(kind="elsewhere"),
    ],
)
def test_consolidated_metadata_that_dkfm_does_not_write_are_refused(target, change):
    edit(target / "zarr.json", lambda m: change(m["consolidated_metadata"]))
    with pytest.raises(UnsupportedStoreError):
        output_store.read_output(locate(target))
