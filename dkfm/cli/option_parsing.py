"""Define the options that commands share, and parse arguments: kernels, parameters, numbers, lists and labels."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dkfm.errors import InvalidInputError, extract_reason, shorten, warn_caller

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dkfm.kernels import Kernel
    from dkfm.sources.base import Source

_MAX_LOGGED = 20
"""Largest number of feature names in a log line."""

_ID_NAMES = "id", "ids", "index"
"""Names of columns that are probably ids, besides names that end with "_id"."""

SCHEDULER = click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Dask cluster to run on: host:port, tcp://host:port, tls://host:port, the path of a scheduler file, "
    "slurm:FILE (starts workers as Slurm jobs) or ssh:HOSTS (a file with host names). [threads of this process]",
)

REPORT = click.option(
    "--report", "page", metavar="PAGE", help="Write Dask's performance report of a job on a cluster to this HTML file."
)

PROGRESS = click.option(
    "--progress/--no-progress",
    default=True,
    show_default=True,
    help="Show progress on standard error: bars in a terminal, elsewhere a line every 30 seconds.",
)

TRUSTED = click.option(
    "--trusted", multiple=True, metavar="MODULE:FUNCTION", help="Function that may be imported and run as a kernel."
)

WAIT_FOR_WORKERS = click.option(
    "--wait-for-workers",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Seconds to wait for the first worker of a cluster. [30; ssh:HOSTS: 60; slurm:FILE: as set in the file]",
)


KERNEL_NAMES = (
    *("additive_chi_squared", "arc_cosine", "chi_squared", "constant", "cosine", "exponential", "gaussian"),
    *("histogram_intersection", "jensen_shannon", "laplacian", "linear", "matern", "negative_squared_distance"),
    *("periodic", "polynomial", "precomputed", "rational_quadratic", "sigmoid"),
)
"""Names of dkfm's kernels, listed here so that the kernels need not be imported."""

KERNEL_PARAMETERS = (
    *("coef0", "degree", "gamma", "length_scale", "nu", "offset", "order", "period", "scale", "sigma", "value"),
)
"""Parameters of kernels, including scikit-learn's, that are not options of `dkfm fit`."""

SCIKIT_LEARN_NAMES = ("additive_chi2", "chi2", "poly", "rbf")
"""Names that only scikit-learn has."""

KERNEL_HELP = (
    f"A name: {', '.join(KERNEL_NAMES)}, or scikit-learn's {', '.join(SCIKIT_LEARN_NAMES)}. Parameters follow in "
    "--param or after a colon, as in gaussian:sigma=5. Or module:function of your own f(X, Y) that returns a block of "
    "values; or JSON, as dkfm info prints the kernel of a model."
)


def complete_kernel_name(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of kernels that begin with a text, for completion by a shell.

    >>> complete_kernel_name(None, None, "ga")
    ['gaussian']
    """
    return [name for name in sorted((*KERNEL_NAMES, *SCIKIT_LEARN_NAMES)) if name.startswith(incomplete)]


def require_scheduler(scheduler: str | None, wait_for_workers: float | None) -> None:
    """Raise a usage error if `--wait-for-workers` is given without a scheduler."""
    if scheduler is None and wait_for_workers is not None:
        raise click.UsageError("--wait-for-workers belongs to --scheduler.")


def parse_parameters(values: tuple[str, ...]) -> dict[str, object]:
    """Return the parameters of a kernel from texts NAME=VALUE, as a dict."""
    parameters: dict[str, object] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (name and equals and text):
            raise click.UsageError(f"A parameter is written NAME=VALUE, and not {value!r}.")
        if name in parameters:
            raise click.UsageError(f"The parameter {name!r} of the kernel is given twice.")
        parts = [_parse_number_or_text(part) for part in text.strip("()[] ").split(",") if part.strip()]
        parameters[name] = parts[0] if len(parts) == 1 and "," not in text else tuple(parts)
    return parameters


def parse_kernel(spec: str, parameters: tuple[str, ...] = ()) -> "Kernel":
    """Return the kernel that a text specifies: a name with parameters after a colon, ``module:name``, or JSON.

    Parameters
    ----------
    spec : str
        Text that specifies the kernel.
    parameters : tuple of str
        Further parameters of a named kernel, as NAME=VALUE.

    Examples
    --------
    >>> parse_kernel("polynomial:degree=9,scale=1/784").degree
    9
    >>> parse_kernel("rbf", ("gamma=0.5",))
    Gaussian(sigma=1.0)
    >>> parse_kernel('{"name": "warped", "kernel": {"name": "linear"}, "h": {"name": "affine", "scale": 2}}')
    Linear().warp(Affine(scale=2.0, shift=0.0))
    """
    from dkfm.kernels import kernel_specs, serialization

    name, _, rest = spec.partition(":")
    is_json, is_path = spec.lstrip().startswith("{"), bool(rest) and "=" not in rest
    if parameters and (is_json or is_path):
        raise click.UsageError(f"--param belongs to the name of a kernel, and {spec!r:.50} is none.")
    if is_json:
        try:
            stored = json.loads(spec)
        except (ValueError, RecursionError) as error:
            raise click.UsageError(f"{shorten(repr(spec), 50)} is no kernel in JSON: {error}.") from None
        if "name" not in stored and isinstance(stored.get("kernel"), dict):
            raise click.UsageError('A kernel in JSON has a "name"; of what dkfm info prints, give the part "kernel".')
        return serialization.from_config(serialization.fill_in_median_widths(stored))
    if is_path:
        allow_user_imports(spec)
        return serialization.import_kernel(spec)
    if "(" in name:
        raise click.UsageError(
            f"--kernel takes a name, as gaussian:sigma=3, or JSON, and not {shorten(repr(spec), 50)}."
        )
    inline = tuple(re.split(r",(?=\s*\w+=)", rest)) if rest else ()
    return kernel_specs.from_name(name, parse_parameters((*inline, *parameters)))


def _parse_number_or_text(text: str) -> object:
    """Return a number, also for a fraction such as 1/784; return other texts unchanged, for the kernel to check."""
    try:
        numerator, slash, denominator = text.partition("/")
        if slash and float(denominator):
            return float(numerator) / float(denominator)
        return int(text) if text.strip().lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def parse_components(context: click.Context, parameter: click.Parameter, text: str | None) -> int | float | None:
    """Return a number of components, or a share of the variance below 1."""
    number = None if text is None else _parse_number_or_text(text)
    if number is None or (isinstance(number, int) and number >= 1) or (isinstance(number, float) and 0 < number < 1):
        return number
    raise click.BadParameter(f"{text} is no number of components, nor a share of variance below 1.")


def parse_shrinkage(context: click.Context, parameter: click.Parameter, text: str | None) -> float | str | None:
    """Return a shrinkage, or "auto"."""
    number = None if text is None else _parse_number_or_text(text)
    if number is None or number == "auto" or (isinstance(number, float | int) and 0 <= number <= sys.float_info.max):
        return number
    raise click.BadParameter(f'{text} is no number >= 0, nor "auto".')


def parse_alpha(context: click.Context, parameter: click.Parameter, text: str | None) -> float | str | None:
    """Return a penalty, or "loo"."""
    number = None if text is None else _parse_number_or_text(text)
    if number is None or number == "loo" or (isinstance(number, float | int) and number >= 0):
        return number
    raise click.BadParameter(f'{text} is no number >= 0, nor "loo".')


def parse_alphas(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[float, ...]:
    """Return comma-separated penalties; none if the option is not given."""
    numbers = []
    for part in parse_list(text) or []:
        number = _parse_number_or_text(part)
        if not isinstance(number, float | int) or not 0 < number <= sys.float_info.max:
            raise click.BadParameter(f"{part!r} is no number > 0.")
        numbers.append(float(number))
    return tuple(numbers)


def allow_user_imports(*functions: str) -> None:
    """Append the working directory to the import path if the user names any function as ``module:function``."""
    if any(":" in function for function in functions) and "" not in sys.path:
        sys.path.append("")


def parse_list(text: str | None) -> list[str] | None:
    """Return the comma-separated names in a text.

    >>> parse_list("a, b")
    ['a', 'b']
    """
    return None if text is None else [part.strip() for part in text.split(",")]


def require_one_choice_of_columns(columns: str | None, excluded: str | None) -> None:
    """Raise a usage error if both the features and the columns to exclude are named."""
    if columns is not None and excluded is not None:
        raise click.UsageError("--columns names the features, and --exclude-columns what is none; give one of them.")


def require_table(excluded: str | None, is_table: bool, path: str) -> None:
    """Raise an InvalidInputError if columns are excluded by name, but the file has no column names."""
    if excluded is not None and not is_table:
        raise InvalidInputError(f"--exclude-columns names columns of a table, and {path} is none.")


def log_features(source: "Source") -> None:
    """Log the names of the columns of a table that are features."""
    from dkfm.core.display.quantities import format_names
    from dkfm.execution.stage_log import log_stage
    from dkfm.sources.base import NamedColumns

    if isinstance(source, NamedColumns):
        log_stage("input", f"{format_names(source.columns, _MAX_LOGGED)} of {source.name}")


def require_no_features(columns: str | None, **others: Sequence[str | None]) -> None:
    """Raise a usage error if ``--columns`` has a column that another option names as labels, targets or ids."""
    for option, names in others.items():
        if shared := sorted({*names} & {*(parse_list(columns) or [])}, key=str):
            name = f"--{option.replace('_', '-')} {shared[0]}"
            raise click.UsageError(f"{name} is no feature; leave it out of --columns.")


def require_labels_file(path: str, option: str) -> None:
    """Raise an InvalidInputError if the file that an option names does not exist."""
    if not Path(path).exists():
        raise InvalidInputError(f"There is no {path}, which {option} names.")


def read_labels(path: str, option: str, rows: int) -> "npt.NDArray[np.generic]":
    """Return labels (n,), or for --targets (n,) or (n, q), of rows from a .npy file; pickled objects are not loaded."""
    from dkfm.sources import npy  # imports NumPy, which --help does not need

    what = "target" if option == "--targets" else "label"
    require_labels_file(path, option)
    try:
        labels = npy.load_npy(path, rows)
    except InvalidInputError as error:
        reason = extract_reason(error) + (" (words are saved with .astype(str))" if "objects" in str(error) else "")
        raise InvalidInputError(f"{option} takes a .npy file of one {what} a row: {reason}.") from None
    if labels.ndim not in ((1,) if what == "label" else (1, 2)):
        shapes = "(n,)" if what == "label" else "(n,) or (n, q)"
        raise InvalidInputError(f"{option} takes one {what} a row, of shape {shapes}, and {path} has {labels.shape}.")
    return labels


def warn_of_ids(features: list[str], id_column: str | None) -> None:
    """Warn if a feature has a name of ids, because distances between ids would dominate."""
    for name in features:
        if name.lower() in _ID_NAMES or name.lower().endswith("_id"):
            remedy = "" if id_column else f"give --id-column {name}, or "
            advice = f"if it identifies rows, {remedy}leave it out with --exclude-columns"
            warn_caller(f"The column {name!r} is a feature; {advice}.")
