"""Verification against the input compares the ids of the rows, and tells of files that changed."""

import os
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dkfm
from dkfm.errors import CertificateError, DkfmWarning, InvalidInputError
from dkfm.kernels import Gaussian

IDS = {
    "text": [f"c{i}" for i in range(300)],
    "integers": np.arange(300, dtype=np.int32) * 7,
    "numbers with NaN and null": [None, float("nan"), *np.arange(298.0)],
    "times": np.arange(300).astype("datetime64[ns]"),
}


def write(path, rows, ids):
    pq.write_table(pa.table({"id": ids, **dict(zip("abc", rows.T, strict=True))}), path)


@pytest.fixture
def rows(rng):
    return rng.normal(size=(300, 3))


@pytest.fixture
def score(tmp_path, rows):
    """Function that writes a table with ids, scores it, and returns the paths of both."""

    def score(ids, suffix):
        table, output = tmp_path / "rows.parquet", tmp_path / f"scores.{suffix}"
        write(table, rows, ids)
        columns = ["a", "b", "c"]
        model = dkfm.KernelPCA(2, kernel=Gaussian(2.0)).fit(pq.read_table(table, columns=columns).to_pandas()[:50])
        model.save(tmp_path / "model")
        dkfm.batch_score(tmp_path / "model", table, output, id_column="id", chunk_rows=70, progress=False)
        return table, output

    return score


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [*((kind, "parquet") for kind in IDS), *((kind, "zarr") for kind in IDS if kind in ("text", "integers"))],
)
def test_ids_that_are_those_of_other_rows_are_found(kind, suffix, rows, score, tmp_path):
    table, output = score(IDS[kind], suffix)
    found = dkfm.verify_scores(output, table)
    assert (found.sampled, found.ids_compared) == (300, True)
    swapped = [*IDS[kind]]
    swapped[140], swapped[141] = swapped[141], swapped[140]
    write(tmp_path / "others.parquet", rows, swapped)
    with pytest.raises(CertificateError, match=r"^Row 140 has the id .* in .*scores.* and .* in .*others"):
        dkfm.verify_scores(output, tmp_path / "others.parquet")
    assert not dkfm.verify_scores(output, rows).ids_compared
    if kind == "integers":
        write(tmp_path / "others.parquet", rows, IDS["text"])
        with pytest.raises(CertificateError, match=r"others\.parquet are of the type string, and those of .* int"):
            dkfm.verify_scores(output, tmp_path / "others.parquet")
    pq.write_table(pq.read_table(table).drop_columns("id"), tmp_path / "without.parquet")
    with pytest.raises(InvalidInputError, match="has no column 'id' for ids"):
        dkfm.verify_scores(output, tmp_path / "without.parquet")


def test_the_input_that_changed_is_told_of_and_a_copy_is_not(rows, score, tmp_path):
    table, output = score(IDS["text"], "parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dkfm.verify_scores(output, table)
        (tmp_path / "copy.parquet").write_bytes(table.read_bytes())
        dkfm.verify_scores(output, tmp_path / "copy.parquet")
    os.utime(table, (1, 1))
    with pytest.warns(DkfmWarning, match=r"rows\.parquet has changed since .* only the rows of the sample"):
        dkfm.verify_scores(output, table, sample=10)
