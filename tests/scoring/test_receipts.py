"""Receipts are held against what they tell of: invented, misplaced and impossible ones are worth nothing."""

import json
import shutil
from dataclasses import replace

import google_crc32c
import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.core.chunking import MAX_CHUNKS
from dkfm.errors import DamagedStoreError, StoreError
from dkfm.scoring import completion, marker, output_store
from dkfm.scoring.receipts import MAX_NUMBER, ChunkReceipt
from dkfm.storage import store_metadata

ROWS = np.random.default_rng(1).normal(size=(60, 4))
ROWS[7] = np.nan
FIELDS = ["chunk", "rows", "invalid_rows", "crc32c", "bytes", "seconds", "worker", "found"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(np.nan_to_num(ROWS[:30])).save(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def one_segment():
    """A run leaves one segment, at its end, of chunks in their order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dkfm.core.cpus.COUNT", 1)
        patch.setattr("dkfm.scoring.receipts._MIN_SEGMENT_INTERVAL", 600.0)
        yield


@pytest.fixture(scope="module")
def finished(model, one_segment, tmp_path_factory):
    """A folder of finished outputs; a test damages a copy."""
    folder = tmp_path_factory.mktemp("finished")
    for name in ("out", "out.parquet"):
        score(model, folder / name)
    return folder


@pytest.fixture
def out(finished, tmp_path):
    return shutil.copytree(finished / "out", tmp_path / "out")


def score(model, target, rows=ROWS):
    return dkfm.batch_score(model, rows, target, chunk_rows=10, on_invalid="nan", progress=False)


def values(target):
    return dkfm.open_scores(target).compute(scheduler="synchronous")


def edit(target, change):
    """Change the receipts of an output that is unfinished then, and the checksum of their segment."""
    (target / "_COMPLETE").unlink(missing_ok=True)
    (segment,) = (target / "_journal").iterdir()
    content = json.loads(segment.read_text())
    receipts = json.loads(content["receipts"])
    change(receipts)
    content["receipts"] = json.dumps(receipts)
    text = "\0".join(content[key] for key in ("output", "input", "receipts") if key in content)
    segment.write_text(json.dumps(content | {"crc32c": google_crc32c.value(text.encode())}))


def mark(target, **fields):
    """Change receipts of the first chunk in a marker, whose digest is then right."""
    output = output_store.read_output(target)
    receipts = dict(enumerate(marker.read_receipt_table(output)))
    for name, value in fields.items():
        object.__setattr__(receipts[0], name, value)
    completion.complete_output(output, receipts)


@pytest.mark.costly
@pytest.mark.parametrize("target", ["out", "out.parquet"])
@pytest.mark.parametrize("invalid", [0, 3, 10, 3600, 10**300], ids=["0", "3", "10", "3600", "huge"])
def test_invalid_rows_are_counted_anew_where_a_chunk_is_read_back(model, finished, tmp_path, target, invalid):
    target = shutil.copytree(finished / target, tmp_path / target)
    edit(target, lambda receipts: receipts[0].__setitem__(2, invalid))
    report = score(model, target)
    assert report.invalid_rows == 1
    assert report.scored_chunks == (1 if invalid <= 10 else 6)  # a segment with an impossible receipt is damaged


@pytest.mark.costly
@pytest.mark.parametrize("target", ["out", "out.parquet"])
@pytest.mark.parametrize("invalid", [0, 3, 3600, 10**300], ids=["0", "3", "3600", "huge"])
def test_invented_invalid_rows_in_a_marker_are_found(model, finished, tmp_path, target, invalid):
    target = shutil.copytree(finished / target, tmp_path / target)
    mark(target, invalid_rows=invalid)
    with pytest.raises(DamagedStoreError):
        dkfm.verify_scores(target)
    report = score(model, target)
    assert report.invalid_rows == 1
    assert dkfm.verify_scores(target).rows == 60


def test_a_chunk_with_its_receipt_from_another_run_is_not_taken(model, out, tmp_path):
    score(model, tmp_path / "other", ROWS + 1)
    good = values(out)
    edit(out, lambda receipts: receipts.pop(2))
    edit(tmp_path / "other", lambda receipts: None)
    shutil.copy(tmp_path / "other" / "scores" / "c" / "2" / "0", out / "scores" / "c" / "2" / "0")
    (segment,) = (tmp_path / "other" / "_journal").iterdir()
    shutil.copy(segment, out / "_journal")
    assert score(model, out).scored_chunks == 1
    np.testing.assert_array_equal(values(out), good)


@pytest.mark.costly
@pytest.mark.alike
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunk", 10**400),
        ("chunk", 6),
        ("chunk", -1),
        ("chunk", True),
        ("rows", 11),
        ("rows", 10**400),
        ("invalid_rows", 1e300),
        ("invalid_rows", None),
        ("crc32c", []),
        ("crc32c", {}),
        ("crc32c", [1, 2]),
        ("crc32c", [2**32]),
        ("crc32c", [[]]),
        ("crc32c", 7),
        ("bytes", 10**400),
        ("bytes", "many"),
        ("seconds", {}),
        ("seconds", float("inf")),
        ("seconds", float("nan")),
        ("seconds", -1.0),
        ("worker", []),
        ("worker", None),
        ("found", "no"),
    ],
)
def test_a_receipt_with_an_impossible_field_is_as_one_that_is_not_there(model, out, field, value):
    good = values(out)
    edit(out, lambda receipts: receipts[3].__setitem__(FIELDS.index(field), value))
    assert score(model, out).scored_chunks >= 1
    np.testing.assert_array_equal(values(out), good)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bytes", 10**400),
        ("bytes", 1.5),
        ("file_checksums", ()),
        ("file_checksums", (2**40,)),
        ("invalid_rows", -1),
        ("file_checksums", 7),
    ],
)
def test_a_marker_with_an_impossible_field_is_refused_in_a_sentence(model, out, field, value):
    mark(out, **{field: value})
    for refusing in (dkfm.open_scores, dkfm.verify_scores):
        with pytest.raises(StoreError, match="marker"):
            refusing(out)
    assert score(model, out).chunks == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda own: own.update(outputs=own["outputs"] * 2),
        lambda own: own["settings"].update(columns="["),
        lambda own: own["settings"].update(columns="[[]]"),
        lambda own: own["settings"].update(on_invalid="perhaps"),
        lambda own: own.update(classes=[10**400]),
        lambda own: own.update(classes=[float("nan")]),
        lambda own: own["model"].update(path="a\0b"),
        lambda own: own.update(run=7),
    ],
    ids=["twice", "no JSON", "no names", "on_invalid", "huge", "NaN", "path", "run"],
)
def test_attributes_that_dkfm_does_not_write_are_refused_in_a_sentence(model, out, change):
    metadata = out / "zarr.json"
    content = json.loads(metadata.read_text())
    change(content["attributes"]["dkfm"])
    metadata.write_text(json.dumps(content))
    for refusing in (dkfm.open_scores, lambda path: dkfm.verify_scores(path, ROWS), lambda path: score(model, path)):
        with pytest.raises(DamagedStoreError, match="are not what dkfm writes"):
            refusing(out)


def test_a_marker_of_an_earlier_version_opens_and_verifies_and_is_mended(model, out):
    """It does not say in which state the input was."""
    good, marker = values(out), out / "_COMPLETE"
    content = json.loads(marker.read_text())
    content.pop("input", None)
    marker.write_text(json.dumps(content))
    np.testing.assert_array_equal(values(out), good)
    assert dkfm.verify_scores(out).rows == 60
    assert score(model, out).scored_chunks == 0
    (out / "scores" / "c" / "4" / "0").unlink()
    assert score(model, out).scored_chunks == 1
    np.testing.assert_array_equal(values(out), good)


def test_a_segment_that_does_not_say_whose_it_is_counts_for_no_output(model, out):
    (out / "_COMPLETE").unlink()
    (segment,) = (out / "_journal").iterdir()
    rows = json.loads(segment.read_text())["receipts"]
    segment.write_text(json.dumps({"crc32c": google_crc32c.value(rows.encode()), "receipts": rows}))
    assert score(model, out).scored_chunks == 6


def test_the_marker_of_the_most_chunks_of_all_outputs_and_ids_is_read(out):
    output, largest = output_store.read_output(out), MAX_NUMBER - 1
    receipt = ChunkReceipt(0, largest, largest, (2**32 - 1,) * 5, largest)
    sizes = []
    for chunks in (1, 2):
        receipts = dict.fromkeys(range(chunks), receipt)
        sizes.append(len(marker.encode_marker(replace(output, rows=chunks * output.chunk_rows), receipts, "0" * 64)))
    assert sizes[0] + MAX_CHUNKS * (sizes[1] - sizes[0]) <= store_metadata.MAX_MARKER_BYTES
