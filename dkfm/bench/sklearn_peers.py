"""Run scikit-learn estimators on a Dask cluster: `transform` the rows of a Zarr array into another, in blocks."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from dkfm.core.rows import Array
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.kernels.base import Kernel
from dkfm.numerics.certificates.certificate import sample_evenly
from dkfm.storage import zarr_store

if TYPE_CHECKING:
    from distributed import Client, Future
    from sklearn.decomposition import KernelPCA
    from sklearn.kernel_approximation import Nystroem


class Transformer(Protocol):
    """Estimator with `fit` and `transform`."""

    def fit(self, X: Array) -> Self:
        """Fit to training rows."""

    def transform(self, X: Array) -> Array:
        """Transform rows."""


def make_sklearn_kernel_pca(gamma: float, q: int, solver: str, kernel: str = "rbf") -> "KernelPCA":
    """Return an unfitted KernelPCA of scikit-learn, by default with the Gaussian kernel ``exp(-gamma |x - y|^2)``."""
    from sklearn.decomposition import KernelPCA

    return KernelPCA(q, kernel=kernel, gamma=gamma, eigen_solver=solver, random_state=0)


def make_sklearn_nystroem(gamma: float, n: int) -> "Nystroem":
    """Return an unfitted Nystroem map of scikit-learn with n landmarks and the same Gaussian kernel."""
    from sklearn.kernel_approximation import Nystroem

    return Nystroem(kernel="rbf", gamma=gamma, n_components=n, random_state=0)


class LaplacianKernelPCA:
    """scikit-learn's KernelPCA of a precomputed Laplacian kernel, which it does not accept by name."""

    def __init__(self, gamma: float, q: int) -> None:
        self._gamma, self._components = gamma, make_sklearn_kernel_pca(gamma, q, "arpack", "precomputed")

    def fit(self, X: Array) -> Self:
        """Fit to training rows."""
        from sklearn.metrics.pairwise import laplacian_kernel

        self._landmarks = X
        self._components.fit(laplacian_kernel(X, gamma=self._gamma))
        return self

    def transform(self, X: Array) -> Array:
        """Transform rows."""
        from sklearn.metrics.pairwise import laplacian_kernel

        scores: Array = self._components.transform(laplacian_kernel(X, self._landmarks, gamma=self._gamma))
        return scores


@dataclass(frozen=True)
class ScatteredPeer:
    """A fitted estimator that is scattered to the workers once, so that tasks do not carry it."""

    client: "Client"
    estimator: "Future[Transformer]"
    width: int

    @classmethod
    def scatter(cls, client: "Client", fitted: Transformer, width: int) -> "ScatteredPeer":
        """Scatter a fitted estimator, whose outputs have `width` columns, to all workers."""
        return cls(client, client.scatter(fitted, broadcast=True, hash=False), width)

    def score(self, source: Path, destination: Path, chunk_rows: int) -> None:
        """Transform the rows of a Zarr array into the array `scores` of a new group, `chunk_rows` rows a task."""
        import dask.array as da
        import zarr

        rows = da.from_zarr(zarr.open_array(source, mode="r"), chunks=(chunk_rows, -1))
        chunks = (rows.chunks[0], (self.width,))
        scores = rows.map_blocks(_transform, self.estimator, dtype=np.float64, chunks=chunks, meta=np.empty((0, 0)))
        group = zarr.create_group(destination, zarr_format=3)
        out = zarr_store.add_array(group, "scores", scores.shape, scores.chunksize)
        stored = da.store(scores, out, lock=False, compute=False)  # type: ignore[arg-type]  # any object with slice assignment works
        self.client.compute(stored, sync=True)


def _transform(rows: Array, estimator: Transformer) -> Array:
    with single_blas_thread():
        return estimator.transform(rows)


def measure_kernel_error(estimator: Transformer, kernel: Kernel, X: Array, dtype: str) -> float:
    """Fit the estimator to X as `dtype`; return ``max |<f(x), f(z)> - k(x, z)| / max |k|``, a certificate's error.

    The error is that of at most 512 rows, evenly spread: the rows that dkfm's certificate of the same points measures.
    """
    sample, rows = sample_evenly(len(X)), X.astype(dtype)
    F, K = estimator.fit(rows).transform(rows[sample]).astype(np.float64), kernel(X[sample], X[sample])
    return float(np.abs(F @ F.T - K).max() / np.abs(K).max())
