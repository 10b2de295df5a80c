"""Open the eigenproblem of kernel principal components by the fastest method: in memory, from disk, or matrix-free."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.random import RandomState

from dkfm.core import budget
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, KernelError
from dkfm.execution import memory
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.executors import open_executor
from dkfm.execution.scoring_threads import choose_scoring_threads
from dkfm.execution.stage_log import log_stage
from dkfm.gram import build, matrix_free, product_costs
from dkfm.gram.product_costs import LanczosProblem, ProductCost, ProductMethod
from dkfm.gram.training_data import Indices, PrecomputedGram, TrainingData
from dkfm.kernels.base import Kernel, evaluate_block
from dkfm.kernels.serialization import is_code_free
from dkfm.numerics import kernel_components
from dkfm.numerics.eigensolvers import lanczos
from dkfm.numerics.eigensolvers.dense import eigh_leading_vectors_in_place
from dkfm.numerics.kernel_components import EigenProblem
from dkfm.numerics.model import Head, Model
from dkfm.numerics.scorer import prepare_scorer
from dkfm.numerics.weighting import Weighting, center_and_weigh_gram_in_place

SMALL_ROWS = 4096
"""Number of rows up to which the matrix is kept in memory if it fits: 134 MB."""

PILOT_ROWS = 1024
"""Number of evenly spread rows whose eigenvectors are computed first, to estimate the number of products."""

_MAX_PILOT_PRODUCTS = 200
"""Largest number of products with the matrix of these rows."""

_START_ROWS = 512
"""Largest number of rows, drawn at random, whose eigenvectors are extended to all rows for the first block."""

_ROWS_PER_START_ROW = 16
"""Training rows per start row; the kernel values of start rows then take a small part of the product that they save."""

_RANDOM_LENGTH = 0.01
"""Length of the random part, added for full rank, of a column of the first block; the eigenvector part has length 1."""

_TYPICAL_PRODUCTS = 10
"""Expected number of products if it is not estimated."""

_SYMMETRY_TOLERANCE = 1e-8
"""Relative difference of u'Kv and v'Ku above which K is not symmetric; rounding stays below it."""


@contextmanager
def open_eigenproblem(
    data: TrainingData,
    method: ProductMethod,
    q: int,
    weighting: Weighting,
    tile_rows: int | None,
    workspace: str | Path | None,
    progress: bool,
    means: Array | None,
) -> Iterator[EigenProblem]:
    """Yield the eigenproblem of q components, with products by `method`.

    The means (N,) of the rows of the matrix are computed, unless they are given or the matrix is in memory.
    """
    rows, kernel = data.indexable_rows, data.kernel
    if method is ProductMethod.DENSE:
        yield kernel_components.make_dense_problem(data.compute_gram(tile_rows, workspace, progress), weighting)
    elif isinstance(data, PrecomputedGram):
        _require_symmetric(data)
        multiply = partial(_multiply_by_tiles, data)
        yield kernel_components.make_product_problem(multiply, data.diagonal(), weighting, means)
    elif method is ProductMethod.STORED:
        with build.build_stored_gram(kernel, rows, tile_rows=tile_rows, workspace=workspace, progress=progress) as gram:
            yield kernel_components.make_product_problem(gram.__matmul__, data.diagonal(), weighting, means)
    else:
        columns = lanczos.choose_block_columns(rows.shape[0], q)
        with matrix_free.open_matrix_free(
            kernel, rows, columns, tile_rows=tile_rows, workspace=workspace, progress=progress
        ) as products:
            yield kernel_components.make_product_problem(products.__matmul__, data.diagonal(), weighting, means)


def choose_product_cost(data: TrainingData, q: int, tile_rows: int | None, workspace: str | Path | None) -> ProductCost:
    """Return the predicted cost of the best method for q components in the available memory.

    Raises
    ------
    BudgetError
        No method fits in memory.
    """
    n, d = data.indexable_rows.shape[0], data.float64s_per_row
    with open_executor(None) as executor:
        threads, is_cluster = executor.threads, executor.client is not None
    task = make_lanczos_problem(data.kernel, n, d, q, tile_rows, workspace, threads, is_cluster)
    if task.keeps_store and not data.kernel.is_precomputed and n > SMALL_ROWS:  # what an earlier fit has written counts
        task = replace(task, disk_room=build.find_disk_room(data.kernel, data.indexable_rows, workspace))
    free = memory.clear_caches_and_measure_memory()
    costs = rank_product_costs(task, free)
    if n > SMALL_ROWS and len(costs) > 1 and costs[0].method is not ProductMethod.STORED:
        log_stage("trial", f"{PILOT_ROWS:,} of {n:,} rows show how many products {q} components need", rows=PILOT_ROWS)
        sample = data.subset(np.linspace(0, n - 1, PILOT_ROWS).astype(np.intp))
        task = replace(task, products=estimate_product_count(sample, n, q))
        costs = rank_product_costs(task, free)
    budget.require_fits(
        costs[0].memory_bytes, free, f"Lanczos with N = {n} training rows", "fit fewer rows or components"
    )
    return costs[0]


def improve_start(
    start: Array, data: TrainingData, method: ProductMethod, weighting: Weighting, rng: RandomState
) -> None:
    """Move a random first block (N, p) of Lanczos, in place, near the leading eigenvectors, if that saves a product.

    For matrix-free products, eigenvectors of the matrix of some rows are extended to all rows by their kernel values
    (Williams and Seeger, 2001). The start changes the components only within rounding, or within `tol`. Kernel values
    that are not finite have already raised in the product that computed the means.
    """
    n, p = start.shape
    m = min(_START_ROWS, n // _ROWS_PER_START_ROW)
    if method is not ProductMethod.MATRIX_FREE or m < 2 * p or not product_costs.has_near_start(data.kernel):
        return
    near = _extend_eigenvectors(data, np.sort(rng.choice(n, m, replace=False)), p, weighting)
    largest = np.abs(near).max(axis=0)  # squares may overflow or underflow
    if not np.isfinite(largest).all() or not largest.all():
        return
    near /= largest
    near /= np.linalg.norm(near, axis=0)
    start *= _RANDOM_LENGTH / np.sqrt(n)
    start += near


def _extend_eigenvectors(data: TrainingData, sample: Indices, p: int, weighting: Weighting) -> Array:
    """Return the p first eigenvectors of the matrix of some rows, extended to all rows, (N, p), of any lengths."""
    rows, n, kernel = data.indexable_rows, data.indexable_rows.shape[0], data.kernel
    landmarks, equal = rows[sample], Weighting(np.ones(len(sample)), weighting.centered)
    K = evaluate_block(kernel, landmarks, landmarks).T
    center_and_weigh_gram_in_place(K, equal)
    with single_blas_thread():  # the same bits on any number of threads
        vectors = eigh_leading_vectors_in_place(K, p)[1][:, -p:]
    model = Model(kernel, landmarks, {"start": Head(equal.apply_weighted_centring_adjoint(vectors))})
    with (
        np.errstate(over="ignore", invalid="ignore"),
        choose_scoring_threads(prepare_scorer(model), "start", n) as scorer,
    ):
        return weighting.apply_weighted_centring(scorer("start", rows))


def make_lanczos_problem(
    kernel: Kernel,
    n: int,
    d: int,
    q: int,
    tile_rows: int | None,
    workspace: str | Path | None,
    threads: int,
    is_cluster: bool,
) -> LanczosProblem:
    """Return the problem of finding q components of n rows of d stored values by an expected number of products."""
    keeps_store = workspace is not None and is_code_free(kernel)
    room = build.find_disk_room(kernel, None, workspace)
    return LanczosProblem(kernel, n, d, q, _TYPICAL_PRODUCTS, tile_rows, threads, is_cluster, keeps_store, room)


def rank_product_costs(task: LanczosProblem, available: int) -> list[ProductCost]:
    """Return the cost of each method, the best one first; a small matrix is kept in memory if it fits."""
    costs = product_costs.compare_product_costs(task, available)
    if task.n <= SMALL_ROWS:
        costs.sort(key=lambda cost: cost.method is not ProductMethod.DENSE or cost.memory_bytes > available)
    return costs


def estimate_product_count(sample: TrainingData, n: int, q: int) -> int:
    """Estimate the number of products for q components of n rows from a sample, which has a similar spectrum."""
    rows, p = sample.indexable_rows.shape[0], lanczos.choose_block_columns(n, q)
    if 2 * (q + p) > min(rows // 2, lanczos.choose_basis_columns(rows, q)):
        return _TYPICAL_PRODUCTS
    try:
        K = sample.compute_gram(None, None)
    except KernelError:  # it would name rows of the sample; the fit itself names those of X
        return _TYPICAL_PRODUCTS
    problem = kernel_components.make_dense_problem(K, Weighting(np.ones(rows)))
    start = np.random.default_rng(0).normal(size=(rows, p))
    return lanczos.largest_eigenpairs(problem.multiply, start, q, max_products=_MAX_PILOT_PRODUCTS).n_products


def _require_symmetric(data: PrecomputedGram) -> None:
    """Raise unless ``u'Kv = v'Ku`` for two random vectors; this reads the matrix once more."""
    V = np.random.default_rng(0).normal(size=(len(data.original_row_indices), 2))
    products = V.T @ _multiply_by_tiles(data, V)
    if abs(products[0, 1] - products[1, 0]) > _SYMMETRY_TOLERANCE * np.abs(products).max():
        raise InvalidInputError("The Gram matrix is not symmetric.")


def _multiply_by_tiles(data: PrecomputedGram, V: Array) -> Array:
    product, start = np.empty((len(data.original_row_indices), V.shape[1])), 0
    all_columns = len(data.original_row_indices) == data.source.shape[1]
    for tile in data.iter_row_tiles():
        product[start : start + len(tile)] = (tile if all_columns else tile[:, data.original_row_indices]) @ V
        start += len(tile)
    return product
