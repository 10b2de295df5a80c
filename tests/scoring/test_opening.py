"""Opening a finished output takes one listing and reads no chunk; what is lost, cut short or foreign is told."""

import os
import pickle
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from dask.base import tokenize
from hypothesis import given, settings
from hypothesis import strategies as st

import dkfm
from dkfm.errors import DamagedStoreError, UnsupportedStoreError
from dkfm.files import fsspec_access, local
from dkfm.files.location import locate
from dkfm.scoring import marker, output_store
from dkfm.scoring.receipts import ChunkReceipt
from dkfm.storage import store_metadata

FORMS = ["out", "out.parquet"]
OUTPUTS = ["scores", "reconstruction_error"]
NUMBER = count()


def score(made, target, **options):
    dkfm.batch_score(made / "unnamed", made / "rows.npy", target, output=OUTPUTS, progress=False, **options)
    return target


@pytest.fixture(params=["folder", "memory"])
def place(request, tmp_path):
    """A folder, or a prefix of an object store."""
    return str(tmp_path) if request.param == "folder" else f"memory://opening/{next(NUMBER)}"


@pytest.fixture(scope="module")
def finished(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    return {name: score(made, folder / name, chunk_rows=20) for name in FORMS}


def count_calls(patch, owner, name, calls):
    honest = getattr(owner, name)

    def counted(*arguments, **options):
        calls.append(name)
        return honest(*arguments, **options)

    patch.setattr(owner, name, counted)


def calls_of_opening(path):
    """Return which files are opened, folders listed and requests made to open an output."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [(os, "scandir"), (local, "open_plain"), (fsspec_access, "open_filesystem")]:
            count_calls(patch, owner, name, calls)
        dkfm.open_scores(path)
    return calls


@pytest.mark.costly
@pytest.mark.parametrize("form", FORMS)
def test_opening_opens_and_lists_the_same_for_any_number_of_chunks(made, place, form):
    few, many = (score(made, f"{place}/{rows}{form}", chunk_rows=rows) for rows in (50, 2))
    calls = calls_of_opening(few)
    assert calls
    assert calls_of_opening(many) == calls


@pytest.mark.costly
@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_is_lost_or_has_another_size_is_told_at_once_whichever_it_is(made, place, form):
    target = score(made, f"{place}/{form}", chunk_rows=20)
    output = output_store.read_output(locate(target))
    for number in range(output.n_chunks):
        for name in output.format.file_names(number):
            with output.output_location.open_for_reading(name) as opened:
                good = opened.read()
            for damaged in (None, good[:-1], good + b"\0", b""):
                if damaged is None:
                    output.output_location.remove_files([name])
                else:
                    output.output_location.write_file(name, damaged)
                with pytest.raises(DamagedStoreError, match=f"Chunk {number} "):
                    dkfm.open_scores(target)
            output.output_location.write_file(name, good)
    dkfm.open_scores(target)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["thesis.txt", "scores/thesis.txt", "scores/c/thesis.txt", "scores/c/17/0"])
def test_a_foreign_file_is_told_at_once(made, place, form, name):
    target = score(made, f"{place}/{form}")
    output = output_store.read_output(locate(target))
    output.output_location.write_file(name, b"mine")
    with pytest.raises(DamagedStoreError, match=f"has gained {name}"):
        dkfm.open_scores(target)


def test_a_foreign_file_beside_a_chunk_is_told_by_verify(finished):
    path = finished["out"] / "scores" / "c" / "2" / "thesis.txt"
    path.write_text("mine")
    with pytest.raises(DamagedStoreError, match=r"has gained scores/c/2/thesis\.txt"):
        dkfm.verify_scores(finished["out"])
    path.unlink()


@pytest.mark.parametrize("form", FORMS)
def test_a_link_in_place_of_any_file_or_folder_is_told_at_once(finished, tmp_path, form):
    target = finished[form]
    for path in sorted(target.rglob("*")):
        path.rename(tmp_path / "outside")
        path.symlink_to(tmp_path / "outside")
        for refusing in (dkfm.open_scores, dkfm.verify_scores):
            with pytest.raises(UnsupportedStoreError):
                refusing(target)
        path.unlink()
        (tmp_path / "outside").rename(path)
    dkfm.open_scores(target)


@pytest.mark.parametrize("form", FORMS)
def test_sizes_are_those_of_all_files_that_a_listing_has(finished, form):
    listed = {name: (finished[form] / name).stat().st_size for name in store_metadata.list_files(finished[form])}
    assert store_metadata.list_file_sizes(finished[form]) == listed


def table_of_marker(finished, output, receipts):
    """Read receipts from a marker in place of that of a finished output, which is put back."""
    path = finished["out"] / store_metadata.MARKER
    kept = path.read_bytes()
    try:
        path.write_bytes(marker.encode_marker(output, receipts, "stamp"))
        return marker.read_receipt_table(output)
    finally:
        path.write_bytes(kept)


@pytest.mark.slow
@given(data=st.data(), chunks=st.integers(1, 6), last=st.integers(1, 20))
def test_receipts_come_back_from_a_marker_as_they_were(finished, data, chunks, last):
    output = replace(output_store.read_output(finished["out"]), rows=20 * (chunks - 1) + last, chunk_rows=20)
    receipts = {}
    for number in range(chunks):
        rows = output.chunk(number).rows
        checksums = data.draw(st.tuples(*[st.integers(0, 2**32 - 1)] * len(OUTPUTS)))
        size = data.draw(st.integers(0, 2**63 - 1))
        receipts[number] = ChunkReceipt(number, rows, data.draw(st.integers(0, rows)), checksums, size)
    assert dict(enumerate(table_of_marker(finished, output, receipts))) == receipts


IMPOSSIBLE = [True, False, 1.0, 1.5, -1, 2**63, 10**400, "1", None, [], {}]


@pytest.mark.slow
@settings(max_examples=200)
@given(
    number=st.integers(0, 4),
    change=st.tuples(st.sampled_from(["bytes", "invalid_rows"]), st.sampled_from(IMPOSSIBLE))
    | st.tuples(st.just("file_checksums"), st.sampled_from([*IMPOSSIBLE, (), (1,), (1, 2, 3)]))
    | st.tuples(st.just("file_checksums"), st.sampled_from([*IMPOSSIBLE, 2**32]).map(lambda value: (1, value)))
    | st.just(("invalid_rows", 21)),
)
def test_a_marker_with_an_impossible_value_is_refused_wherever_it_stands(finished, number, change):
    output = output_store.read_output(finished["out"])
    receipts = dict(enumerate(marker.read_receipt_table(output)))
    receipts[number] = replace(receipts[number], **dict([change]))
    with pytest.raises(DamagedStoreError, match="no receipts that dkfm writes"):
        table_of_marker(finished, output, receipts)


@given(column=st.integers(0, 3), number=st.integers(0, 4))
def test_tables_of_receipts_have_one_name_if_and_only_if_they_are_equal(finished, column, number):
    tables = [marker.read_receipt_table(output_store.read_output(finished["out"])) for _ in range(3)]
    changed = (tables[2].rows, tables[2].crc32c, tables[2].invalid_rows, tables[2].bytes)[column]
    changed[number] += 1
    names = [tokenize(table) for table in tables]
    assert names[0] == names[1] != names[2]


@pytest.mark.costly
@pytest.mark.parametrize("form", FORMS)
def test_a_task_that_reads_a_chunk_is_as_small_for_many_chunks(made, tmp_path, form):
    def largest_task(rows):
        scores = dkfm.open_scores(score(made, tmp_path / f"{rows}{form}", chunk_rows=rows))
        graph = dict(scores.__dask_graph__())
        keys = [key for key in graph if isinstance(key, tuple) and str(key[0]).startswith("dkfm-read")]
        return max(len(pickle.dumps(graph[key])) for key in keys)

    assert largest_task(1) <= largest_task(20) + 100


@pytest.mark.costly
def test_what_opening_does_not_read_is_found_where_it_is_read(made, place):
    """Chunks of the same size: only their bytes tell."""
    for form in FORMS:
        target = score(made, f"{place}/{form}", chunk_rows=20)
        output = output_store.read_output(locate(target))
        name = output.format.file_names(2)[0]
        with output.output_location.open_for_reading(name) as opened:
            good = opened.read()
        for at in np.linspace(0, len(good) - 1, 7, dtype=int):
            output.output_location.write_file(name, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            scores = dkfm.open_scores(target)
            with pytest.raises(DamagedStoreError, match="Chunk 2"):
                scores.compute(scheduler="synchronous")
            with pytest.raises(DamagedStoreError, match="Chunk 2"):
                list(dkfm.iter_scores(target))
            with pytest.raises(DamagedStoreError, match="Chunk 2"):
                dkfm.verify_scores(target)
        output.output_location.write_file(name, good)


@pytest.mark.parametrize(
    "index", [np.s_[::2], np.s_[1:35:7], np.s_[::-1], np.s_[25:3:-4], np.s_[5:5], np.s_[2:25:4, ::-1], 3, -1, (3, 1)]
)
def test_a_slice_with_a_step_and_a_number_take_the_rows_that_numpy_takes(finished, index):
    scores = dkfm.open_scores(finished["out"])
    np.testing.assert_array_equal(scores[index].compute(), scores.compute()[index])
