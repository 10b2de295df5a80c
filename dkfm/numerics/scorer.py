"""The tile loop: rows through a model.

Everything is ``k(Z, X) W - b``. Rows are taken a tile at a time: the kernel's values in one buffer, used again by the
next tile, and from there one product for each W into the output, so that no temporary grows with the number of rows.
Two tilings of the same rows differ by at most ``64 eps (sum |k| |W| + |b|)``; the same tiling on the same threads gives
the same bits.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import choose_tile_rows, count_tiles, row_slices
from dkfm.core.prefetch import prefetch
from dkfm.core.rows import Array, Rows, as_float64
from dkfm.core.scratch_buffers import ThreadBuffer
from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels.base import Kernel
from dkfm.kernels.pairwise.blocks import Evaluator
from dkfm.numerics import links
from dkfm.numerics.matmul import skinny_matmul, triangular_matmul
from dkfm.numerics.model import Head, Model, StoredWeights


@dataclass(frozen=True)
class Scorer:
    """A model with its landmarks prepared; immutable, shared by the threads of a process."""

    model: Model
    block: Evaluator

    def __call__(self, name: str, Z: Rows, rows: int | None = None, diagonal: Array | None = None) -> Array:
        """Return the output of one head for checked rows; see `several`."""
        return self.several([name], Z, rows, diagonal)[name]

    def several(
        self, names: Collection[str], Z: Rows, rows: int | None = None, diagonal: Array | None = None
    ) -> dict[str, Array]:
        """Return the outputs of some heads for checked rows, from one kernel block.

        Parameters
        ----------
        names : collection of str
            The heads.
        Z : ndarray or csr_array of shape (n, d), finite, float64, or of the model's dtype
        rows : int, optional
            Rows of a tile; by default `choose_tile_rows`, or all where weights are read from a store, which is then
            read once.
        diagonal : ndarray of shape (n,), optional
            k(z, z), where the kernel does not know it.

        Returns
        -------
        dict of str to ndarray of shape (n, width), of the model's dtype, or codes of classes, int64
            Not finite, or no code, in a row that overflows the kernel.
        """
        model, n = self.model, Z.shape[0]
        heads = {name: model.head(name) for name in names}
        out = {name: np.empty((n, head.width), head.dtype) for name, head in heads.items()}
        rows = max(1, _even(n, rows or self._tile_rows(heads.values(), n)))
        with (
            np.errstate(over="ignore", invalid="ignore"),  # `compute_finite_scores` tells
            _values.borrow(rows, model.landmarks.shape[0], model.dtype) as buffer,
        ):
            for tile in row_slices(n, rows):
                values = self.values(Z[tile], buffer[: tile.stop - tile.start])
                known = cache(partial(self._diagonal, Z, tile, diagonal))
                for together in _sharing(heads):
                    _project(values, [(heads[name], out[name][tile]) for name in together], known)
                del values  # where it is not the buffer, let it go before the next one is made
        return out

    def values(self, Z: Rows, out: Array | None = None) -> Array:
        """Return the kernel's values k(Z, landmarks) (n, N) of rows, in the model's dtype."""
        return self.block(self.model.rows(Z), out)

    def image(self, name: str, values: Array) -> Array:
        """Return what a head makes of kernel values (n, N), a linear map of them: without its offset and link."""
        head = replace(self.model.head(name), offset=None, link=links.IDENTITY)
        out = np.empty((len(values), head.width), self.model.dtype)
        _project(values.astype(self.model.dtype, copy=False), [(head, out)], _no_diagonal)
        return out

    def _tile_rows(self, heads: Collection[Head], n: int) -> int:
        if any(isinstance(head.weights, StoredWeights) for head in heads):
            return n
        X = self.model.landmarks
        wide = max(max(head.columns, head.width) for head in heads)
        return choose_tile_rows(
            X.shape[0], X.shape[1] if isinstance(X, np.ndarray) else 0, wide, self.model.dtype.itemsize
        )

    def _diagonal(self, Z: Rows, tile: slice, known: Array | None) -> Array:
        return self.model.kernel.evaluate_diagonal(as_float64(Z[tile])) if known is None else known[tile]


def prepare_scorer(model: Model) -> Scorer:
    """Prepare the landmarks once for any number of rows."""
    return Scorer(model, model.kernel.make_evaluator(model.landmarks))


def prepare_compact_scorer(model: Model) -> Scorer:
    """Prepare a model that is only to score: without its idle landmarks."""
    return prepare_scorer(drop_idle_landmarks(model))


def drop_idle_landmarks(model: Model) -> Model:
    """Return the model without the landmarks whose weights are all zero, where these are a quarter of all or more."""
    heads = model.heads
    # A rotation maps back to all landmarks, and a triangle has no row without weights.
    if any(h.triangular or h.rotation is not None or isinstance(h.weights, StoredWeights) for h in heads.values()):
        return model
    used: npt.NDArray[np.bool_] = np.zeros(model.landmarks.shape[0], np.bool_)
    for weights in {id(head.weights): head.weights for head in heads.values()}.values():
        used |= weights.any(axis=1)
    used[0] |= not used.any()  # a model needs one
    if 4 * int(used.sum()) > 3 * len(used):
        return model  # the others are copied
    kept = {id(head.weights): head.weights[used] for head in heads.values()}
    fewer = {name: replace(head, weights=kept[id(head.weights)]) for name, head in heads.items()}
    return replace(model, landmarks=model.landmarks[np.flatnonzero(used)], heads=fewer)


def _even(n: int, rows: int) -> int:
    """Return the rows of as many tiles of one size as tiles of at most `rows` rows would be."""
    return count_tiles(n, count_tiles(n, rows)) if n else 0


_values = ThreadBuffer()


def _sharing(heads: dict[str, Head]) -> list[list[str]]:
    """Return names of heads, those together that have the same weights."""
    groups: dict[int, list[str]] = {}
    for name, head in heads.items():
        groups.setdefault(id(head.weights), []).append(name)
    return list(groups.values())


def _project(values: Array, heads: list[tuple[Head, Array]], diagonal: links.Diagonal) -> None:
    """Fill the outputs of heads that have the same weights, from one product with them."""
    (first, target), alone = heads[0], len(heads) == 1
    columns = max(head.columns for head, _ in heads)
    direct = alone and first.rotation is None and first.link == links.IDENTITY
    product = target if direct else np.empty((len(values), columns), values.dtype)
    in_place = first.triangular and not isinstance(first.weights, StoredWeights)
    for part, W in _panels(first, columns):
        if in_place:
            np.copyto(product, values)
            triangular_matmul(product, W)
        else:
            skinny_matmul(values[:, : len(W)], W, product[:, part])
        for head, out in heads:
            if head.rotation is not None:
                _rotate(product[:, part], head, head.rotation[part], part, W, out)
    for head, out in heads:
        if head.rotation is not None and columns == 0:
            out[...] = 0.0
        elif head.rotation is None:
            _finish(product if direct else product[:, : head.columns], head, diagonal, out)


def _panels(head: Head, columns: int) -> Iterator[tuple[slice, Array]]:
    """Return the weights: those of a store some columns at a time, without the rows below a triangle."""
    W = head.weights
    if not isinstance(W, StoredWeights):
        return iter([(slice(0, columns), W[:, :columns])] if columns else [])
    parts = list(row_slices(columns, W.panel))
    reads = [partial(W.__getitem__, (slice(part.stop if head.triangular else None), part)) for part in parts]
    return zip(parts, prefetch(reads), strict=True)


def _rotate(product: Array, head: Head, rotation: Array, part: slice, W: Array, out: Array) -> None:
    """Add to an output what some of the columns map back to, ``((k(Z, X) W - b) s) W'``."""
    turned = product - (0.0 if head.offset is None else head.offset[part])
    turned *= rotation
    if part.start == 0:
        np.matmul(turned, W.T, out=out)
        return
    from scipy.linalg import get_blas_funcs

    (add,) = get_blas_funcs(("gemm",), (turned,))
    add(1.0, W, turned.T, 1.0, out.T, overwrite_c=1)


def _finish(product: Array, head: Head, diagonal: links.Diagonal, out: Array) -> None:
    """Fill an output with what a head makes of its product, which may be the output itself."""
    if head.offset is not None:
        product = np.subtract(product, head.offset, out=out if head.link == links.IDENTITY else None)
    result = links.link_by_name(head.link)(product, diagonal)
    if result is not out:
        out[...] = result


def _no_diagonal() -> Array:
    raise AssertionError("no link, no diagonal")


def kernel_distances(kernel: Kernel, X: Rows, Y: Rows) -> Array:
    """Return ``sqrt(k(x, x) + k(y, y) - 2 k(x, y))`` of all pairs of float64 rows, (n, m); of X with itself 0."""
    if X.shape[1] != Y.shape[1]:
        raise InvalidInputError(f"X has {X.shape[1]} columns and Y has {Y.shape[1]}; a kernel compares equals.")
    squares, values = np.empty((X.shape[0], Y.shape[0])), kernel.make_evaluator(Y)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        left, right = kernel.evaluate_diagonal(X), kernel.evaluate_diagonal(Y)
        for tile in row_slices(len(left), choose_tile_rows(len(right))):
            np.multiply(values(X[tile]), -2.0, out=squares[tile])
            squares[tile] += left[tile, np.newaxis]
            squares[tile] += right
    np.maximum(squares, 0.0, out=squares)  # what rounding leaves of nothing may be negative
    if X is Y:
        np.fill_diagonal(squares, 0.0)
    if not np.isfinite(squares).all():
        raise KernelError(f"{kernel!r} overflows between a row of X and one of Y.")
    return np.sqrt(squares, out=squares)


def compute_finite_scores(
    score: Scorer, name: str, Z: Rows, what: str, first_row: int = 0, diagonal: Array | None = None
) -> Array:
    """Return the output of one head, or raise with the number of the first row that overflows the kernel."""
    scores = score(name, Z, diagonal=diagonal)
    valid = links.valid_rows(scores)
    if not valid.all():
        row = first_row + int(valid.argmin())
        raise KernelError(f"Row {row} of {what} overflows {score.model.kernel!r}: its {name} are not finite.")
    return scores
