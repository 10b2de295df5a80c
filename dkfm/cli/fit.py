"""Run `dkfm fit`: build an estimator from the options, read rows and labels, fit, and save the model.

Options, kernel, input and output are checked before scikit-learn is imported, because the import takes seconds.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
import numpy as np
import numpy.typing as npt

from dkfm import estimators
from dkfm.cli import option_parsing as arguments
from dkfm.cli import process
from dkfm.errors import InvalidInputError
from dkfm.execution import memory
from dkfm.execution.stage_log import log_stage
from dkfm.files import change_detection
from dkfm.files.local import as_local_path
from dkfm.files.location import locate, require_disjoint, require_not_inside
from dkfm.gram.fit_checkpoints import keep_states_until_end
from dkfm.kernels import serialization
from dkfm.kernels.base import Kernel
from dkfm.kernels.parameters import MEDIAN
from dkfm.sources.base import NamedColumns, Source, read_evenly_spaced_rows, read_finite
from dkfm.sources.opening import open_source
from dkfm.storage import remote_stores

if TYPE_CHECKING:
    from dkfm.core.rows import Array, Rows
    from dkfm.estimators import ExactFeatureMap, KernelEstimator, KernelRidge
    from dkfm.estimators.kernel_ridge import RidgeEstimator
    from dkfm.estimators.planning.plan_report import FitPlan
    from dkfm.gram.streamed_rows import SourceRows

_FEATURE_OPTIONS = "basis", "centered", "landmarks", "n_landmarks", "certify", "tol", "build", "random_state"
"""Options of the method "features" only."""

_SAMPLED_ROWS = 4096
"""Rows from which a plan, or a message, takes the scales of columns."""

_LABEL_OPTIONS = "labels", "label_column"
_TARGET_OPTIONS = "targets", "target_columns"

_OPTIONS_OF = {
    ("features",): _FEATURE_OPTIONS,
    ("fisher",): ("shrinkage",),
    ("ridge",): (*_TARGET_OPTIONS, "alpha", "alphas"),
    ("fisher", "ridge"): (*_LABEL_OPTIONS, "solver"),
    ("pca", "fisher"): ("components",),
    ("pca", "fisher", "ridge"): ("map_path",),
}
"""Options that only some methods have."""

_COMMON_OPTIONS = "tile_rows", "workspace", "dtype", "progress"
"""Options that are parameters of every estimator."""

_MAP_OPTIONS = (
    *("kernel", "param", "on_indefinite", "tile_rows", "workspace", "solver", "standardize", "alphas"),
    "exclude_columns",  # the map determines which columns are features
)
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
    build: str | None
    dtype: str
    kernel: str | None
    param: tuple[str, ...]
    map_path: str | None
    on_indefinite: str | None
    components: int | float | None
    labels: str | None
    label_column: str | None
    targets: str | None
    target_columns: str | None
    alpha: float | str | None
    alphas: tuple[float, ...]
    solver: str | None
    shrinkage: float | str | None
    tile_rows: int | None
    columns: str | None
    exclude_columns: str | None
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
        for methods, names in _OPTIONS_OF.items():
            if self.method not in methods and (wrong := self.select_given(names)):
                belongs = " and ".join(f"--method {method}" for method in methods)
                raise click.UsageError(f"{_name_option(next(iter(wrong)))} belongs to {belongs}.")
        if (self.kernel is None) == (self.map_path is None):
            raise click.UsageError(
                "dkfm fit takes --kernel, as --kernel gaussian, or --map of a pca, fisher or ridge; one of them."
            )
        if self.map_path is not None and (wrong := self.select_given(_MAP_OPTIONS)):
            raise click.UsageError(f"{_name_option(next(iter(wrong)))} does not go with --map.")
        if self.map_path is not None and (self.shrinkage == "auto" or self.alpha == "loo"):
            chosen = "--shrinkage auto" if self.shrinkage == "auto" else "--alpha loo"
            raise click.UsageError(f"{chosen} needs a Gram matrix, and --map has none; give a number.")
        if self.alphas and self.alpha != "loo":
            raise click.UsageError("--alphas goes with --alpha loo, which selects one of them.")
        arguments.require_one_choice_of_columns(self.columns, self.exclude_columns)
        arguments.require_no_features(
            self.columns,
            id_column=[self.id_column],
            label_column=[self.label_column],
            target_columns=arguments.parse_list(self.target_columns) or [],
        )
        if self.method == "fisher" and len(self.select_given(_LABEL_OPTIONS)) != 1:
            raise click.UsageError("--method fisher takes --labels, or --label-column of a table; one of them.")
        if self.method == "ridge" and len(self.select_given((*_LABEL_OPTIONS, *_TARGET_OPTIONS))) != 1:
            raise click.UsageError(
                "--method ridge takes --targets, or --target-columns of a table, or the labels of a classifier with "
                "--labels or --label-column; one of them."
            )

    @property
    def y_columns(self) -> list[str]:
        """Columns of the table that are labels or targets, and not features."""
        return [self.label_column] if self.label_column else arguments.parse_list(self.target_columns) or []

    @property
    def excluded_columns(self) -> list[str]:
        """Columns of the table that are not features."""
        return [*self.y_columns, *(arguments.parse_list(self.exclude_columns) or [])]

    @property
    def y_path(self) -> str | None:
        """File of labels or targets."""
        return self.labels or self.targets

    @property
    def y_option(self) -> str:
        """Option that names the file of labels or targets."""
        return "--targets" if self.targets else "--labels"


def _name_option(field: str) -> str:
    return f"--{field.removesuffix('_path').replace('_', '-')}"


def make_fit_plan(train: str, model: str, options: FitOptions, connection: AbstractContextManager[object]) -> "FitPlan":
    """Return the plan of a fit; the context `connection` is entered for it."""
    options.require_consistent()
    kernel = _build_kernel(options) if options.map_path is None else None
    feature_map = None if options.map_path is None else _load_map(options, options.map_path)
    table, names = _open_table(train, model, options, feature_map), arguments.parse_list(options.columns)
    _require_labels(table, train, options)
    with process.disable_gc_during_imports():
        from dkfm.estimators.planning.fit_plan import plan_fit
        from dkfm.estimators.standardization import make_standardizing_kernel

    if kernel is None:
        kernel = cast("ExactFeatureMap", feature_map).kernel_
    else:
        _log_default_width(kernel, options)
    if options.standardize:  # a sample determines the scales well enough
        kernel = make_standardizing_kernel(kernel, read_evenly_spaced_rows(table, _SAMPLED_ROWS))[0]
    estimator = _build_estimator(kernel, options)
    if options.excluded_columns and (names is not None or not hasattr(feature_map, "feature_names_in_")):
        names = list(cast("NamedColumns", table).columns)
    with connection:
        return plan_fit(estimator, train, columns=names, id_column=options.id_column, feature_map=feature_map)


def _open_table(train: str, model: str, options: FitOptions, feature_map: "ExactFeatureMap | None" = None) -> Source:
    """Return the training rows, by default with the columns of the map; raise if the model cannot be written."""
    remote_stores.require_writable_location(model, overwrite=options.overwrite)
    table = open_source(
        train,
        columns=arguments.parse_list(options.columns),
        id_column=options.id_column,
        fitted_columns=list(getattr(feature_map, "feature_names_in_", [])) or None,
        excluded_columns=options.excluded_columns,
    )
    arguments.require_table(options.exclude_columns, isinstance(table, NamedColumns), train)
    if options.columns is None and options.map_path is None and isinstance(table, NamedColumns):
        arguments.warn_of_ids(list(table.columns), options.id_column)
    inputs = [table.location, *(Path(path) for path in (options.map_path, options.y_path) if path is not None)]
    require_disjoint(locate(model), "model", inputs)
    return table


def _require_labels(table: Source, train: str, options: FitOptions) -> None:
    """Raise unless the labels or targets that the options name exist, one for each row of a file."""
    if options.y_columns and options.label_column is None:  # a plan does not read the targets
        _require_table(table, train, options)
        _open_targets(train, options.y_columns)
    else:
        _split_labels(table, train, options)


def _build_kernel(options: FitOptions) -> Kernel:
    """Return the kernel of the options; raise before the fit if the model could not be saved."""
    kernel = arguments.parse_kernel(str(options.kernel), options.param)
    serialization.to_config(kernel)
    return kernel


def _log_default_width(kernel: Kernel, options: FitOptions) -> None:
    """Log the default width of a kernel, if the user gave none."""
    if repr(MEDIAN) in repr(kernel) and not any(MEDIAN in given for given in (str(options.kernel), *options.param)):
        log_stage("kernel", f"{kernel!r}: no width is given, so it is the median distance between the training rows")
    if "sigma=None" in repr(kernel):
        advice = "scikit-learn's default, gamma = 1 / columns; --param sigma=median takes the median distance"
        name = repr(kernel).replace("(sigma=None)", "")
        log_stage("kernel", f"{name}: no width is given, so it is {advice}")


def run_fit(
    train: str, model: str, options: FitOptions, connection: AbstractContextManager[object]
) -> "KernelEstimator":
    """Fit an estimator to the rows of a source and save it; the context `connection` is entered for the fit."""
    options.require_consistent()
    if options.map_path is not None:
        return _fit_in_map(train, model, options, options.map_path, connection)
    with keep_states_until_end():  # so that a command that is killed while it saves the model can resume
        return _fit_and_save(train, model, options, connection)


def _fit_and_save(
    train: str, model: str, options: FitOptions, connection: AbstractContextManager[object]
) -> "KernelEstimator":
    """Fit an estimator with a kernel of its own, and save it."""
    kernel = _build_kernel(options)
    table = _open_table(train, model, options)
    _log_default_width(kernel, options)
    if options.workspace is not None:
        labels_file = None if options.y_path is None else Path(options.y_path)
        require_not_inside(as_local_path(options.workspace).absolute(), "workspace", [table.location, labels_file])
    with change_detection.require_unchanged(table, "read", "fit again") as watch:
        source, labels = _split_labels(table, train, options)
        arguments.log_features(source)
        with process.disable_gc_during_imports():
            from dkfm.estimators.fitting import out_of_core_rows
            from dkfm.gram.streamed_rows import SourceRows

            estimator = _build_estimator(kernel, options)
        if options.method == "features" and options.basis != "cholesky" and options.landmarks is None:
            copies = kernel.landmark_copies + options.standardize  # one more copy for standardized landmarks
            memory.require_factorization_memory(source.shape[0], source.float64s_per_row, kernel.peak_blocks, copies)
        streams = out_of_core_rows.can_stream_rows(estimator, kernel)
        rows = SourceRows(source, watch) if streams else read_finite(source, slice(0, source.shape[0]))
        if not options.standardize:
            _log_unlike_scales(kernel, rows, source.columns if isinstance(source, NamedColumns) else None)
        if streams:  # the rows must not change before the end of the fit
            with connection:
                estimator.fit(rows, standardize=options.standardize)
    if not streams:
        with connection:
            estimator.fit(rows, labels, standardize=options.standardize)
    _name_targets(estimator, options)
    if isinstance(source, NamedColumns):
        estimator.feature_names_in_ = np.asarray(source.columns, dtype=object)
    estimator.save(model, overwrite=options.overwrite)
    return estimator


def _log_unlike_scales(kernel: Kernel, rows: "SourceRows | Rows", names: Sequence[str] | None) -> None:
    """Log that some columns vary far less than others, if the kernel treats all columns alike."""
    from dkfm.estimators import standardization
    from dkfm.gram.streamed_rows import SourceRows

    if not standardization.treats_columns_alike(kernel):
        return
    if isinstance(rows, SourceRows):
        sample = read_evenly_spaced_rows(rows.source, _SAMPLED_ROWS)
    else:
        sample = rows[:: max(1, rows.shape[0] // _SAMPLED_ROWS)]
    if (text := standardization.describe_unlike_scales(sample, names)) is not None:
        log_stage("input", text)


def _fit_in_map(
    train: str, model: str, options: FitOptions, map_path: str, connection: AbstractContextManager[object]
) -> "KernelEstimator":
    """Fit components, discriminants or a regression in the features of a stored map, and save the estimator."""
    with process.disable_gc_during_imports():
        from dkfm.gram.streamed_rows import SourceRows

        feature_map = _load_map(options, map_path)
    table = _open_table(train, model, options, feature_map)
    estimator: KernelEstimator
    with change_detection.require_unchanged(table, "read", "fit again"):
        source, labels = _split_labels(table, train, options)
        rows, count = SourceRows(source), options.components
        with connection:
            if options.method == "pca":
                estimator = estimators.KernelPCA.from_map(feature_map, count, rows)
            elif options.method == "ridge":
                alpha = 1.0 if options.alpha is None else float(options.alpha)
                estimator = _ridge_class(options).from_map(feature_map, labels, rows, alpha=alpha)
            else:
                shrinkage = 1e-3 if options.shrinkage is None else float(options.shrinkage)
                estimator = estimators.KernelFisher.from_map(
                    feature_map, labels, rows, n_components=cast("int | None", count), shrinkage=shrinkage
                )
    _name_targets(estimator, options)
    estimator.save(model, overwrite=options.overwrite)
    return estimator


def _name_targets(estimator: "KernelEstimator", options: FitOptions) -> None:
    """Store the names of the target columns in a regression."""
    if options.target_columns is not None:
        cast("KernelRidge", estimator).target_names_ = options.y_columns


def _load_map(options: FitOptions, path: str) -> "ExactFeatureMap":
    """Read the map of `--map`; raise a usage error for options that a fit in its features does not have."""
    if options.y_path is not None:  # before scikit-learn is imported
        arguments.require_labels_file(options.y_path, options.y_option)
    feature_map = estimators.load(path)
    if not isinstance(feature_map, estimators.ExactFeatureMap):
        raise InvalidInputError(f"--map takes a feature map, and {path} is a {type(feature_map).__name__}.")
    feature_map.progress = options.progress
    if shared := sorted({*options.y_columns} & {*getattr(feature_map, "feature_names_in_", ())}):
        raise InvalidInputError(f"The column {shared[0]!r} is a feature of the map, so it is no label and no target.")
    return feature_map


def _build_estimator(kernel: Kernel, options: FitOptions) -> "KernelEstimator":
    shared = {name: getattr(options, name) for name in _COMMON_OPTIONS} | options.select_given(("on_indefinite",))
    if options.method == "features":
        return estimators.ExactFeatureMap(kernel).set_params(**options.select_given(_FEATURE_OPTIONS), **shared)
    if options.method == "pca":
        return estimators.KernelPCA(options.components, kernel=kernel).set_params(**shared)
    given = options.select_given(("shrinkage", "solver", "alphas"))
    given |= {} if options.alpha is None else {"alpha": options.alpha}
    if options.method == "ridge":
        return _ridge_class(options)(kernel=kernel).set_params(**given, **shared)
    return estimators.KernelFisher(cast("int | None", options.components), kernel=kernel).set_params(**given, **shared)


def _ridge_class(options: FitOptions) -> "type[RidgeEstimator]":
    """Return the class of the regression, or of its classifier if labels are given."""
    return estimators.KernelRidgeClassifier if options.select_given(_LABEL_OPTIONS) else estimators.KernelRidge


def _split_labels(source: Source, train: str, options: FitOptions) -> "tuple[Source, npt.NDArray[np.generic] | None]":
    """Return the source without the columns of labels or targets, and the labels or targets if there are any."""
    if not options.y_columns:
        if options.y_path is None:
            return source, None
        return source, arguments.read_labels(options.y_path, options.y_option, source.shape[0])
    _require_table(source, train, options)
    if options.label_column is not None:
        return source, _read_label_column(source, options.label_column)
    targets = _open_targets(train, options.y_columns)
    values = cast("Array", read_finite(targets, slice(0, targets.shape[0])))
    return source, values if values.shape[1] > 1 else values[:, 0]


def _open_targets(train: str, columns: list[str]) -> Source:
    """Return the target columns as a source that errors call targets."""
    try:
        return open_source(train, columns=columns)
    except InvalidInputError as error:
        reason = str(error).partition(", and features are")[0].rstrip(".")
        raise InvalidInputError(f"--target-columns takes columns of numbers: {reason}.") from None


def _read_label_column(table: Source, name: str) -> "npt.NDArray[np.generic]":
    from dkfm.sources.label_column import read_label_column
    from dkfm.sources.parquet import ParquetSource

    return read_label_column(cast("ParquetSource", table), name)


def _require_table(source: Source, train: str, options: FitOptions) -> None:
    """Raise an InvalidInputError if labels or targets are named as columns of a file without names."""
    if not isinstance(source, NamedColumns):
        option, file = ("label-column", "labels") if options.label_column else ("target-columns", "targets")
        raise InvalidInputError(f"--{option} names a column of a table, and {train} is none; use --{file}.")
