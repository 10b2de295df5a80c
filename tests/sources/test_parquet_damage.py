"""."""

import base64
import os
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

import dkfm
from dkfm.errors import InvalidInputError
from dkfm.files.object_store import Remote
from dkfm.sources.opening import open_source
from dkfm.sources.parquet import ParquetSource
from dkfm.sources.parquet_files import row_groups
from helpers.parquet_files import refusal, write


def patch_footer(path, old, new, times=-1):
    """Replace a number of a footer by another one that takes as many bytes."""

    def thrift(number):
        number, found = 2 * number, b""
        while number > 127:
            number, found = number >> 7, found + bytes([number & 127 | 128])
        return found + bytes([number])

    content = path.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - length :]
    assert len(thrift(old)) == len(thrift(new))
    assert thrift(old) in footer
    path.write_bytes(content[: -8 - length] + footer.replace(thrift(old), thrift(new), times))


@pytest.mark.parametrize("part", [slice(0, 1001), slice(0, 10), slice(990, 1001)], ids=str)
def test_a_file_with_fewer_rows_than_its_footer_says_is_an_error(part, rows, tmp_path):
    path = write(tmp_path / "x.parquet", rows, 1000)
    patch_footer(path, 1000, 1001)
    source = ParquetSource.open(path)
    assert source.shape == (1001, 3)
    with pytest.raises(InvalidInputError, match=r"x\.parquet") as caught:
        source.read(part)
    assert "\n" not in str(caught.value)


def test_a_file_that_gives_other_rows_than_its_row_group_must_have_is_an_error(rows, tmp_path, monkeypatch):
    source = ParquetSource.open(write(tmp_path / "x.parquet", rows, 1000))
    given = pq.ParquetFile.iter_batches
    for lie in (lambda batches: batches[:-1], lambda batches: [*batches, batches[0]]):
        monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *a, lie=lie, **k: lie(list(given(*a, **k))))
        with pytest.raises(InvalidInputError, match="its row group 0 must have 1000 rows, and has others"):
            source.read(slice(0, 1000))


def test_row_groups_that_do_not_add_up_to_the_rows_are_refused(rows, tmp_path):
    path = write(tmp_path / "x.parquet", rows, 1000)
    patch_footer(path, 1000, 1001, 1)
    assert "is damaged: it says 1001 rows, its row groups 1000" in refusal(path)


def test_an_absurd_row_group_is_refused_before_it_is_decoded(rows, tmp_path, monkeypatch):
    def decoding(*_, **__):
        raise AssertionError

    path = write(tmp_path / "x.parquet", rows, 1000, use_dictionary=False, compression=None)
    size = pq.read_metadata(path).row_group(0).column(1).total_uncompressed_size
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", decoding)
    monkeypatch.setattr(row_groups, "_MAX_GROUP_BYTES", 3 * size)
    with pytest.raises(AssertionError):
        ParquetSource.open(path).read(slice(0, 1000))
    monkeypatch.setattr(row_groups, "_MAX_GROUP_BYTES", 3 * size - 1)
    for part in (slice(0, 1000), slice(0, 10)):
        with pytest.raises(InvalidInputError, match="write it in smaller row groups"):
            ParquetSource.open(path).read(part)
    monkeypatch.setattr(row_groups, "_sum_declared_bytes", lambda *_: 0)
    monkeypatch.setattr(row_groups, "_MAX_GROUP_BYTES", 3 * 8 * 1000 - 1)
    with pytest.raises(InvalidInputError, match="takes 24000 bytes"):
        ParquetSource.open(path).read(slice(0, 10))  # no array is made for the rows that a footer promises


def test_damaged_and_encrypted_files_are_refused_in_one_sentence(rows, tmp_path):
    content = write(tmp_path / "x.parquet", rows).read_bytes()
    for place, damage in enumerate(
        [b"", b"PAR1", content[:-20], content[:-4] + b"PARE", b"a" * 50, content.replace(b"a", b"\xff")]
    ):
        (tmp_path / f"{place}.parquet").write_bytes(damage)
        assert f"{place}.parquet" in refusal(tmp_path / f"{place}.parquet")


def test_a_flipped_bit_of_a_page_with_a_checksum_is_an_error(rows, tmp_path):
    path = write(tmp_path / "x.parquet", rows, 1000, use_dictionary=False, compression=None, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[content.index(rows[500, 1].tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"(?i)x\.parquet cannot be read.*crc"):
        ParquetSource.open(path).read(slice(0, 1000))


def test_tables_without_rows_or_columns_are_refused(rows, tmp_path):
    assert "at least one row" in refusal(write(tmp_path / "x.parquet", rows[:0]))
    only = write(tmp_path / "y.parquet", pa.table({"id": ["a"]}))
    assert "at least one column" in refusal(only, id_column="id")
    (tmp_path / "none").mkdir()
    assert "holds no .parquet file" in refusal(tmp_path / "none")
    assert "cannot be read" in refusal(tmp_path / "missing.parquet")
    write(tmp_path / "some" / "a.parquet", rows[:0])
    write(tmp_path / "some" / "b.parquet", rows)
    np.testing.assert_array_equal(open_source(tmp_path / "some").read(slice(5, 1000)), rows[5:])


def test_links_out_of_the_folder_and_links_to_folders_are_refused(rows, tmp_path):
    outside, folder = write(tmp_path / "outside" / "x.parquet", rows), tmp_path / "in"
    write(folder / "a.parquet", rows)
    (folder / "b.parquet").symlink_to("a.parquet")
    assert open_source(folder).shape == (2000, 3)
    for name, target in [
        ("c.parquet", outside),
        ("c.parquet", "../outside/x.parquet"),
        ("c.parquet", "nowhere.parquet"),
        ("c", outside.parent),
        ("c", "."),
    ]:
        (folder / name).symlink_to(target)
        message = refusal(folder)
        assert "it is a link" in message or (target == "nowhere.parquet" and "cannot be read" in message)
        (folder / name).unlink()
    (folder / "_c.parquet").symlink_to(outside)
    (folder / "notes.txt").symlink_to(outside)
    (tmp_path / "link").symlink_to(folder)  # the user's own name for the folder
    assert open_source(tmp_path / "link").shape == (2000, 3)


def test_what_is_no_plain_file_is_refused_and_never_opened(rows, tmp_path):
    write(tmp_path / "a.parquet", rows)
    os.mkfifo(tmp_path / "b.parquet")
    assert "not a plain file" in refusal(tmp_path)
    assert "not a plain file" in refusal(tmp_path / "b.parquet")


def test_columns_of_what_is_no_parquet_file_are_refused(rows, tmp_path):
    np.save(tmp_path / "x.npy", rows)
    zarr.create_array(tmp_path / "x.zarr", data=rows)
    write(tmp_path / "x.zarr" / "stray.parquet", rows)  # a Zarr store all the same
    for data in (rows, tmp_path / "x.npy", tmp_path / "x.zarr", zarr.open_array(tmp_path / "x.zarr", mode="r")):
        assert open_source(data).shape == (1000, 3)
        for options in ({"columns": ["a"]}, {"id_column": "a"}):
            with pytest.raises(InvalidInputError, match="columns and id_column name columns of Parquet files"):
                open_source(data, **options)


@pytest.mark.slow
def test_without_pyarrow_the_error_names_the_extra(rows, tmp_path):
    path = write(tmp_path / "x.parquet", rows)
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from dkfm.sources import opening as sources\n"
        "from dkfm.errors import MissingExtraError\n"
        "print(sources.open_source([[1.0]]).with_float32_preserved().shape)\n"
        f"try: sources.open_source({str(path)!r})\n"
        "except MissingExtraError as error: print(error)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert said == ["(1, 1)", "Parquet files need pyarrow; install it with pip install 'dkfm[dataframe]'."]


@pytest.mark.slow
def test_importing_the_sources_does_not_load_pyarrow():
    code = "import sys, dkfm.sources.opening, dkfm.scoring.run; print('pyarrow' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_folder_of_files_scores_as_its_rows_do(dtype, rows, tmp_path):
    pca = dkfm.KernelPCA(2, kernel=dkfm.kernels.Gaussian(2.0), dtype=dtype).fit(rows[:100])
    parts = np.split(rows.astype(dtype), [130, 470, 471, 800])
    for number, part in enumerate(parts):
        write(tmp_path / "z" / f"{number}.parquet", part, 77)
    options = {"columns": ["a", "b", "c"], "chunk_rows": 90, "progress": False}
    report = dkfm.batch_score(pca, tmp_path / "z", tmp_path / "out", **options)
    assert report.rows == 1000
    found = dkfm.open_scores(tmp_path / "out").compute(scheduler="synchronous")
    np.testing.assert_allclose(found, pca.transform(rows), atol=1e-12 if dtype == "float64" else 1e-5)


def test_a_column_beside_an_encrypted_one_is_read(tmp_path):
    from pyarrow.parquet import encryption

    class Keys(encryption.KmsClient):
        """Keys that are not wrapped."""

        def wrap_key(self, key_bytes, master_key_identifier):
            return base64.b64encode(key_bytes)

    table = pa.table({"a": np.arange(10.0), "b": np.arange(10.0)})
    properties = encryption.CryptoFactory(lambda _: Keys()).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(footer_key="key", column_keys={"key": ["b"]}, plaintext_footer=True),
    )
    with pq.ParquetWriter(tmp_path / "x.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    np.testing.assert_array_equal(
        ParquetSource.open(tmp_path / "x.parquet", ["a"]).read(slice(0, 10))[:, 0], np.arange(10.0)
    )


@pytest.mark.parametrize("size", [None, 500])
def test_an_object_that_is_gone_or_shorter_changed(size, tmp_path):
    content = write(tmp_path / "x.parquet", np.zeros((1_000, 3))).read_bytes()
    place = Remote(f"memory://changed/{size}.parquet")
    place.replace("", content)
    source = ParquetSource.open(place)
    source.read(slice(0, 10))
    place.replace("", content[:size]) if size else place.remove_objects("")
    for rows in (slice(0, 1_000), slice(3, 60)):
        with pytest.raises(InvalidInputError, match="changed since it was opened"):
            source.read(rows)


def test_a_process_that_is_forked_during_a_read_reads(tmp_path):
    write(tmp_path / "x.parquet", np.ones((50, 3)), 10)
    code = """
        import os, signal
        from dkfm.sources import opening
        from dkfm.sources.parquet_files import row_groups
        source = opening.open_source("x.parquet")
        with row_groups._small_groups_lock:
            child = os.fork()
        if child == 0:
            signal.alarm(60)
        assert source.read(slice(0, 50)).sum() == 150
        assert child == 0 or os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, check=True, timeout=100)
