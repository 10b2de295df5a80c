"""Convert kernels to JSON values and back, through a closed registry of names.

A user function is stored as its import path, and imported only if the reader trusts it: see `core/trusted_functions`.
"""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any

from dkfm.core.trusted_functions import (
    describe_function,
    get_import_path,
    import_function,
    is_function_description,
    load_trusted_function,
)
from dkfm.errors import KernelError, find_similar_names, format_value, shorten
from dkfm.kernels.algebra import Constant, Product, Scaled, Sum
from dkfm.kernels.base import Kernel
from dkfm.kernels.custom import Function, Outer, Pairwise, Precomputed
from dkfm.kernels.dot_product import ArcCosine, Cosine, Linear, Polynomial, Sigmoid
from dkfm.kernels.functions_of_kernels import Exp, Normalized, Power, PowerSeries
from dkfm.kernels.histogram import AdditiveChiSquared, ChiSquared, HistogramIntersection, JensenShannon
from dkfm.kernels.parameters import MEDIAN
from dkfm.kernels.separable import Laplacian, Periodic
from dkfm.kernels.stationary import Exponential, Gaussian, Matern, NegativeSquaredDistance, RationalQuadratic
from dkfm.kernels.transformed import Affine, Columns, Standardize, Warped

_NUMERIC: dict[str, type[Kernel]] = {
    "additive_chi_squared": AdditiveChiSquared,
    "arc_cosine": ArcCosine,
    "chi_squared": ChiSquared,
    "constant": Constant,
    "cosine": Cosine,
    "exponential": Exponential,
    "gaussian": Gaussian,
    "histogram_intersection": HistogramIntersection,
    "jensen_shannon": JensenShannon,
    "laplacian": Laplacian,
    "linear": Linear,
    "matern": Matern,
    "negative_squared_distance": NegativeSquaredDistance,
    "periodic": Periodic,
    "polynomial": Polynomial,
    "precomputed": Precomputed,
    "rational_quadratic": RationalQuadratic,
    "sigmoid": Sigmoid,
}
"""Kernels whose parameters are all numbers, by the names that the command line accepts."""

_MEDIANS: dict[type[Kernel], dict[str, object]] = {
    Gaussian: {"sigma": MEDIAN},
    Laplacian: {"sigma": MEDIAN},
    **{kernel: {"length_scale": MEDIAN} for kernel in (Exponential, Matern, RationalQuadratic)},
}
"""Default widths of dkfm's names. The default of the classes, 1, is useless if the columns have other units."""

_REGISTRY: dict[str, type] = {
    **_NUMERIC,
    "affine": Affine,
    "columns": Columns,
    "exp": Exp,
    "function": Function,
    "normalized": Normalized,
    "outer": Outer,
    "pairwise": Pairwise,
    "power": Power,
    "power_series": PowerSeries,
    "product": Product,
    "scaled": Scaled,
    "standardize": Standardize,
    "sum": Sum,
    "warped": Warped,
}
"""Classes of kernels and maps by their names in JSON."""

_ALIASES = {"additive_chi2": "additive_chi_squared", "chi2": "chi_squared", "poly": "polynomial", "rbf": "gaussian"}
"""scikit-learn's names and dkfm's equivalents, which error messages suggest."""

_NAMES = {cls: name for name, cls in _REGISTRY.items()}
_MAX_DEPTH = 32
"""Largest depth of nesting of a stored kernel."""

_MAX_PARTS = 1024
"""Largest number of kernels and maps in a stored kernel."""

_MAX_TEXT = 1000
"""Largest number of characters of a text in a stored kernel."""

_MAX_NUMBERS = 2**20
"""Largest number of elements of a list in a stored kernel."""


def to_config(kernel: Kernel) -> dict[str, object]:
    """Return the kernel as JSON values.

    Raises
    ------
    KernelError
        The kernel has a user class, or a function that another process cannot import.

    Examples
    --------
    >>> from dkfm.kernels import Gaussian, serialization
    >>> serialization.to_config(Gaussian(5.0))
    {'name': 'gaussian', 'sigma': 5.0}
    """
    if type(kernel) not in _NAMES:
        raise KernelError(
            f"{kernel!r} cannot be written to a store: only the kernels of dkfm.kernels can; wrap a function of blocks "
            "in Function."
        )
    stored = _encode(kernel, _MAX_DEPTH)
    require_small_config(stored)
    return stored  # type: ignore[return-value]  # a kernel is encoded as a dict


def _encode(value: object, depth: int) -> object:
    if depth == 0:
        raise KernelError(f"A kernel nested deeper than {_MAX_DEPTH} cannot be written to a store.")
    if type(value) in _NAMES:
        parameters = {field.name: _encode(getattr(value, field.name), depth - 1) for field in fields(value)}  # type: ignore[arg-type]  # registered classes are dataclasses
        return {"name": _NAMES[type(value)], **parameters}
    if isinstance(value, Kernel):
        return to_config(value)
    if callable(value):
        return describe_function(value)
    return [_encode(part, depth - 1) for part in value] if isinstance(value, tuple) else value


def is_code_free(kernel: object) -> bool:
    """Return whether a kernel contains no user function; the code of one may change while its name stays the same."""
    if type(kernel) in _NAMES:
        return all(is_code_free(getattr(kernel, field.name)) for field in fields(kernel))  # type: ignore[arg-type]  # registered classes are dataclasses
    if isinstance(kernel, tuple):
        return all(map(is_code_free, kernel))
    return not isinstance(kernel, Kernel) and not callable(kernel)


def is_serializable(kernel: Kernel) -> bool:
    """Return whether `to_config` accepts a kernel."""
    try:
        to_config(kernel)
    except KernelError:
        return False
    return True


def function_paths(value: object) -> tuple[str, ...]:
    """Return the import paths of the user functions in a serializable kernel."""
    if type(value) in _NAMES:
        return function_paths(tuple(getattr(value, field.name) for field in fields(value)))  # type: ignore[arg-type]  # registered classes are dataclasses
    if isinstance(value, tuple):
        return tuple(path for part in value for path in function_paths(part))
    return (get_import_path(value),) if callable(value) else ()


def from_config(config: object, trusted: Collection[str] = ()) -> Kernel:
    """Return the kernel of a `to_config` dictionary; all parameters are checked again.

    Parameters
    ----------
    config : mapping
        JSON values from `to_config`; they may come from an untrusted file.
    trusted : collection of str
        Functions, as ``module:function``, that may be imported and run.

    Raises
    ------
    KernelError
        A name or a parameter is unknown, or the kernel does not accept the value of a parameter.
    UntrustedError
        A function is not trusted, or its source has changed.
    """
    require_small_config(config)
    kernel = _decode(config, trusted, _MAX_DEPTH)
    if not isinstance(kernel, Kernel):
        raise KernelError(f"A stored kernel must be one, and is {format_value(kernel, 50)}.")
    return kernel


def fill_in_median_widths(config: object) -> object:
    """Return JSON values of a kernel in which each missing width is "median", as in `make_named_kernel`.

    >>> fill_in_median_widths({"name": "exp", "kernel": {"name": "gaussian"}})
    {'name': 'exp', 'kernel': {'sigma': 'median', 'name': 'gaussian'}}
    """
    require_small_config(config)
    if isinstance(config, list):
        return [fill_in_median_widths(part) for part in config]
    if not isinstance(config, Mapping):
        return config
    cls = _REGISTRY.get(str(config.get("name")))
    return _MEDIANS.get(cls, {}) | {key: fill_in_median_widths(value) for key, value in config.items()}  # type: ignore[arg-type]  # only kernels have widths


def _decode(config: object, trusted: Collection[str], depth: int) -> object:
    if is_function_description(config):
        return load_trusted_function(config, trusted)  # type: ignore[arg-type]  # a mapping
    if not isinstance(config, Mapping) or "name" not in config or depth == 0:
        raise KernelError("A stored kernel must be a JSON object with a 'name', nested at most 32 deep.")
    cls = _lookup(config["name"], _REGISTRY)
    return _instantiate(cls, {key: _decode_value(v, trusted, depth - 1) for key, v in config.items() if key != "name"})


def _decode_value(value: object, trusted: Collection[str], levels_left: int) -> object:
    if isinstance(value, Mapping):
        return _decode(value, trusted, levels_left)
    if not isinstance(value, list):
        return value
    if levels_left == 0:
        raise KernelError(f"A stored kernel is nested deeper than {_MAX_DEPTH}.")
    return tuple(_decode_value(part, trusted, levels_left - 1) for part in value)


def make_named_kernel(name: str, parameters: Mapping[str, object]) -> Kernel:
    """Return the kernel of a dkfm name; the default width is the median distance of the rows.

    Examples
    --------
    >>> from dkfm.kernels import serialization
    >>> serialization.make_named_kernel("gaussian", {"sigma": 5.0})
    Gaussian(sigma=5.0)
    """
    cls = _lookup(name, _NUMERIC)
    kernel: Kernel = _instantiate(cls, _MEDIANS.get(cls, {}) | dict(parameters))
    return kernel


def import_kernel(path: str) -> Kernel:
    """Import ``module:name``, a kernel or a function f(X, Y) of the user, and return the kernel."""
    imported = import_function(path)
    return imported if isinstance(imported, Kernel) else Function(imported)


def list_named_kernels() -> list[str]:
    """Return dkfm's names of kernels whose parameters are numbers."""
    return list(_NUMERIC)


def find_parameters(name: str) -> list[str] | None:
    """Return the names of the parameters of a named kernel; None if dkfm has no such name.

    >>> find_parameters("laplacian"), find_parameters("rbf")
    (['sigma'], None)
    """
    return [field.name for field in fields(_NUMERIC[name])] if name in _NUMERIC else None  # type: ignore[arg-type]  # registered classes are dataclasses


def find_class_of_named_kernel(cli_name: str) -> str | None:
    """Return the class name of a kernel of the command line; None if there is no kernel of this name.

    >>> find_class_of_named_kernel("arc_cosine")
    'ArcCosine'
    """
    kernel_type = _NUMERIC.get(cli_name)
    return None if kernel_type is None else kernel_type.__name__


def _lookup(name: object, registry: Mapping[str, type]) -> type:
    if isinstance(name, str) and name in registry:
        return registry[name]
    translated = _ALIASES.get(str(name))
    near = find_similar_names(str(name)[:50], registry) if translated is None else [translated]
    hint = f"near it: {', '.join(near)}" if near else f"there are {', '.join(registry)}"
    raise KernelError(f"There is no kernel named {format_value(name, 50)}; {hint}.")


def _instantiate(cls: type, parameters: Mapping[str, object]) -> Any:
    known = {field.name: field.default is MISSING for field in fields(cls)}
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        has = f"has the parameter{'s' * (len(known) > 1)} {', '.join(known)}" if known else "has no parameters"
        raise KernelError(f"{cls.__name__} {has}, and got {shorten(', '.join(unknown))}.")
    missing = [name for name, required in known.items() if required and name not in parameters]
    if missing:
        raise KernelError(f"{cls.__name__} needs {', '.join(missing)}.")
    return cls(**parameters)


def require_small_config(config: object) -> None:
    """Raise a KernelError if stored values exceed the limits, because a hostile file could exhaust time and memory."""
    parts, stack = 0, [(config, 0)]
    while stack:
        value, depth = stack.pop()
        if depth > _MAX_DEPTH + 1:  # `_decode` checks the exact limit
            raise KernelError(f"A stored kernel is nested deeper than {_MAX_DEPTH}.")
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise KernelError(f"A stored kernel has a text of {len(value)} characters, and may have {_MAX_TEXT}.")
        if isinstance(value, list) and len(value) > _MAX_NUMBERS:
            raise KernelError(f"A stored kernel has a list of {len(value)}, and may have {_MAX_NUMBERS}.")
        if isinstance(value, Mapping):
            parts += 1
            stack += [(part, depth + 1) for part in (*value, *value.values())]
        elif isinstance(value, list):
            stack += [(part, depth + 1) for part in value if isinstance(part, str | list | Mapping)]
        if parts > _MAX_PARTS:
            raise KernelError(f"A stored kernel has more than {_MAX_PARTS} parts.")
