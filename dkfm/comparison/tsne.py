"""t-SNE of a feature space: an unmodified openTSNE (the extra `tsne`), given features."""

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array, as_rows
from dkfm.errors import InvalidInputError, MissingExtraError

_PERPLEXITY = 30.0
_LEAST = 5


@dataclass(frozen=True, eq=False)
class Embedding:
    """Places in the plane of training features (n, 2), and of test features (m, 2)."""

    train: Array
    test: Array


def require_opentsne() -> ModuleType:
    """Return openTSNE, or say how to install it."""
    try:
        import openTSNE
    except ImportError as error:
        raise MissingExtraError("t-SNE needs openTSNE; install it with pip install 'dkfm[tsne]'.") from error
    return openTSNE  # type: ignore[no-any-return]  # it has no types


def embed(train: npt.ArrayLike, test: npt.ArrayLike, *, random_state: int = 0) -> Embedding:
    """Learn a t-SNE embedding of training features and place test features with it.

    Parameters
    ----------
    train : array-like of shape (n, q)
        At least 5 rows, such as ``phi.transform(X)``. The perplexity is 30, or, if that is less, a third
        of the other rows.
    test : array-like of shape (m, q)
    random_state : int
        The same numbers on one machine: neighbours are exact, and one thread computes.

    Returns
    -------
    Embedding

    Raises
    ------
    InvalidInputError
        Features that are not rows of as many columns, or fewer than 5.
    MissingExtraError
        openTSNE is not installed.

    Notes
    -----
    Ghiasi-Shirazi and Qaraei, "An exact finite-dimensional explicit feature map for kernel functions", figures 1 and 2;
    Policar, Strazar and Zupan, "openTSNE: a modular Python library for t-SNE dimensionality reduction and embedding"
    (2024).

    openTSNE finds a width for each row by search. Where all neighbours are almost equally far, as around the large rows
    of the paper's k1, the search stops early, and more neighbours count than were asked for.

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
    rows, others = np.asarray(as_rows(train, "train")), np.asarray(as_rows(test, "test"))
    if len(rows) < _LEAST or rows.shape[1] != others.shape[1]:
        raise InvalidInputError(
            f"t-SNE takes at least {_LEAST} training features, and test features of as many columns; their shapes are "
            f"{rows.shape} and {others.shape}."
        )
    perplexity = min(_PERPLEXITY, (len(rows) - 1) / 3)
    learned = TSNE(
        perplexity=perplexity,
        neighbors="exact",
        negative_gradient_method="bh",
        n_jobs=1,
        random_state=random_state,
    ).fit(rows)
    placed = learned.transform(others, perplexity=min(5.0, perplexity))
    return Embedding(np.array(learned), np.array(placed))
