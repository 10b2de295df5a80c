"""Compute t-SNE of explicit features with openTSNE (the extra `tsne`)."""

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array, as_rows
from dkfm.errors import InvalidInputError, MissingExtraError

_MAX_PERPLEXITY = 30.0

MIN_ROWS = 5
"""Smallest number of training rows."""


@dataclass(frozen=True, eq=False)
class Embedding:
    """Coordinates in the plane of training features (n, 2) and of test features (m, 2)."""

    train: Array
    test: Array


def require_opentsne() -> ModuleType:
    """Return the module openTSNE; if it is missing, raise a MissingExtraError that says how to install it."""
    try:
        import openTSNE
    except ImportError as error:
        raise MissingExtraError("t-SNE needs openTSNE; install it with pip install 'dkfm[tsne]'.") from error
    return openTSNE  # type: ignore[no-any-return]  # openTSNE has no type hints


def embed(train: npt.ArrayLike, test: npt.ArrayLike, *, random_state: int = 0) -> Embedding:
    """Compute the t-SNE embedding of training features, and add test features to it.

    Parameters
    ----------
    train : array-like of shape (n, q)
        Features of at least 5 training rows, such as ``phi.transform(X)``. The perplexity is min(30, (n - 1) / 3).
    test : array-like of shape (m, q)
        Test features.
    random_state : int
        Seed. Results are reproducible on one machine, because neighbours are exact and one thread is used.

    Returns
    -------
    Embedding
        Coordinates of both in the plane.

    Raises
    ------
    InvalidInputError
        Training and test features differ in columns, or there are fewer than 5 training rows.
    MissingExtraError
        openTSNE is not installed.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, "An exact finite-dimensional explicit feature map for kernel functions", figures 1 and 2;
    Policar, Strazar and Zupan, "openTSNE: a modular Python library for t-SNE dimensionality reduction and embedding"
    (2024).

    openTSNE searches for the bandwidth of each row. The search stops early if all neighbours are almost equally far, as
    around rows of large norm with the paper's kernel k1. The effective perplexity then exceeds the requested one.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import ExactFeatureMap, tsne
    >>> from dkfm.kernels import Gaussian
    >>> rng = np.random.default_rng(0)
    >>> phi = ExactFeatureMap(Gaussian(2.0), basis="spectral").fit(rng.normal(size=(30, 3)))
    >>> found = tsne.embed(phi.transform(rng.normal(size=(30, 3))), phi.transform(rng.normal(size=(4, 3))))
    >>> found.train.shape, found.test.shape
    ((30, 2), (4, 2))
    """
    TSNE = require_opentsne().TSNE
    train_rows, test_rows = np.asarray(as_rows(train, "train")), np.asarray(as_rows(test, "test"))
    if len(train_rows) < MIN_ROWS or train_rows.shape[1] != test_rows.shape[1]:
        raise InvalidInputError(
            f"t-SNE takes at least {MIN_ROWS} training features, and test features of as many columns; their shapes "
            f"are {train_rows.shape} and {test_rows.shape}."
        )
    perplexity = min(_MAX_PERPLEXITY, (len(train_rows) - 1) / 3)
    embedding = TSNE(
        perplexity=perplexity,
        neighbors="exact",
        negative_gradient_method="bh",
        n_jobs=1,
        random_state=random_state,
    ).fit(train_rows)
    test_embedding = embedding.transform(test_rows, perplexity=min(5.0, perplexity))
    return Embedding(np.array(embedding), np.array(test_embedding))
