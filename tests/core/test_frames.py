"""Columns of data frames in memory are matched by name or refused: never taken by place where both sides have names."""

import datetime
import warnings

import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.errors import DkfmWarning, InvalidInputError

pd = pytest.importorskip("pandas", reason="the extra dataframe brings it")
pa = pytest.importorskip("pyarrow", reason="the extra dataframe brings it")

NAMES, SHUFFLED = ["a", "b", "c"], ["c", "a", "b"]
ROWS = np.random.default_rng(0).normal(size=(60, 3)) * [1, 2, 3]
K = kernels.Gaussian(3.0)


def batch(frame):
    return pa.RecordBatch.from_pandas(frame, preserve_index=False)


def polars(frame):
    return pytest.importorskip("polars").DataFrame({name: frame[name].to_numpy() for name in frame})


KINDS = {"pandas": lambda f: f, "table": lambda f: pa.Table.from_pandas(f, preserve_index=False), "batch": batch}
KINDS["polars"] = polars
FRAME = pd.DataFrame(ROWS, columns=NAMES)
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def pca():
    return dkfm.KernelPCA(2, kernel=K).fit(FRAME)


@pytest.fixture(scope="module")
def phi():
    return dkfm.ExactFeatureMap(K, basis="spectral").fit(FRAME)


def scored(model, source, path, **options):
    dkfm.batch_score(model, source, path, progress=False, **options)
    return np.asarray(dkfm.open_scores(path))


@pytest.mark.costly
@every_kind
def test_a_job_takes_columns_of_a_frame_by_name_and_leaves_others_out(pca, kind, tmp_path):
    frame = KINDS[kind](FRAME[SHUFFLED].assign(z=1.0))
    expected = scored(pca, FRAME, tmp_path / "expected.zarr")
    np.testing.assert_array_equal(scored(pca, frame, tmp_path / "found.zarr"), expected)
    np.testing.assert_allclose(expected, pca.transform(FRAME), rtol=0, atol=1e-14)  # 64 eps, values below 1
    assert dkfm.plan_score(pca, frame, tmp_path / "other.zarr").columns == 3
    with pytest.raises(InvalidInputError, match=r"^source has no column 'b'; it has columns 'a', 'c'\.$"):
        dkfm.plan_score(pca, KINDS[kind](FRAME[["a", "c"]]), tmp_path / "none.zarr")


@pytest.mark.costly
@every_kind
def test_columns_may_be_named_for_a_model_without_names(kind, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = dkfm.KernelPCA(2, kernel=K).fit(ROWS)
        found = scored(model, KINDS[kind](FRAME[SHUFFLED]), tmp_path / "found.zarr", columns=NAMES)
    np.testing.assert_array_equal(found, scored(model, ROWS, tmp_path / "expected.zarr"))
    with pytest.warns(DkfmWarning, match="in the order of the table: c, a, b"):
        dkfm.plan_score(model, KINDS[kind](FRAME[SHUFFLED]), tmp_path / "warned.zarr")


@pytest.mark.costly
@every_kind
def test_ids_of_a_frame_are_kept_and_are_no_feature(pca, kind, tmp_path):
    import pyarrow.parquet as pq

    frame = KINDS[kind](FRAME[SHUFFLED].assign(key=[f"row {i}" for i in range(60)]))
    dkfm.batch_score(pca, frame, tmp_path / "out.parquet", id_column="key", chunk_rows=25, progress=False)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column("key").to_pylist() == [f"row {i}" for i in range(60)]
    other = KINDS[kind](FRAME[SHUFFLED].assign(key=[f"row {i + 1}" for i in range(60)]))
    with pytest.raises(dkfm.errors.StoreExistsError, match="has changed since"):
        dkfm.plan_score(pca, other, tmp_path / "out.parquet", id_column="key")


def test_ids_of_a_frame_reach_the_workers_of_a_cluster(pca, threaded_client, tmp_path):
    import pyarrow.parquet as pq

    frame = FRAME[SHUFFLED].assign(key=range(60))
    dkfm.batch_score(pca, frame, tmp_path / "out.parquet", id_column="key", client=threaded_client, progress=False)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column("key").to_pylist() == list(range(60))
    np.testing.assert_allclose(table.column(1).to_numpy(), pca.transform(FRAME)[:, 0], rtol=0, atol=1e-14)


@pytest.mark.slow
def test_verification_takes_the_columns_of_a_frame_by_name(pca, tmp_path):
    pca.save(tmp_path / "model")
    scored(tmp_path / "model", FRAME, tmp_path / "out.zarr")
    assert dkfm.verify_scores(tmp_path / "out.zarr", FRAME[SHUFFLED]).worst <= 1


@every_kind
@pytest.mark.parametrize(
    "use",
    [
        lambda pca, phi, f: pca.transform(f),
        lambda pca, phi, f: pca.reconstruction_error(f),
        lambda pca, phi, f: phi.residual(f),
        lambda pca, phi, f: phi.distance(f),
        lambda pca, phi, f: phi.distance(FRAME, f),
        lambda pca, phi, f: phi.verify(f),
        lambda pca, phi, f: dkfm.KernelPCA.from_map(phi, 2, f),
        lambda pca, phi, f: dkfm.KernelFisher.from_map(phi, ROWS[:, 0] > 0, f),
        lambda pca, phi, f: pca.preimage(pca.transform(FRAME), f),
        lambda pca, phi, f: dkfm.plotting.certificates(phi, f),
        lambda pca, phi, f: K(FRAME, f),
        lambda pca, phi, f: dkfm.ExactFeatureMap(K, landmarks=f).fit(FRAME),
    ],
)
def test_columns_in_another_order_are_refused_where_rows_are_in_memory(pca, phi, kind, use):
    with pytest.raises(InvalidInputError, match=r"feature names should match|give both the same columns"):
        use(pca, phi, KINDS[kind](FRAME[SHUFFLED]))
    use(pca, phi, KINDS[kind](FRAME))


@every_kind
def test_a_fit_knows_the_names_of_its_columns(kind):
    assert list(dkfm.KernelPCA(2, kernel=K).fit(KINDS[kind](FRAME)).feature_names_in_) == NAMES


def test_a_dask_frame_is_taken_by_name(phi):
    dd = pytest.importorskip("dask.dataframe")
    lazily = phi.distance(dd.from_pandas(FRAME[SHUFFLED], npartitions=2), FRAME)
    np.testing.assert_allclose(lazily.compute(scheduler="synchronous"), phi.distance(FRAME), rtol=0, atol=1e-7)


def test_kernels_are_compared_on_columns_by_name():
    y = ROWS[:, 0] > 0
    found = [
        dkfm.compare_kernels([K], FRAME, y, test=FRAME[names], test_labels=y).compared[0].neighbour_accuracy
        for names in (NAMES, SHUFFLED)
    ]
    assert found == [1.0, 1.0]


def test_a_model_is_verified_on_the_command_line_with_columns_by_name(phi, tmp_path):
    from click.testing import CliRunner

    from dkfm.cli.app import main

    phi.save(tmp_path / "model")
    FRAME.to_parquet(tmp_path / "x.parquet")
    FRAME[SHUFFLED].to_parquet(tmp_path / "y.parquet")
    said = [
        CliRunner().invoke(main, ["verify", str(tmp_path / "model"), "--against", str(tmp_path / name)]).output
        for name in ("x.parquet", "y.parquet")
    ]
    assert said[0].replace("x.parquet", "y.parquet") == said[1]


def test_scores_and_features_in_another_order_are_refused():
    from sklearn.linear_model import LogisticRegression

    pca = dkfm.KernelPCA(2, kernel=K, fit_inverse_transform=True).fit(FRAME).set_output(transform="pandas")
    scores = pca.transform(FRAME)
    turned = scores[scores.columns[::-1]]
    assert pca.inverse_transform(scores).shape == ROWS.shape
    with pytest.raises(InvalidInputError, match="columns that transform returns"):
        pca.inverse_transform(turned)
    labels = ROWS[:, 0] > 0
    assert dkfm.fold(pca, LogisticRegression().fit(scores, labels)).kind_ == "classifier"
    with pytest.raises(InvalidInputError, match="columns that transform returns"):
        dkfm.fold(pca, LogisticRegression().fit(turned, labels))


def test_regions_of_an_estimator_are_drawn_on_its_own_columns():
    pytest.importorskip("matplotlib").use("Agg")
    flat = FRAME[["a", "b"]]
    model = dkfm.KernelFisher(kernel=K).fit(flat, ROWS[:, 0] > 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dkfm.plotting.decision_regions(model, flat)
        dkfm.plotting.contours(model, flat)
    for draw in (dkfm.plotting.decision_regions, dkfm.plotting.contours):
        with pytest.raises(InvalidInputError, match="was fitted to column"):
            draw(model, flat[["b", "a"]])


@pytest.mark.parametrize("module", ["pandas", "polars"])
@pytest.mark.parametrize("value", ["a", datetime.datetime(2024, 1, 1), datetime.date(2024, 1, 1)])
def test_a_column_of_text_or_times_is_refused_by_its_name(module, value):
    frame = pytest.importorskip(module).DataFrame({"a": np.arange(20.0), "when": [value] * 20})
    with pytest.raises(InvalidInputError, match="its column 'when'"):
        dkfm.KernelPCA(2).fit(frame)


def test_nulls_of_a_frame_are_nan(pca, tmp_path):
    frame = FRAME.astype("Float64")
    frame.loc[3, "a"] = pd.NA
    with pytest.raises(InvalidInputError, match="row 3 contains NaN"):
        pca.transform(frame)
    found = scored(pca, frame, tmp_path / "out.zarr", on_invalid="nan")
    assert np.flatnonzero(np.isnan(found[:, 0])).tolist() == [3]


@pytest.mark.parametrize("kind", ["pandas", "table"])
def test_a_column_that_is_no_number_is_named(pca, kind, tmp_path):
    frame = KINDS[kind](FRAME.assign(b="text"))
    with pytest.raises(InvalidInputError, match=r"^The column 'b' of source does not hold numbers"):
        dkfm.plan_score(pca, frame, tmp_path / "out.zarr")


def test_names_that_are_there_twice_or_are_text_in_part_are_refused(pca, tmp_path):
    for names, told in ((["a", "b", "b"], "more than once"), (["a", "b", 3], "only some are called by text")):
        with pytest.raises(InvalidInputError, match=told):
            dkfm.plan_score(pca, pd.DataFrame(ROWS, columns=names), tmp_path / "out.zarr")


@pytest.mark.costly
@pytest.mark.parametrize("labels", [[("x", c) for c in "cab"], [2, 0, 1]], ids=["tuples", "numbers"])
@pytest.mark.parametrize("named", [True, False])
def test_columns_that_are_called_by_no_text_are_taken_in_order_with_a_warning(labels, named, rng, tmp_path):
    pd = pytest.importorskip("pandas")
    X = rng.normal(size=(20, 3))
    pca = dkfm.KernelPCA(2).fit(pd.DataFrame(X, columns=list("abc")) if named else X)
    frame = pd.DataFrame(X, columns=pd.Index(labels))
    with pytest.warns(DkfmWarning, match="called by numbers or tuples, which are not matched"):
        dkfm.batch_score(pca, frame, tmp_path / "scores", progress=False)
