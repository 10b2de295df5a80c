"""An output held against its receipts, and some of its rows against the formula: what it says is what was meant."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dkfm.core import chunking
from dkfm.core.rows import Array, as_float64, mask_invalid_rows
from dkfm.errors import CertificateError, DamagedStoreError, InvalidInputError
from dkfm.execution.executors import open_executor
from dkfm.execution.task_runner import run_tasks
from dkfm.files import change_detection
from dkfm.files.location import locate
from dkfm.numerics import links
from dkfm.numerics.certificates import reference
from dkfm.numerics.model import Model
from dkfm.scoring import completion, outputs
from dkfm.scoring.outputs import Output
from dkfm.scoring.readers import read_scores
from dkfm.scoring.receipts import Receipt
from dkfm.scoring.tasks import check_chunks
from dkfm.sources.base import Source
from dkfm.sources.opening import open_source
from dkfm.storage import model_transfer
from dkfm.storage.model_store import Record, load_record

_RUNS = 40
"""Places of an output whose rows are computed anew."""


@dataclass(frozen=True)
class ScoresVerification:
    """What was looked at, and how far the rows that were computed anew are from what rounding allows."""

    rows: int
    chunks: int
    sampled: int
    worst: float
    """The largest difference, as a share of what rounding allows; 0 where no rows were computed anew."""


def verify_scores(
    path: str | Path,
    against: object = None,
    *,
    sample: int = 1000,
    model: "str | Path | None" = None,
    trusted: Collection[str] = (),
    progress: bool = False,
) -> ScoresVerification:
    """Read every chunk of a finished output again, and hold it against its receipt.

    Parameters
    ----------
    path : str or Path
    against : path or array-like, optional
        The input: some rows of it are scored anew on this machine, by the dense formula, and compared.
    sample : int
        How many rows.
    model : str or Path, optional
        Where the model is, if it moved.
    trusted : collection of str
        See `batch_score`.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    ScoresVerification

    Raises
    ------
    DamagedStoreError
        A chunk that is lost, or is not the one of its receipt.
    CertificateError
        A row that differs from the formula by more than rounding allows.

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
    output = outputs.read_output(locate(path))
    receipts = completion.marker_receipts(output)
    _require_sound(output, receipts, progress)
    if against is None:
        return ScoresVerification(output.rows, output.chunks, 0, 0.0)
    sample = chunking.require_count(sample, "sample")
    with model_transfer.fetch_model(_stated(output) if model is None else model) as folder:
        record = load_record(folder, output.model["digest"], trusted)
    source, loaded = _input(against, output, record), record.model
    places = _places(output.rows, sample)
    with change_detection.watch(source) as watch:
        worst = max(_worst(output, receipts, loaded, source, rows) for rows in places)
        watch.require_same("compared", "verify again")
    return ScoresVerification(output.rows, output.chunks, sum(rows.stop - rows.start for rows in places), worst)


def _stated(output: Output) -> str:
    """Return where the output says that its model is; a URL only beside its own: whoever wrote it may be a stranger."""
    stated = output.model["path"]
    if "://" in stated and stated.split("/")[:3] != str(output.root).split("/")[:3]:
        raise InvalidInputError(f"{output.root} says that its model is at {stated}; name it with model= (--model).")
    return stated


def _require_sound(output: Output, receipts: dict[int, Receipt], progress: bool) -> None:
    """Raise unless every chunk is what its receipt says."""
    completion.require_no_extra_files(output)
    sound: set[int] = set()

    def keep(found: list[Receipt]) -> None:
        sound.update(receipt.chunk for receipt in found)

    with open_executor(None) as running:
        tasks = ((output, [receipt]) for receipt in receipts.values())
        run_tasks(running, "dkfm-verify", check_chunks, tasks, len(receipts), progress, keep)
    bad = sorted(receipts.keys() - sound)
    if bad:
        more = f", and {len(bad) - 1} more are not" if bad[1:] else ""
        raise DamagedStoreError(
            f"Chunk {bad[0]} of {output.root} is not what was written{more}; the same dkfm score makes it again."
        )


def _input(against: object, output: Output, record: Record) -> Source:
    columns = output.settings.get("columns")
    fitted = record.feature_names if columns is None else json.loads(columns)
    source = open_source(against, "against", fitted=fitted)
    if source.shape[0] != output.rows:
        raise InvalidInputError(f"{source.name} has {source.shape[0]} rows and {output.root} scores {output.rows}.")
    if source.shape[1] != record.model.columns:
        raise InvalidInputError(f"{source.name} has {source.shape[1]} columns and the model {record.model.columns}.")
    return source


def _places(rows: int, sample: int) -> list[slice]:
    """Return runs of rows, evenly spread, from the first to the last."""
    if rows <= sample:
        return list(chunking.row_slices(rows, max(1, chunking.count_tiles(rows, _RUNS))))
    each = chunking.count_tiles(sample, _RUNS)
    starts = np.unique(np.linspace(0, rows - each, chunking.count_tiles(sample, each)).astype(np.intp))
    return [slice(int(start), int(start) + each) for start in starts]


def _worst(output: Output, receipts: dict[int, Receipt], model: Model, source: Source, rows: slice) -> float:
    """Return the largest difference of some rows, as a share of what is allowed; raise where it is above 1."""
    Z, worst = source.read(rows), 0.0
    valid, clean = mask_invalid_rows(Z)
    for columns in output.columns:
        found = np.asarray(read_scores(output, receipts, columns.output, rows), np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            expected, allowed = reference.reference_scores(model, columns.output, as_float64(clean))
            lost = ~(valid & links.valid_rows(expected))
            shares = np.abs(found - expected) / allowed
        if columns.dtype == "int64":
            found[found < 0] = np.nan
        bad = np.where(np.isnan(found).any(axis=1), ~lost, lost | ~(shares <= 1).all(axis=1))
        if bad.any():
            row = rows.start + int(bad.argmax())
            raise CertificateError(
                f"The {columns.output} of row {row} in {output.root} are not those of its model and {source.name}: "
                f"{_told(found[bad.argmax()], expected[bad.argmax()])}."
            )
        if not lost.all():
            worst = max(worst, float(shares[~lost].max()))
    return worst


def _told(found: Array, expected: Array) -> str:
    place = int(np.nanargmax(np.abs(found - expected))) if np.isfinite(found - expected).any() else 0
    return f"{float(found[place])!r} where the formula gives {float(expected[place])!r}"
