"""Score rows with a model, a tile of rows at a time.

Each output is a link of ``k(Z, X) W - b``. The kernel values of a tile are written to a buffer that the next tile
reuses. One product for each W goes from the buffer to the output, so no temporary grows with the number of rows. Two
tilings of the same rows differ by rounding, at most ``64 eps (sum (|k| + s) |W| + |b|)`` with
``s = sqrt(k(x, x) k(z, z))``. The same tiling on the same threads gives bitwise equal results.
"""

from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import choose_tile_rows, count_tiles, row_slices
from dkfm.core.rows import Array, Rows, as_float64
from dkfm.core.scratch_buffers import ThreadBuffer
from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels.base import Kernel
from dkfm.kernels.pairwise.block_operations import Evaluator
from dkfm.kernels.serialization import is_code_free
from dkfm.numerics import links
from dkfm.numerics.model import Head, Model, StoredWeights, iter_weight_panels
from dkfm.numerics.skinny_and_triangular_matmul import skinny_matmul, triangular_matmul_in_place


@dataclass(frozen=True)
class Scorer:
    """A model with prepared landmarks. It is immutable, so the threads of a process can share it."""

    model: Model
    evaluator: Evaluator
    threads: int = 1
    """Number of tiles that are scored at the same time; more than one is useful if BLAS has one thread."""

    @property
    def may_call_scipy_blas(self) -> bool:
        """Whether scoring may call SciPy's BLAS, for triangular or stored weights or in a user function."""
        heads = self.model.heads.values()
        return not is_code_free(self.model.kernel) or any(
            head.triangular or isinstance(head.weights, StoredWeights) for head in heads
        )

    def __call__(self, name: str, Z: Rows, rows: int | None = None, diagonal: Array | None = None) -> Array:
        """Return the output of one head for checked rows; see `score_heads`."""
        return self.score_heads([name], Z, rows, diagonal)[name]

    def score_heads(
        self,
        names: Collection[str],
        Z: Rows,
        rows: int | None = None,
        diagonal: Array | None = None,
    ) -> dict[str, Array]:
        """Return the outputs of several heads for checked rows, from one kernel block.

        Parameters
        ----------
        names : collection of str
            Names of the heads.
        Z : ndarray or csr_array of shape (n, d)
            Finite rows, in float64 or in the model's dtype.
        rows : int, optional
            Rows of a tile. The default is `choose_tile_rows`, or all rows if weights in a store are to be read once.
        diagonal : ndarray of shape (n,), optional
            k(z, z) of the rows, for a kernel that cannot compute it.

        Returns
        -------
        dict of str to ndarray of shape (n, width)
            Outputs in the model's dtype, or int64 codes of classes. A row that overflows the kernel has values that
            are not finite, or `links.NO_CODE`.
        """
        n, heads = Z.shape[0], {name: self.model.head(name) for name in names}
        out = {name: np.empty((n, head.width), head.output_dtype) for name, head in heads.items()}
        rows = max(1, _equal_tile_rows(n, rows or self._tile_rows(heads.values(), n)))
        tiles = iter(list(row_slices(n, rows)))
        score_tiles = partial(self._score_tiles, tiles, Z, heads, out, diagonal, rows)
        if self.threads == 1:
            score_tiles()
            return out
        with ThreadPoolExecutor(self.threads, thread_name_prefix="dkfm-tiles") as pool:
            futures = [pool.submit(score_tiles) for _ in range(self.threads)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                deque(tiles, maxlen=0)  # after an error, no thread starts another tile
            for future in futures:
                future.result()
        return out

    def _score_tiles(
        self,
        tiles: Iterator[slice],
        Z: Rows,
        heads: dict[str, Head],
        out: dict[str, Array],
        diagonal: Array | None,
        rows: int,
    ) -> None:
        """Fill the outputs of tiles of at most `rows` rows until none is left; threads share the iterator."""
        with (
            np.errstate(over="ignore", invalid="ignore"),  # `compute_finite_scores` raises an error for overflow
            _value_buffer.borrow(rows, self.model.landmarks.shape[0], self.model.dtype) as buffer,
        ):
            for tile in tiles:
                values = self.kernel_values(Z[tile], buffer[: tile.stop - tile.start])
                tile_diagonal = partial(self._diagonal, Z, tile, diagonal)  # cheap compared with N values per row
                for group in _group_by_weights(heads):
                    _fill_head_outputs(values, [(heads[name], out[name][tile]) for name in group], tile_diagonal)
                del values  # if this is not the buffer, free it before the next block is allocated

    def count_tiles(self, name: str, n: int) -> int:
        """Return the number of tiles in which `score_heads` computes a head for n rows."""
        return count_tiles(n, self._tile_rows([self.model.head(name)], n)) if n else 0

    def count_multiplications(self, name: str, n: int) -> int:
        """Return the approximate number of multiplications of the matrix products of a head for n dense rows."""
        head, (n_landmarks, d) = self.model.head(name), self.model.landmarks.shape
        products = 1 if head.sqrt_eigenvalues is None else 2
        return int(n * n_landmarks * (d + products * head.n_columns))

    def kernel_values(self, Z: Rows, out: Array | None = None) -> Array:
        """Return the kernel values k(Z, landmarks) (n, N) of rows, in the model's dtype."""
        return self.evaluator(self.model.prepare_rows(Z), out)

    def apply_weights(self, name: str, values: Array) -> Array:
        """Return ``K W``, or ``K W s W'`` if the head has s, for kernel values K (n, N), without offset and link."""
        head = replace(self.model.head(name), offset=None, link=links.IDENTITY)
        out = np.empty((len(values), head.width), self.model.dtype)
        _fill_head_outputs(values.astype(self.model.dtype, copy=False), [(head, out)], _raise_no_diagonal)
        return out

    def _tile_rows(self, heads: Collection[Head], n: int) -> int:
        if any(isinstance(head.weights, StoredWeights) for head in heads):
            return n
        X = self.model.landmarks
        widest = max(max(head.n_columns, head.width) for head in heads)
        columns = X.shape[1] if isinstance(X, np.ndarray) else 0
        return choose_tile_rows(X.shape[0], columns, widest, self.model.dtype.itemsize)

    def _diagonal(self, Z: Rows, tile: slice, known: Array | None) -> Array:
        return self.model.kernel.evaluate_diagonal(as_float64(Z[tile])) if known is None else known[tile]


def prepare_scorer(model: Model) -> Scorer:
    """Return a scorer of a model; the landmarks are prepared once for all rows."""
    return Scorer(model, model.kernel.make_evaluator(model.landmarks))


def prepare_compact_scorer(model: Model) -> Scorer:
    """Return a scorer of a model without landmarks of zero weight, for jobs that only compute scores."""
    return prepare_scorer(drop_idle_landmarks(model))


def drop_idle_landmarks(model: Model) -> Model:
    """Return the model without the landmarks whose weights are all zero, if they are at least a quarter of all."""
    heads = model.heads
    # A product with W' maps back to all landmarks, and a triangular W has no row of zeros.
    if any(
        h.triangular or h.sqrt_eigenvalues is not None or isinstance(h.weights, StoredWeights) for h in heads.values()
    ):
        return model
    used: npt.NDArray[np.bool_] = np.zeros(model.landmarks.shape[0], np.bool_)
    for weights in {id(head.weights): head.weights for head in heads.values()}.values():
        used |= weights.any(axis=1)
    used[0] |= not used.any()  # a model needs at least one landmark
    if 4 * int(used.sum()) > 3 * len(used):
        return model  # a copy of the other landmarks would save too little
    kept = {id(head.weights): head.weights[used] for head in heads.values()}
    fewer = {name: replace(head, weights=kept[id(head.weights)]) for name, head in heads.items()}
    return replace(model, landmarks=model.landmarks[np.flatnonzero(used)], heads=fewer)


def _equal_tile_rows(n: int, rows: int) -> int:
    """Return the rows of a tile if n rows are split into the fewest equal tiles of at most `rows` rows."""
    return count_tiles(n, count_tiles(n, rows)) if n else 0


_value_buffer = ThreadBuffer()


def _group_by_weights(heads: dict[str, Head]) -> list[list[str]]:
    """Group the names of heads that share their weights."""
    groups: dict[int, list[str]] = {}
    for name, head in heads.items():
        groups.setdefault(id(head.weights), []).append(name)
    return list(groups.values())


def _fill_head_outputs(values: Array, heads: list[tuple[Head, Array]], diagonal: links.ComputeDiagonal) -> None:
    """Fill the outputs of heads that share their weights, from one product with the weights."""
    (first, target), alone = heads[0], len(heads) == 1
    columns = max(head.n_columns for head, _ in heads)
    direct = alone and first.sqrt_eigenvalues is None and first.link == links.IDENTITY
    product = target if direct else np.empty((len(values), columns), values.dtype)
    in_place = first.triangular and not isinstance(first.weights, StoredWeights)
    for part, W in iter_weight_panels(first.weights, columns, first.triangular):
        if in_place:
            np.copyto(product, values)
            triangular_matmul_in_place(product, W)
        else:
            skinny_matmul(values[:, : len(W)], W, product[:, part])
        for head, out in heads:
            if head.sqrt_eigenvalues is not None:
                _accumulate_symmetric_features(product[:, part], head, head.sqrt_eigenvalues[part], part, W, out)
    for head, out in heads:
        if head.sqrt_eigenvalues is not None and columns == 0:
            out[...] = 0.0
        elif head.sqrt_eigenvalues is None:
            _apply_offset_and_link(product if direct else product[:, : head.n_columns], head, diagonal, out)


def _accumulate_symmetric_features(product: Array, head: Head, s: Array, part: slice, W: Array, out: Array) -> None:
    """Add the part of ``((k(Z, X) W - b) s) W'`` from some columns of W to an output; the first part overwrites it."""
    scaled = product - (0.0 if head.offset is None else head.offset[part])
    scaled *= s
    if part.start == 0:
        np.matmul(scaled, W.T, out=out)
        return
    from scipy.linalg import get_blas_funcs

    (add,) = get_blas_funcs(("gemm",), (scaled,))
    add(1.0, W, scaled.T, 1.0, out.T, overwrite_c=1)


def _apply_offset_and_link(product: Array, head: Head, diagonal: links.ComputeDiagonal, out: Array) -> None:
    """Subtract the offset from a product, apply the link, and fill the output, which may be the product itself."""
    if head.offset is not None:
        product = np.subtract(product, head.offset, out=out if head.link == links.IDENTITY else None)
    result = links.link_by_name(head.link)(product, diagonal)
    if result is not out:
        out[...] = result


def _raise_no_diagonal() -> Array:
    raise AssertionError("no link, no diagonal")


def kernel_distances(kernel: Kernel, X: Rows, Y: Rows) -> Array:
    """Return ``sqrt(k(x, x) + k(y, y) - 2 k(x, y))`` of float64 rows, (n, m); the diagonal is 0 if Y is X."""
    if X.shape[1] != Y.shape[1]:
        raise InvalidInputError(f"X has {X.shape[1]} columns and Y has {Y.shape[1]}; a kernel compares equals.")
    squares, evaluate = np.empty((X.shape[0], Y.shape[0])), kernel.make_evaluator(Y)
    with np.errstate(over="ignore", invalid="ignore"):  # overflow raises an error below
        x_diagonal, y_diagonal = kernel.evaluate_diagonal(X), kernel.evaluate_diagonal(Y)
        for tile in row_slices(len(x_diagonal), choose_tile_rows(len(y_diagonal))):
            np.multiply(evaluate(X[tile]), -2.0, out=squares[tile])
            squares[tile] += x_diagonal[tile, np.newaxis]
            squares[tile] += y_diagonal
    np.maximum(squares, 0.0, out=squares)  # rounding may make a zero negative
    if X is Y:
        np.fill_diagonal(squares, 0.0)
    if not np.isfinite(squares).all():
        raise KernelError(f"{kernel!r} overflows between a row of X and one of Y.")
    return np.sqrt(squares, out=squares)


def compute_finite_scores(
    score: Scorer,
    name: str,
    Z: Rows,
    what: str,
    diagonal: Array | None = None,
) -> Array:
    """Return the output of one head; raise an error that names the first row that overflows the kernel.

    `diagonal`, k(z, z) of shape (n,), is checked first: an error names its first row that is not finite.
    """
    if diagonal is not None and not (finite := np.isfinite(diagonal)).all():
        raise InvalidInputError(f"diag must be finite, and k(z, z) of row {finite.argmin()} of {what} is not.")
    scores = score(name, Z, diagonal=diagonal)
    valid = links.find_valid_rows(scores)
    if not valid.all():
        raise KernelError(
            f"Row {valid.argmin()} of {what} overflows {score.model.kernel!r}: its {name} are not finite."
        )
    return scores
