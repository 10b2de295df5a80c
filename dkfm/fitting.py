"""What `dkfm fit` does: from its options to an estimator, its rows and its labels, and to a saved model."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import click
import numpy as np
import numpy.typing as npt

from dkfm import arguments, preflight, transfer
from dkfm.errors import InvalidInputError, reason
from dkfm.estimators import ExactFeatureMap, KernelEstimator, KernelFisher, KernelPCA
from dkfm.kernels import config
from dkfm.kernels.base import Kernel
from dkfm.sources import Named, Source, open_source

if TYPE_CHECKING:
    from dkfm.kernels.rows import Array

__all__ = ["Options", "fitted"]

_OF_FEATURES = "basis", "centered", "landmarks", "n_landmarks", "tol"
_OF_FISHER = "labels", "label_column", "shrinkage"
_SHARED = "tile_rows", "workspace", "on_indefinite", "dtype", "progress"


@dataclass(frozen=True)
class Options:
    """The options of `dkfm fit` of these names."""

    method: str
    basis: str | None
    centered: bool
    landmarks: str | None
    n_landmarks: int | None
    tol: float | None
    dtype: str
    kernel: str
    param: tuple[str, ...]
    on_indefinite: str
    components: int | float | None
    labels: str | None
    label_column: str | None
    shrinkage: float | str | None
    tile_rows: int | None
    columns: str | None
    id_column: str | None
    workspace: str | None
    progress: bool

    def given(self, names: tuple[str, ...]) -> dict[str, object]:
        """Return those of the options that were given, by name."""
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value is not None and value is not False}

    def require(self) -> None:
        """Raise a usage error where options do not belong together."""
        for method, names in (("features", _OF_FEATURES), ("fisher", _OF_FISHER)):
            if self.method != method and (wrong := self.given(names)):
                raise click.UsageError(f"--{next(iter(wrong)).replace('_', '-')} belongs to --method {method}.")
        if self.method == "features" and self.components is not None:
            raise click.UsageError("--components belongs to --method pca and --method fisher.")
        if self.method == "fisher" and (self.labels is None) == (self.label_column is None):
            raise click.UsageError("--method fisher takes --labels, or --label-column of a table; one of them.")


def fitted(train: str, model: str, options: Options, cluster: AbstractContextManager[object]) -> KernelEstimator:
    """Fit what the options say to the rows of a source, and save it; `cluster` is entered while it is fitted."""
    options.require()
    arguments.find_modules(options.kernel)
    chosen = config.by_name(options.kernel, arguments.parameters(options.param))
    config.to_config(chosen)  # what cannot be saved is told before hours of work
    estimator = _estimator(chosen, options)
    transfer.require_free(model)
    source, labels = _source(train, options)
    if options.method == "features" and options.basis != "cholesky" and options.landmarks is None:
        preflight.require_driver(source.shape[0], source.row_values, chosen.blocks, chosen.copies)
    with cluster:
        estimator.fit(source.read(slice(0, source.shape[0])), labels)
    if isinstance(source, Named):
        estimator.feature_names_in_ = np.asarray(source.columns, dtype=object)
    estimator.save(model)
    return estimator


def _estimator(kernel: Kernel, options: Options) -> KernelEstimator:
    shared = {name: getattr(options, name) for name in _SHARED}
    if options.method == "features":
        return ExactFeatureMap(kernel).set_params(**options.given(_OF_FEATURES), **shared)
    if options.method == "pca":
        return KernelPCA(options.components, kernel=kernel).set_params(**shared)
    shrinkage = {} if options.shrinkage is None else {"shrinkage": options.shrinkage}
    return KernelFisher(cast("int | None", options.components), kernel=kernel).set_params(**shrinkage, **shared)


def _source(train: str, options: Options) -> "tuple[Source, npt.NDArray[np.generic] | None]":
    """Open the rows, and read their labels where there are any."""
    columns, ids, label = arguments.listed(options.columns), options.id_column, options.label_column
    source = open_source(train, columns=columns, id_column=ids)
    if label is None:
        return source, None if options.labels is None else _read(options.labels)
    if not isinstance(source, Named):
        raise InvalidInputError(f"--label-column names a column of a table, and {train} is none; use --labels.")
    named = open_source(train, columns=[label], id_column=ids)
    values = cast("Array", named.read(slice(0, named.shape[0])))[:, 0]
    whole = bool((values == np.rint(values)).all())
    others = [name for name in source.columns if name != label]
    return open_source(train, columns=others, id_column=ids), values.astype(np.int64) if whole else values


def _read(path: str) -> npt.NDArray[np.generic]:
    try:
        found = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise InvalidInputError(f"There is no {path}, which --labels names.") from None
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--labels takes a .npy file of one label a row: {path}: {reason(error)}.") from None
    if not isinstance(found, np.ndarray):
        found.close()
        raise InvalidInputError(f"--labels takes a .npy file of one label a row, and {path} has several arrays.")
    if found.ndim != 1:
        raise InvalidInputError(f"--labels takes one label a row, of shape (N,), and {path} has {found.shape}.")
    labels: npt.NDArray[np.generic] = found
    return labels
