"""Verify an output: compare its chunks with their receipts, and some of its rows with the dense formula."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dkfm.core import chunking
from dkfm.core.rows import Array, as_float64, zero_nonfinite_rows
from dkfm.errors import (
    CertificateError,
    DamagedStoreError,
    InvalidInputError,
    StoreError,
    shorten,
    warn_caller,
)
from dkfm.execution.executors import open_executor
from dkfm.execution.stage_log import describe_place, log_stage
from dkfm.execution.task_runner import run_tasks
from dkfm.files import change_detection, temporary_folders
from dkfm.files.location import locate
from dkfm.numerics import links
from dkfm.numerics.certificates.reference_scores import ReferenceScorer
from dkfm.numerics.model import Model
from dkfm.scoring import appending, completion, marker, output_store
from dkfm.scoring.marker import ReceiptTable
from dkfm.scoring.output_store import Output
from dkfm.scoring.receipts import ChunkReceipt
from dkfm.scoring.score_readers import read_id_rows, read_score_rows
from dkfm.scoring.tasks import HasIds, find_sound_receipts
from dkfm.sources.base import Source
from dkfm.sources.opening import open_source
from dkfm.storage import remote_stores
from dkfm.storage.model_store import Record, load_record

_SAMPLED_SLICES = 40
"""Number of slices of an output whose rows are computed again."""


@dataclass(frozen=True)
class ScoresVerification:
    """Result of `verify_scores`.

    Attributes
    ----------
    rows : int
        Rows of the output.
    chunks : int
        Chunks of the output, all of which match their receipts.
    sampled : int
        Rows that were computed again.
    worst : float
        Largest error of these rows as a share of what rounding allows: 1 is the limit. 0 if none were computed.
    ids_compared : bool
        Whether the ids of these rows were compared with the input. This needs an output with ids, and an input with
        column names.
    """

    rows: int
    chunks: int
    sampled: int
    worst: float
    ids_compared: bool = False


def verify_scores(
    path: str | Path,
    against: object = None,
    *,
    sample: int = 1000,
    model: "str | Path | None" = None,
    trusted: Collection[str] = (),
    progress: bool = False,
) -> ScoresVerification:
    """Read every chunk of a finished output, and compare it with its receipt.

    Parameters
    ----------
    path : str or Path
        Path or URL of the output.
    against : path or array-like, optional
        The input. Some of its rows are scored again with the dense formula, in this process, and compared. Their ids
        are compared too if the output has an id column and the input has column names.
    sample : int
        Approximate number of rows to score again; all rows if the output has no more.
    model : str or Path, optional
        Path or URL of the model, if it was moved after the job.
    trusted : collection of str
        User functions that the model may import; see `batch_score`.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    ScoresVerification
        Numbers of rows and chunks, and the largest difference.

    Raises
    ------
    DamagedStoreError
        A chunk is lost, or differs from its receipt.
    CertificateError
        A row differs from the formula by more than rounding allows, or has another id.
    InvalidInputError
        `sample` is not a positive integer, or the input is not of the shape of the output.

    Examples
    --------
    >>> import dkfm, numpy as np, tempfile
    >>> X = np.random.default_rng(0).normal(size=(300, 5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dkfm.KernelPCA(2, kernel=dkfm.kernels.Gaussian(3.0)).fit(X[:100]).save(folder + "/model")
    ...     report = dkfm.batch_score(folder + "/model", X, folder + "/scores.zarr", progress=False)
    ...     found = dkfm.verify_scores(folder + "/scores.zarr", X)
    ...     found.rows, found.sampled, found.worst < 1
    (300, 300, True)
    """
    sample = chunking.require_count(sample, "sample")
    output = output_store.read_output(locate(path))
    receipts = marker.read_receipt_table(output)
    _require_undamaged(output, receipts, progress)
    if against is None:
        return ScoresVerification(output.rows, output.n_chunks, 0, 0.0)
    with remote_stores.open_model_folder(_model_path(output) if model is None else model) as folder:
        record = load_record(folder, output.model["digest"], trusted)
    _require_names_of_model(output, record)
    source, loaded = _open_input_of_same_shape(against, output, record), record.model
    slices = _spread_slices(output.rows, sample)
    _log_sample(source, loaded, output, slices)
    with change_detection.require_unchanged(source, "compared", "verify again"):
        has_ids = all(_compare_ids(output, receipts, source, rows) for rows in slices)
        reference = ReferenceScorer(loaded)
        worst = max(_compute_max_error_ratio(output, receipts, reference, source, rows) for rows in slices)
    sampled = sum(rows.stop - rows.start for rows in slices)
    return ScoresVerification(output.rows, output.n_chunks, sampled, worst, has_ids)


def _model_path(output: Output) -> str:
    """Return the path of the model of an output.

    A URL must be in the store of the output, because an untrusted output could name any URL.
    """
    stated = output.model["path"]
    if "://" in stated and stated.split("/")[:3] != str(output.root).split("/")[:3]:
        raise InvalidInputError(f"{output.root} says that its model is at {stated}; name it with model= (--model).")
    if "://" not in stated and not Path(stated).exists():
        if temporary_folders.has_temporary_name(Path(stated).parent):
            raise StoreError(
                f"The model of {output.root} was in memory; save it, and say where it is with model= (--model)."
            )
        raise StoreError(
            f"The model of {output.root} was at {stated}, and is not there; say where it is with model= (--model)."
        )
    return stated


def _require_undamaged(output: Output, receipts: ReceiptTable, progress: bool) -> None:
    """Raise a DamagedStoreError unless every chunk matches its receipt."""
    completion.require_no_extra_files(output)
    sound: set[int] = set()

    def add(checked: list[ChunkReceipt]) -> None:
        sound.update(receipt.chunk for receipt in checked)

    with open_executor(None) as executor:
        text = f"{len(receipts):,} chunks of {output.rows:,} rows of {output.root} read on {describe_place(executor)}"
        log_stage("verify", text, rows=output.rows, chunks=len(receipts), path=str(output.root))
        tasks = ((output, [receipt]) for receipt in receipts)
        run_tasks(executor, "dkfm-verify", find_sound_receipts, tasks, len(receipts), progress, add)
    bad = sorted(set(range(output.n_chunks)) - sound)
    if bad:
        raise DamagedStoreError(completion.describe_damaged_chunks(output, bad))


def _require_names_of_model(output: Output, record: Record) -> None:
    """Raise a CertificateError unless the classes, and the names of columns, are those of the model."""
    if output.classes != record.classes:
        raise CertificateError(f"The classes of {output.root} are not those of its model.")
    for columns in output.columns:
        expected = output_store.name_columns(record, columns.output, output.is_table)
        if columns.labels not in ((), expected):  # outputs of earlier versions have none
            raise CertificateError(f"The columns of {columns.output} in {output.root} have other names in its model.")


def _open_input_of_same_shape(against: object, output: Output, record: Record) -> Source:
    columns = output.settings.get("columns")
    fitted = record.feature_names if columns is None else json.loads(columns)
    source, ids = open_source(against, "against", fitted_columns=fitted), output.settings.get("id_column")
    if ids is not None and isinstance(source, HasIds):
        source = open_source(against, "against", fitted_columns=fitted, id_column=ids)
    if source.name == output.input["name"] and source.stamp() != output.input["stamp"]:
        warn_caller(
            f"{source.name} has changed since it was scored, or its files have other times: what is new is not "
            "verified, and of the rest only the rows of the sample are compared."
        )
    source = appending.restore_file_order(source, output)
    if source.shape[0] != output.rows:
        raise InvalidInputError(f"{source.name} has {source.shape[0]} rows and {output.root} scores {output.rows}.")
    if source.shape[1] != record.model.n_features_in:
        raise InvalidInputError(
            f"{source.name} has {source.shape[1]} columns and the model {record.model.n_features_in}."
        )
    return source


def _spread_slices(rows: int, sample: int) -> list[slice]:
    """Return slices of about `sample` rows in all, evenly spread from the first row to the last."""
    if rows <= sample:
        return list(chunking.row_slices(rows, max(1, chunking.count_tiles(rows, _SAMPLED_SLICES))))
    each = chunking.count_tiles(sample, _SAMPLED_SLICES)
    starts = np.unique(np.linspace(0, rows - each, chunking.count_tiles(sample, each)).astype(np.intp))
    return [slice(int(start), int(start) + each) for start in starts]


def _log_sample(source: Source, model: Model, output: Output, slices: list[slice]) -> None:
    """Log how many rows are scored again."""
    rows, width = sum(part.stop - part.start for part in slices), sum(columns.width for columns in output.columns)
    seconds = rows * model.predict_row_seconds(source.float64s_per_row, width)
    log_stage("verify", f"{rows:,} rows of {source.name} scored again in this process", seconds=seconds, sampled=rows)


def _compare_ids(output: Output, receipts: ReceiptTable, source: Source, rows: slice) -> bool:
    """Compare the ids of some rows with those of the input; return False if the output or the input has no ids.

    Raises
    ------
    CertificateError
        A row has another id in the input.
    """
    if output.settings.get("id_column") is None or not isinstance(source, HasIds):
        return False
    import pyarrow as pa

    stored, expected = read_id_rows(output, receipts, rows), source.read_ids(rows)
    try:
        converted = expected.cast(stored.type)
    except pa.ArrowException:
        raise CertificateError(
            f"The ids of {source.name} are of the type {expected.type!s:.100}, and those of {output.root} "
            f"{stored.type!s:.100}."
        ) from None
    for row, (ours, theirs) in enumerate(zip(stored, converted, strict=True), rows.start):
        if not ours.equals(theirs) and str(ours) != str(theirs):  # `equals` is False for NaN
            texts = [shorten(str(value), 50) for value in (ours, theirs)]
            raise CertificateError(f"Row {row} has the id {texts[0]} in {output.root} and {texts[1]} in {source.name}.")
    return True


def _compute_max_error_ratio(
    output: Output, receipts: ReceiptTable, reference: ReferenceScorer, source: Source, rows: slice
) -> float:
    """Return the largest error of some rows, as a share of the allowed one; raise a CertificateError above 1."""
    Z, worst = source.read(rows), 0.0
    valid, clean = zero_nonfinite_rows(Z)
    with np.errstate(over="ignore", invalid="ignore"):
        outputs = reference.compute([columns.output for columns in output.columns], as_float64(clean))
    for columns in output.columns:
        scores = np.asarray(read_score_rows(output, receipts, columns.output, rows), np.float64)
        expected, allowed = outputs[columns.output]
        with np.errstate(over="ignore", invalid="ignore"):
            lost = ~(valid & links.find_valid_rows(expected))
            shares = np.abs(scores - expected) / allowed
        if columns.has_codes:
            scores[scores < 0] = np.nan
        bad = np.where(np.isnan(scores).any(axis=1), ~lost, lost | ~(shares <= 1).all(axis=1))
        if bad.any():
            row = rows.start + int(bad.argmax())
            raise CertificateError(
                f"The {columns.output} of row {row} in {output.root} are not those of its model and {source.name}: "
                f"{_describe_difference(*(values[bad.argmax()] for values in (scores, expected, allowed)))}."
            )
        if not lost.all():
            worst = max(worst, float(shares[~lost].max()))
    return worst


def _describe_difference(scores: Array, expected: Array, allowed: Array) -> str:
    """Describe the column whose difference is largest relative to what rounding allows."""
    shares = np.broadcast_to(np.abs(scores - expected) / allowed, scores.shape)
    column = int(np.nanargmax(shares)) if np.isfinite(shares).any() else 0
    limit = float(np.broadcast_to(allowed, scores.shape)[column])
    return (
        f"column {column} has {float(scores[column])!r} where the formula gives {float(expected[column])!r}, "
        f"and rounding allows {limit:.1e}"
    )
