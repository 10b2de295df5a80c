"""Run `dkfm fit`: build an estimator from the options, read rows and labels, fit, and save the model."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
import numpy as np
import numpy.typing as npt

from dkfm.cli import option_parsing as arguments
from dkfm.errors import InvalidInputError
from dkfm.estimators import ExactFeatureMap, KernelEstimator, KernelFisher, KernelPCA, load
from dkfm.estimators.fitting import streamed
from dkfm.estimators.planning.fit_plan import plan_fit
from dkfm.estimators.planning.plan_report import FitPlan
from dkfm.execution import memory
from dkfm.execution.stage_log import log_stage
from dkfm.files import change_detection
from dkfm.files.local import local_path
from dkfm.files.location import locate, require_disjoint, require_not_inside
from dkfm.gram.checkpoints import removing_states_at_end
from dkfm.gram.streamed_rows import SourceRows
from dkfm.kernels import serialization
from dkfm.kernels.base import Kernel
from dkfm.kernels.parameters import MEDIAN
from dkfm.sources.base import NamedColumns, Source
from dkfm.sources.opening import open_source
from dkfm.storage import model_transfer

if TYPE_CHECKING:
    from dkfm.core.rows import Array

_FEATURE_OPTIONS = "basis", "centered", "landmarks", "n_landmarks", "certify", "tol", "random_state"
"""Options of the method features alone."""

_FISHER_OPTIONS = "labels", "label_column", "shrinkage"
"""Options of the method fisher alone."""

_PCA_OPTIONS = ("standardize",)
"""Options of the method pca alone."""

_COMMON_OPTIONS = "tile_rows", "workspace", "dtype", "progress"
"""Options that are parameters of every estimator."""

_MAP_OPTIONS = "kernel", "param", "on_indefinite", "tile_rows", "workspace", *_PCA_OPTIONS
"""Options that fits in the features of a map do not have."""


@dataclass(frozen=True)
class FitOptions:
    """Options of `dkfm fit`; see its help."""

    method: str
    basis: str | None
    centered: bool
    landmarks: str | None
    n_landmarks: int | None
    certify: str | None
    tol: float | None
    dtype: str
    kernel: str | None
    param: tuple[str, ...]
    map_path: str | None
    on_indefinite: str | None
    components: int | float | None
    labels: str | None
    label_column: str | None
    shrinkage: float | str | None
    tile_rows: int | None
    columns: str | None
    id_column: str | None
    workspace: str | None
    progress: bool
    standardize: bool
    random_state: int | None
    overwrite: bool

    def select_given(self, names: tuple[str, ...]) -> dict[str, object]:
        """Return those of the named options that the user gave."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if not (value is None or value is False or value == ())}

    def require_consistent(self) -> None:
        """Raise a usage error if options contradict each other."""
        methods = {"features": _FEATURE_OPTIONS, "pca": _PCA_OPTIONS, "fisher": _FISHER_OPTIONS}
        for method, names in methods.items():
            if self.method != method and (wrong := self.select_given(names)):
                raise click.UsageError(f"--{next(iter(wrong)).replace('_', '-')} belongs to --method {method}.")
        if (self.kernel is None) == (self.map_path is None):
            raise click.UsageError("dkfm fit takes --kernel, or --map of a pca or of fisher; one of them.")
        if self.map_path is not None and (wrong := self.select_given(_MAP_OPTIONS)):
            raise click.UsageError(f"--{next(iter(wrong)).replace('_', '-')} does not go with --map.")
        if self.map_path is not None and self.method == "features":
            raise click.UsageError("--map belongs to --method pca and --method fisher.")
        if self.method == "features" and self.components is not None:
            raise click.UsageError("--components belongs to --method pca and --method fisher.")
        if self.method == "fisher" and (self.labels is None) == (self.label_column is None):
            raise click.UsageError("--method fisher takes --labels, or --label-column of a table; one of them.")


def run_plan(train: str, options: FitOptions, connection: AbstractContextManager[object]) -> FitPlan:
    """Return the plan of a fit; the context `connection` is entered for it."""
    options.require_consistent()
    if options.map_path is not None:
        raise click.UsageError("--dry-run has no plan of --map: the rows are read once, in tiles.")
    estimator = _build_estimator(_load_kernel(options), options)
    names = arguments.parse_list(options.columns)
    table = open_source(train, columns=names, id_column=options.id_column)
    with connection:
        if options.label_column is None:
            return plan_fit(estimator, train, columns=names, id_column=options.id_column)
        return plan_fit(estimator, (table.shape[0], table.mean_values_per_row - 1))


def _load_kernel(options: FitOptions) -> Kernel:
    """Return the kernel of the options; raise now if the model could not be saved after hours of work."""
    kernel = arguments.parse_kernel(str(options.kernel), options.param)
    if repr(MEDIAN) in repr(kernel) and not any(MEDIAN in given for given in (str(options.kernel), *options.param)):
        log_stage("kernel", f"{kernel!r}: no width is given, so it is the median distance between the training rows")
    serialization.to_config(kernel)
    return kernel


def run_fit(train: str, model: str, options: FitOptions, connection: AbstractContextManager[object]) -> KernelEstimator:
    """Fit an estimator to the rows of a source and save it; the context `connection` is entered for the fit."""
    options.require_consistent()
    if options.map_path is not None:
        return _fit_in_map(train, model, options, options.map_path, connection)
    with removing_states_at_end():  # a command that is killed while it saves the model goes on, too
        return _fit_and_save(train, model, options, connection)


def _fit_and_save(
    train: str, model: str, options: FitOptions, connection: AbstractContextManager[object]
) -> KernelEstimator:
    """Fit an estimator with a kernel of its own, and save it."""
    kernel = _load_kernel(options)
    estimator = _build_estimator(kernel, options)
    model_transfer.require_writable_location(model, overwrite=options.overwrite)
    table = open_source(train, columns=arguments.parse_list(options.columns), id_column=options.id_column)
    inputs = [table.location, None if options.labels is None else Path(options.labels)]
    require_disjoint(locate(model), "model", inputs)
    if options.workspace is not None:
        require_not_inside(local_path(options.workspace).absolute(), "workspace", inputs)
    with change_detection.watch(table) as watch:
        source, labels = _split_labels(table, train, options)
        if options.method == "features" and options.basis != "cholesky" and options.landmarks is None:
            memory.require_driver_memory(
                source.shape[0], source.mean_values_per_row, kernel.peak_blocks, kernel.landmark_copies
            )
        streams = streamed.streams_rows(estimator, kernel)
        rows = SourceRows(source) if streams else source.read(slice(0, source.shape[0]))
        if streams:  # the rows must not change before the end of the fit
            with connection:
                estimator.fit(rows)
        watch.require_same("read", "fit again")
    if not streams:
        with connection:
            estimator.fit(rows, labels, **options.select_given(_PCA_OPTIONS))
    if isinstance(source, NamedColumns):
        estimator.feature_names_in_ = np.asarray(source.columns, dtype=object)
    estimator.save(model, overwrite=options.overwrite)
    return estimator


def _fit_in_map(
    train: str, model: str, options: FitOptions, map_path: str, connection: AbstractContextManager[object]
) -> KernelEstimator:
    """Fit components or discriminants in the features of a stored map, to all rows of a source, and save them."""
    feature_map = load(map_path)
    if not isinstance(feature_map, ExactFeatureMap):
        raise InvalidInputError(f"--map takes a feature map, and {map_path} is a {type(feature_map).__name__}.")
    if options.shrinkage == "auto":
        raise click.UsageError("--shrinkage auto needs a Gram matrix, and --map has none; give a number.")
    model_transfer.require_writable_location(model, overwrite=options.overwrite)
    fitted_columns = list(getattr(feature_map, "feature_names_in_", [])) or None
    columns = arguments.parse_list(options.columns)
    table = open_source(train, columns=columns, id_column=options.id_column)
    inputs = [table.location, Path(map_path), None if options.labels is None else Path(options.labels)]
    require_disjoint(locate(model), "model", inputs)
    source, labels = _split_labels(table, train, options)
    if columns is None and fitted_columns is not None and isinstance(source, NamedColumns):
        source = open_source(train, columns=fitted_columns, id_column=options.id_column)
    estimator: KernelEstimator
    with change_detection.watch(source) as watch, connection:
        rows, count = SourceRows(source), options.components
        if options.method == "pca":
            estimator = KernelPCA.from_map(feature_map, count, rows)
        else:
            shrinkage = 1e-3 if options.shrinkage is None else float(options.shrinkage)
            estimator = KernelFisher.from_map(
                feature_map, labels, rows, n_components=cast("int | None", count), shrinkage=shrinkage
            )
        watch.require_same("read", "fit again")
    estimator.save(model, overwrite=options.overwrite)
    return estimator


def _build_estimator(kernel: Kernel, options: FitOptions) -> KernelEstimator:
    shared = {name: getattr(options, name) for name in _COMMON_OPTIONS} | options.select_given(("on_indefinite",))
    if options.method == "features":
        return ExactFeatureMap(kernel).set_params(**options.select_given(_FEATURE_OPTIONS), **shared)
    if options.method == "pca":
        return KernelPCA(options.components, kernel=kernel).set_params(**shared)
    shrinkage = {} if options.shrinkage is None else {"shrinkage": options.shrinkage}
    return KernelFisher(cast("int | None", options.components), kernel=kernel).set_params(**shrinkage, **shared)


def _split_labels(source: Source, train: str, options: FitOptions) -> "tuple[Source, npt.NDArray[np.generic] | None]":
    """Return the source without the label column, and the labels if there are any."""
    ids, label = options.id_column, options.label_column
    if label is None:
        return source, None if options.labels is None else arguments.read_labels(options.labels, "--labels")
    if not isinstance(source, NamedColumns):
        raise InvalidInputError(f"--label-column names a column of a table, and {train} is none; use --labels.")
    label_source = open_source(train, columns=[label], id_column=ids)
    values = cast("Array", label_source.read(slice(0, label_source.shape[0])))[:, 0]
    are_integers = bool((values == np.rint(values)).all())
    others = [name for name in source.columns if name != label]
    return open_source(train, columns=others, id_column=ids), values.astype(np.int64) if are_integers else values
