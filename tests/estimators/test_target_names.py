"""Targets with names keep them: in the estimator, its store, `dkfm info`, and the columns of predictions."""

import json
import re
from dataclasses import replace
from pathlib import Path

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import polars as pl
import pytest
from click.testing import CliRunner

import dkfm
from dkfm.cli.app import main
from dkfm.errors import DamagedStoreError, InvalidInputError, StoreError, UnsupportedStoreError
from dkfm.estimators.stored import opening
from dkfm.storage import store_metadata
from helpers.untrusted import edit

FEATURES, TARGETS = ["a", "b", "c"], ["weight", "price"]


@pytest.fixture
def frame(rng):
    rows = pd.DataFrame(rng.normal(size=(40, 3)), columns=FEATURES)
    return rows.assign(price=rows.a, weight=rows.b, id=range(40))


def fit(frame, y):
    return dkfm.KernelRidge(0.1).fit(frame[FEATURES], y)


def test_names_are_those_of_a_frame_or_a_series_and_outlast_the_store(frame, tmp_path):
    for number, (y, names) in enumerate(
        [
            (frame[TARGETS], TARGETS),
            (pl.from_pandas(frame[TARGETS]), TARGETS),
            (dd.from_pandas(frame[TARGETS], npartitions=2), TARGETS),
            (frame.price, ["price"]),
            (pl.Series("price", frame.price.to_numpy()), ["price"]),
            (frame.price.rename(None), None),
            (frame[TARGETS].to_numpy(), None),
            (frame[TARGETS].set_axis(["a", 3], axis=1), None),
            (frame[TARGETS].set_axis(["a", "b\0"], axis=1), None),
            (da.from_array(frame.price.to_numpy()), None),
        ]
    ):
        ridge = fit(frame, y)
        ridge.save(tmp_path / f"model{number}")
        assert ridge.target_names_ == dkfm.load(tmp_path / f"model{number}").target_names_ == names
    phi = dkfm.ExactFeatureMap("linear").fit(frame[FEATURES])
    assert dkfm.KernelRidge.from_map(phi, frame[TARGETS], frame[FEATURES]).target_names_ == TARGETS


def test_several_predictions_are_columns_with_these_names(frame, tmp_path):
    names = ["predict_weight", "predict_price"]
    ridge = fit(frame, frame[TARGETS])
    truth = ridge.predict(frame[FEATURES])
    lazy = ridge.predict(dd.from_pandas(frame[FEATURES], npartitions=2)).compute()
    assert list(lazy.columns) == names
    np.testing.assert_allclose(lazy.to_numpy(), truth, rtol=1e-12)  # tiles of other rows round otherwise
    for suffix in ("parquet", "zarr"):
        dkfm.batch_score(ridge, frame[FEATURES], tmp_path / f"x.{suffix}", progress=False)
    scores = dkfm.open_scores(tmp_path / "x.parquet").compute()
    assert list(scores.columns) == names
    np.testing.assert_allclose(scores.to_numpy(), truth, rtol=1e-12)
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "x.zarr").compute(), truth, rtol=1e-12)
    one = fit(frame, frame.price)
    dkfm.batch_score(one, frame[FEATURES], tmp_path / "one.parquet", progress=False)
    assert list(dkfm.open_scores(tmp_path / "one.parquet").columns) == ["predict"]


def test_the_command_line_names_targets_and_goes_on_with_them(frame, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    frame[:30].to_parquet("x/0.parquet")

    def run(line):
        ended = CliRunner().invoke(main, line.split())
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    fitted = run("fit x model --method ridge --kernel linear --target-columns weight,price --alpha loo --id-column id")
    assert re.search("2 targets, alpha [^ ]*, at an end", fitted), "both targets have one alpha"
    run("fit x map --method features --kernel linear --columns a,b,c")
    run("fit x other --method ridge --map map --target-columns weight,price")
    score = "score model x out.parquet --id-column id --append"
    run(score)
    frame[30:].to_parquet("x/1.parquet")
    run(score)
    run("verify out.parquet --against x")
    assert list(pd.read_parquet("out.parquet").columns) == ["id", "predict_weight", "predict_price"]
    for store in ("model", "other", "out.parquet"):
        assert json.loads(run(f"info {store} --json"))["targets"] == TARGETS


def test_scores_of_a_model_in_memory_ask_for_it(frame, tmp_path):
    ridge = fit(frame, frame.price)
    dkfm.batch_score(ridge, frame[FEATURES], tmp_path / "x.zarr", progress=False)
    with pytest.raises(StoreError, match=r"model of .* was in memory; save it, and say where it is"):
        dkfm.verify_scores(tmp_path / "x.zarr", frame[FEATURES])
    ridge.save(tmp_path / "model")
    assert dkfm.verify_scores(tmp_path / "x.zarr", frame[FEATURES], model=tmp_path / "model").sampled == 40


@pytest.mark.parametrize("estimator", [dkfm.KernelRidge(), dkfm.KernelFisher(), dkfm.KernelRidgeClassifier()])
@pytest.mark.parametrize("y", ["price", Path("y.npy")])
def test_a_name_or_a_path_is_no_y(estimator, y, frame):
    with pytest.raises(InvalidInputError, match="y is an array with a value for each row, and not a name or a path"):
        estimator.fit(frame[FEATURES], y)


def test_columns_of_text_are_no_targets(frame, tmp_path):
    frame.assign(kind="a").to_parquet(tmp_path / "x.parquet")
    columns = "--target-columns price,kind --id-column id"
    line = ["fit", f"{tmp_path}/x.parquet", f"{tmp_path}/m", *f"--method ridge --kernel linear {columns}".split()]
    for more in ([], ["--dry-run"]):
        ended = CliRunner().invoke(main, [*line, *more])
        assert ended.exit_code == 1
        assert "--target-columns takes columns of numbers: " in ended.stderr
        assert "features" not in ended.stderr


@pytest.mark.parametrize("names", ["price", ["price"], ["price", "price"], ["price", 3], ["price", "a\0b"], [[], []]])
def test_names_that_no_fit_has_are_refused(names, frame, tmp_path):
    ridge = fit(frame, frame[TARGETS])
    record = ridge._to_record()
    with pytest.raises(UnsupportedStoreError, match=r"names of (the )?targets"):
        opening._from_record(replace(record, parameters={**record.parameters, "target_names": names}))
    dkfm.batch_score(ridge, frame[FEATURES], tmp_path / "x.zarr", progress=False)
    edit(tmp_path / "x.zarr" / "zarr.json", lambda m: m["attributes"]["dkfm"]["outputs"][0].__setitem__(4, names))
    assert store_metadata.read_own_attributes(tmp_path / "x.zarr", "scores")["outputs"][0][4] == names
    with pytest.raises(DamagedStoreError, match="are not what dkfm writes"):
        dkfm.open_scores(tmp_path / "x.zarr")
