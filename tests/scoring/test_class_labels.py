"""Predictions in Parquet: the labels of the classes, and columns that are named after them."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dkfm
from dkfm import kernels
from dkfm.cli.inspection import describe_store
from dkfm.errors import CertificateError, DamagedStoreError, InvalidInputError, StoreExistsError
from dkfm.scoring import job_setup, output_store
from dkfm.scoring.formats.label_column import labels_to_codes, make_label_array
from dkfm.scoring.formats.parquet_chunks import ParquetChunks
from dkfm.storage import store_metadata
from dkfm.storage.model_store import Record

LABELS = {
    "text": np.array(["red", "rosé", "white"]),
    "integers": np.array([-3, 0, 7]),
    "bytes": np.array([1, 2, 250], np.uint8),
    "large": np.array([7, 2**63 + 5], np.uint64),
    "floats": np.array([0.0, 1.0, 3.0]),
    "booleans": np.array([False, True]),
}
OUTPUTS = ["predict", "predict_proba", "decision_function"]


def fit_and_score(folder, rng, labels, destination="scores.parquet", output=OUTPUTS, **options):
    """Save a classifier of some labels and score rows of which two are not finite; return the classifier and rows."""
    rows = rng.normal(size=(200, 3))
    y = labels[np.arange(60) % len(labels)]
    classifier = dkfm.KernelFisher(kernel=kernels.Gaussian(2.0)).fit(rows[:60], y)
    classifier.save(folder / "model", overwrite=True)
    rows[[5, 150], 1] = np.nan
    options = {"on_invalid": "nan", "chunk_rows": 60, "progress": False, "output": output, **options}
    dkfm.batch_score(folder / "model", rows, folder / destination, **options)
    return classifier, rows, options


@pytest.mark.costly
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_a_table_has_the_labels_that_predict_returns(tmp_path, rng, labels):
    classifier, rows, options = fit_and_score(tmp_path, rng, labels)
    valid = np.isfinite(rows).all(axis=1)
    table = pq.read_table(tmp_path / "scores.parquet")
    expected = pa.array(classifier.predict(np.nan_to_num(rows)).tolist(), table["predict"].type, mask=~valid)
    assert table["predict"].combine_chunks().equals(expected)
    names = [f"predict_proba_{label}" for label in labels.tolist()]
    assert table.column_names[1 : len(labels) + 1] == names
    probabilities = np.column_stack([table[name].to_numpy() for name in names])
    np.testing.assert_allclose(probabilities[valid], classifier.predict_proba(rows[valid]), rtol=1e-9, atol=1e-12)
    assert dkfm.batch_score(tmp_path / "model", rows, tmp_path / "scores.parquet", **options).scored_chunks == 0
    assert dkfm.verify_scores(tmp_path / "scores.parquet", rows).sampled == len(rows)


@pytest.mark.costly
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_frames_have_one_dtype_and_blocks_the_codes_of_a_store(tmp_path, rng, labels):
    classifier, rows, options = fit_and_score(tmp_path, rng, labels)
    frame = dkfm.open_scores(tmp_path / "scores.parquet")
    parts = [part.compute()["predict"] for part in frame.partitions]
    assert {str(part.dtype) for part in parts} == {str(frame.dtypes["predict"])}  # one chunk has no null
    assert pd.concat(parts).dropna().tolist() == classifier.predict(rows[np.isfinite(rows).all(axis=1)]).tolist()
    dkfm.batch_score(tmp_path / "model", rows, tmp_path / "scores.zarr", **options)
    for name in OUTPUTS:
        table, store = (
            np.concatenate([block for block, _ in dkfm.iter_scores(tmp_path / f"scores.{form}", name)])
            for form in ("parquet", "zarr")
        )
        np.testing.assert_array_equal(table, store)


def test_decisions_between_two_classes_are_one_column(tmp_path, rng):
    fit_and_score(tmp_path, rng, np.array(["no", "yes"]))
    names = pq.read_table(tmp_path / "scores.parquet").column_names
    assert names == ["predict", "predict_proba_no", "predict_proba_yes", "decision_function"]
    facts = describe_store(str(tmp_path / "scores.parquet"))
    assert (facts["classes"], "targets" in facts) == (["no", "yes"], False)


LONG_LABELS = """
import sys
import numpy as np, pyarrow as pa
from dkfm.scoring.formats.chunk_files import Chunk, OutputColumns, Piece, read_chunk_files, write_chunk_files
from dkfm.scoring.formats.parquet_chunks import ParquetChunks
from dkfm.storage.output_files import LocalOutput
from pathlib import Path

columns, labels, chunk = (OutputColumns("predict", 1, "predict", "int64"),), ("a" * 1000, "b" * 1000), Chunk(0, 60_000)
chunks = ParquetChunks(LocalOutput(Path(sys.argv[1])), columns, None, labels)
codes = np.random.default_rng(0).integers(0, 2, (30, 2000, 1))
write_chunk_files(chunks, chunk, (Piece({"predict": part}) for part in codes), 30, lambda: None)
(found,) = read_chunk_files(chunks, chunk)
print(found.bytes, pa.default_memory_pool().max_memory())
"""


@pytest.mark.slow
def test_long_labels_take_few_bytes_on_disk_and_are_checked_some_at_a_time(tmp_path):
    told = subprocess.run([sys.executable, "-c", LONG_LABELS, tmp_path], capture_output=True, text=True, check=True)
    size, peak = map(int, told.stdout.split())
    assert size < 60_000
    assert 2**20 < peak < 40e6  # all of them take 60 MB


def test_labels_have_codes_and_others_have_none():
    labels = make_label_array(["red", "white"])
    np.testing.assert_array_equal(labels_to_codes(pa.array(["white", None, "red"]), labels), [1, -1, 0])
    with pytest.raises(ValueError, match="no class of the model"):
        labels_to_codes(pa.array(["white", None, "green"]), labels)


def rewrite_labels(path, labels):
    """Replace the labels of a chunk, and keep its schema."""
    table = pq.read_table(path)
    pq.write_table(table.set_column(0, table.schema.field(0), [labels]), path, write_page_checksum=True)


@pytest.mark.costly
@pytest.mark.parametrize("label", ["green", "Red", ""])
def test_a_label_that_is_no_class_is_damage(tmp_path, rng, label):
    _, rows, options = fit_and_score(tmp_path, rng, LABELS["text"])
    path = tmp_path / "scores.parquet" / "part-00001.parquet"
    rewrite_labels(path, pa.array([label] * 60))
    with pytest.raises(DamagedStoreError, match="1"):
        dkfm.verify_scores(tmp_path / "scores.parquet")
    assert dkfm.batch_score(tmp_path / "model", rows, tmp_path / "scores.parquet", **options).scored_chunks == 1


def change_description(folder, change):
    """Change what an unfinished output says of itself."""
    (folder / "scores.parquet" / store_metadata.MARKER).unlink()
    path = folder / "scores.parquet" / store_metadata.TABLE_ATTRIBUTES
    metadata = json.loads(path.read_bytes())
    change(metadata["attributes"]["dkfm"])
    path.write_text(json.dumps(metadata))


@pytest.mark.costly
@pytest.mark.parametrize("classes", [["red", "rosé", "zinfandel"], ["aaa", "red", "rosé", "white"], ["red", "white"]])
def test_classes_of_another_model_are_not_gone_on_with(tmp_path, rng, classes):
    _, rows, options = fit_and_score(tmp_path, rng, LABELS["text"], output="predict")
    change_description(tmp_path, lambda own: own.update(classes=classes))
    with pytest.raises(StoreExistsError, match="its classes are not those of the model; choose another path"):
        dkfm.batch_score(tmp_path / "model", rows, tmp_path / "scores.parquet", **options)


def test_verify_sees_classes_and_names_of_columns_that_the_model_has_not(tmp_path, rng, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            output_store, "name_columns", lambda record, output, _: record.classes[::-1] * (output != "predict")
        )
        _, rows, _ = fit_and_score(tmp_path, rng, LABELS["text"])
    with pytest.raises(CertificateError, match=r"The columns of predict_proba in .* have other names in its model"):
        dkfm.verify_scores(tmp_path / "scores.parquet", rows)
    with monkeypatch.context() as patch:
        patch.setattr(Record, "classes", ("red", "rosé", "zinfandel"))
        fit_and_score(tmp_path, rng, LABELS["text"], output="predict", overwrite=True)
    with pytest.raises(CertificateError, match=r"The classes of .* are not those of its model"):
        dkfm.verify_scores(tmp_path / "scores.parquet", rows)


def test_another_label_is_seen_against_the_rows(tmp_path, rng, monkeypatch):
    """A job whose model and labels disagree: its checksums are right, and its labels are not."""
    right = ParquetChunks.labels.func
    with monkeypatch.context() as patch:
        patch.setattr(ParquetChunks, "labels", property(lambda self: right(self).take([1, 2, 0])))
        _, rows, _ = fit_and_score(tmp_path, rng, LABELS["text"])
    with pytest.raises(CertificateError, match="predict of row 0"):
        dkfm.verify_scores(tmp_path / "scores.parquet", rows)


def write_as_before(folder, rng, monkeypatch, output="predict"):
    """Write an output with codes, as earlier versions did: its settings do not say what predictions are."""

    def build(*args):
        output = build_output(*args)
        settings = {key: output.settings[key] for key in output.settings if key != "predictions"}
        return replace(output, settings=settings, columns=tuple(replace(entry, labels=()) for entry in output.columns))

    build_output = job_setup._build_output
    with monkeypatch.context() as patch:
        patch.setattr(job_setup, "_build_output", build)
        return fit_and_score(folder, rng, LABELS["text"], output=output)


def test_outputs_of_earlier_versions_have_codes(tmp_path, rng, monkeypatch):
    classifier, rows, _ = write_as_before(tmp_path, rng, monkeypatch)
    codes = dkfm.open_scores(tmp_path / "scores.parquet").compute()["predict"]
    valid = np.isfinite(rows).all(axis=1)
    assert (codes.dtype, codes[~valid].tolist()) == (np.int64, [-1, -1])
    assert classifier.classes_[codes[valid]].tolist() == classifier.predict(rows[valid]).tolist()
    assert dkfm.verify_scores(tmp_path / "scores.parquet", rows).sampled == 200


@pytest.mark.parametrize("output", ["predict", "predict_proba"])
def test_outputs_of_earlier_versions_are_not_gone_on_with(tmp_path, rng, monkeypatch, output):
    _, rows, options = write_as_before(tmp_path, rng, monkeypatch, output)
    for _ in range(2):  # finished, and then not
        with pytest.raises(StoreExistsError, match="as in earlier versions; choose another path, or replace it"):
            dkfm.batch_score(tmp_path / "model", rows, tmp_path / "scores.parquet", **options)
        (tmp_path / "scores.parquet" / store_metadata.MARKER).unlink(missing_ok=True)


@pytest.mark.costly
@pytest.mark.parametrize("label", ["a\0b", "b\ud800", 1001 * "c"])
def test_text_that_parquet_cannot_hold_is_refused_before_anything_is_written(tmp_path, rng, label):
    labels = np.array(["a", label])
    with pytest.raises(InvalidInputError, match="Parquet cannot hold the class"):
        fit_and_score(tmp_path, rng, labels)
    assert not (tmp_path / "scores.parquet").exists()
    fit_and_score(tmp_path, rng, labels, "scores.zarr")
    fit_and_score(tmp_path, rng, labels, output="scores")  # without labels


@pytest.mark.costly
@pytest.mark.parametrize(
    "classes", [[], ["white", "red", "rosé"], ["red", "red", "white"], [1, "red", "white"], ["\0"]]
)
def test_labels_of_a_stranger_are_checked(tmp_path, rng, classes):
    fit_and_score(tmp_path, rng, LABELS["text"], output="predict")
    path = tmp_path / "scores.parquet" / store_metadata.TABLE_ATTRIBUTES
    metadata = json.loads(path.read_bytes())
    metadata["attributes"]["dkfm"]["classes"] = classes
    path.write_text(json.dumps(metadata))
    with pytest.raises(DamagedStoreError, match="not what dkfm writes"):
        dkfm.open_scores(tmp_path / "scores.parquet")
