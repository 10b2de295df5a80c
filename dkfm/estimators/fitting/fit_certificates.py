"""Certify the result of a fit on its training rows, and warn if the error is larger than its bound or than expected."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dkfm.core import budget, chunking
from dkfm.core.rows import Array, Rows, estimate_float64s_per_row
from dkfm.errors import ClusterError, KernelError
from dkfm.estimators.fitting.eigenproblem_setup import SMALL_ROWS
from dkfm.estimators.stored.feature_map import sample_scorer_and_kernel_rows
from dkfm.execution import lazy_scoring
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.clusters.current_client import find_client
from dkfm.execution.executors import open_executor
from dkfm.execution.scoring_threads import open_certificate_scorer
from dkfm.execution.stage_log import describe_place, log_stage
from dkfm.execution.task_runner import run_tasks
from dkfm.execution.worker_checks import WorkerRequirements, require_fit_worker
from dkfm.gram.ordered_sums import OrderedSums
from dkfm.gram.row_passes import choose_tile_rows
from dkfm.gram.shared_arrays import open_shared_arrays
from dkfm.gram.training_data import TrainingData
from dkfm.kernels import serialization
from dkfm.numerics import roots
from dkfm.numerics.certificates import certificate, components
from dkfm.numerics.certificates.certificate import Certificate
from dkfm.numerics.certificates.components import ScoreProducts
from dkfm.numerics.map_error_bounds import Residuals
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import Scorer, prepare_scorer
from dkfm.storage.model_store import Record

if TYPE_CHECKING:
    from distributed import Client

MEAN_REMEDY = (
    "the mean of the features hides their variance: centre the columns of X (another model, unless the kernel is "
    "translation invariant), or choose another kernel"
)
"""Remedy in warnings that rounding is a large part of centred scores."""

COMPONENT_LIMITS = {"float64": 1e-6, "float32": 1e-4}
"""Largest error of components, relative to the largest value, without a warning; new rows may err ten times as much."""


def certify_sampled_row_pairs(scorer: Scorer, rows: TrainingData, mean: Array | None) -> Certificate:
    """Certify pairs of at most 512 training rows, evenly spread among the given ones."""
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow raises in `fit_map`
        return certificate.certify_map(scorer, *sample_scorer_and_kernel_rows(rows), mean=mean)


def certify_residuals(residuals: Residuals, rank: int, n_rows: int, is_sample: bool) -> Certificate:
    """Return the certificate of rows paired with themselves: the largest relative residual of a row."""
    share = max(float(residuals.largest_by_rank[rank]), -residuals.lowest)
    return Certificate(0.0, share, n_rows, n_rows if is_sample else None)


def warn_of_map_errors(
    measured: Certificate,
    on_training: Certificate,
    bound: float | None,
    dtype: np.dtype[np.floating],
    basis: str,
    accepts_bound: bool,
    chosen_landmarks: bool,
) -> None:
    """Warn if a certificate of a map exceeds the bound of its error, or 1e-6 (1e-2 in float32).

    Parameters
    ----------
    measured, on_training : Certificate
        Certificates of the landmarks, and of the training rows.
    bound : float or None
        Error bound of pairs with a training row; None if it is not known.
    dtype : dtype
        Dtype of the map.
    basis : {"symmetric", "spectral", "cholesky"}
        Basis of the map.
    accepts_bound : bool
        Whether the parameters of the fit accept errors up to the bound: with `tol`, `rcond`, or by clipping.
    chosen_landmarks : bool
        Whether only some rows are landmarks, so that errors of the other training rows up to the bound are accepted.

    Warns
    -----
    DkfmWarning
        A certificate exceeds a limit, in units of each pair's own scale.
    """
    remedy = "choose another kernel, or scale the columns of X"
    if dtype == np.float32:
        remedy = f'float32 does not hold these features: fit with dtype="float64", {remedy}'
    if basis != "cholesky":
        remedy = f'fit with basis="cholesky"; if that does not help, {remedy}'
    largest = np.inf if bound is None else bound
    limit = largest if accepts_bound else min(largest, certificate.LIMITS[dtype.name])
    stated = "not known" if bound is None else f"{bound:.1e}"
    finding = f"The certificate of this map is {measured}, its error bound {stated}"
    certificate.warn_if_error_is_large(measured.relative_error, dtype, finding, remedy, limit)
    if measured.relative_error <= limit:
        finding = f"The certificate of the training rows is {on_training}, the error bound of the map {stated}"
        certificate.warn_if_error_is_large(
            on_training.relative_error, dtype, finding, remedy, largest if chosen_landmarks else limit
        )


def warn_of_centring(
    scorer: Scorer, measured: Certificate, landmarks: TrainingData, max_similarity: float, dtype: np.dtype[np.floating]
) -> None:
    """Warn if the mean that centring subtracts is so long that rounding is a large part of the difference."""
    features = scorer("features", sample_scorer_and_kernel_rows(landmarks)[0]).astype(np.float64)
    max_square = float(np.square(features).sum(axis=1).max())
    factor = max(1.0, max_similarity / max(max_square, roots.EPS * max_similarity)) if max_similarity > 0 else 1.0
    if factor > 1:
        message = f"The certificate of this map is {measured}, {measured.error * factor:.1e} of the largest"
        message += " after the mean was taken away"
        certificate.warn_if_error_is_large(measured.error * factor, dtype, message, MEAN_REMEDY)


def certify_components(
    model: Model,
    eigenvalues: Array,
    tiles: Iterator[Rows],
    weights: Array,
    workspace: str | Path | None,
    show_progress: bool,
) -> Certificate:
    """Return the certificate of components on all training rows, the landmarks of the model, and warn of rounding.

    Many rows are scored by tasks of the current Dask client, if there is one.
    """
    client, kernel = find_client(None), model.kernel
    many = len(weights) > SMALL_ROWS and model.dtype == np.float64 and not kernel.is_precomputed
    if client is not None and many and serialization.is_serializable(kernel):  # the landmarks are the rows, exactly
        products = partial(_sum_score_products_on_cluster, client, model, workspace, show_progress)
        measured = components.certify_components(prepare_scorer(model), eigenvalues, tiles, weights, products)
    else:
        with open_certificate_scorer(model, "scores", len(weights)) as scorer:
            measured = components.certify_components(scorer, eigenvalues, tiles, weights)
    warn_of_rounding(measured, model, limits=COMPONENT_LIMITS)
    return measured


def _sum_score_products_on_cluster(
    client: "Client",
    model: Model,
    workspace: str | Path | None,
    show_progress: bool,
    products: ScoreProducts,
    weights: Array,
) -> Array:
    """Return the sum of the products of the scores of all landmarks, which tasks compute with the model."""
    n, d, q = len(weights), estimate_float64s_per_row(model.landmarks), len(products.combinations)
    parts = list(chunking.row_slices(n, choose_tile_rows(n, d)))
    each = model.nbytes + budget.pivot_task_bytes(d, q, model.kernel.peak_blocks, model.kernel.landmark_copies)
    size = products.combinations.shape[1] + 1
    with (
        open_executor(client) as executor,
        open_shared_arrays(executor, each, model.nbytes, "The model", workspace) as shared,
    ):
        sums = OrderedSums(np.zeros((size, size)), size, shared.folder)
        seconds = n * model.predict_row_seconds(d, q) / executor.threads
        text = f"scores of {n:,} training rows from {n:,} landmarks, on {describe_place(executor)}"
        log_stage("certificate", text, seconds=seconds, rows=n)
        stored = lazy_scoring.model_for_graph(Record("KernelPCA", {}, {}, {}, model), shared.folder)
        tasks = (
            (number, part, stored, products, weights[part], shared.requirements) for number, part in enumerate(parts)
        )
        tally = run_tasks(
            executor,
            "dkfm-certificate",
            _sum_tile_score_products,
            tasks,
            len(parts),
            show_progress,
            lambda part: sums.add(0, *part),
        )
        if tally.fatal_task_numbers:
            raise ClusterError("Every worker died that scored some of the training rows for the certificate.")
    return sums.total


def _sum_tile_score_products(
    number: int,
    rows: slice,
    stored: lazy_scoring.SharedModel,
    products: ScoreProducts,
    weights: Array,
    requirements: WorkerRequirements | None,
) -> tuple[int, Array]:
    """Return ``S' diag(w) S`` of the scores S of one tile of landmarks, after the index `number` of the tile."""
    require_fit_worker(requirements)
    scorer = stored.scorer()
    with single_blas_thread():
        return number, products.sum_tile_products(scorer, [scorer.model.landmarks[rows]], weights)


def warn_of_rounding(
    measured: Certificate,
    model: Model,
    remedy: str = MEAN_REMEDY,
    limits: Mapping[str, float] = certificate.LIMITS,
) -> None:
    """Warn if rounding is too large a part of the scores of the training rows, and name a remedy.

    Parameters
    ----------
    measured : Certificate
        Certificate of the scores.
    model : Model
        Model that scores.
    remedy : str
        Remedy for a float64 model.
    limits : mapping of str to float
        Largest `error` without a warning, by the dtype of the model.

    Raises
    ------
    KernelError
        The scores overflow the dtype: they are not finite.
    """
    if not np.isfinite(measured.error):
        raise KernelError(certificate.describe_overflow(model.dtype, model.kernel))
    if model.dtype == np.float32:
        remedy = 'float32 does not hold these scores: fit with dtype="float64"'
    message = f"The certificate of these scores is {measured}"
    certificate.warn_if_error_is_large(measured.error, model.dtype, message, remedy, limits[model.dtype.name])
