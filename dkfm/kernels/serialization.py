"""Convert kernels to JSON values and back, through a closed registry of names.

A user function is stored as its import path, and imported only if the reader trusts it.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

from dkfm.errors import InvalidInputError, KernelError, UntrustedError, find_similar_names, format_value, shorten
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
"""Kernels whose parameters are all numbers; the command line takes their names."""

_MEDIANS: dict[type[Kernel], dict[str, object]] = {
    Gaussian: {"sigma": MEDIAN},
    Laplacian: {"sigma": MEDIAN},
    **{kernel: {"length_scale": MEDIAN} for kernel in (Exponential, Matern, RationalQuadratic)},
}
"""Widths that a name of dkfm's has if they are not given: in other units 1, the default of the class, is of no use."""

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
"""Classes by their names in JSON."""

_ALIASES = {"additive_chi2": "additive_chi_squared", "chi2": "chi_squared", "poly": "polynomial", "rbf": "gaussian"}
"""Names that scikit-learn uses, with those of dkfm; error messages suggest the latter."""

_NAMES = {cls: name for name, cls in _REGISTRY.items()}
_MAX_DEPTH = 32
"""Most levels of nesting in a stored kernel."""

_MAX_PARTS = 1024
"""Most kernels and maps that a stored kernel is composed of."""

_MAX_TEXT = 1000
"""Most characters of a text in a stored kernel."""

_MAX_NUMBERS = 2**20
"""Most numbers in a list in a stored kernel."""


def to_config(kernel: Kernel) -> dict[str, object]:
    """Return the kernel as JSON values.

    Raises
    ------
    KernelError
        The kernel has a class of your own, or a function that another process could not import.

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
    """Return whether a kernel contains no function, whose code could change while its name stays the same."""
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
    """Return the kernel of a `to_config` dictionary; check all its parameters again.

    Parameters
    ----------
    config : mapping
        JSON values from `to_config`; they may come from an untrusted file.
    trusted : collection of str
        Functions, as ``module:function``, that may be imported and run.

    Raises
    ------
    KernelError
        A name or a parameter is unknown, or the kernel refuses the value of a parameter.
    UntrustedError
        A function is not trusted, or its source has changed.
    """
    require_small_config(config)
    kernel = _decode(config, trusted, _MAX_DEPTH)
    if not isinstance(kernel, Kernel):
        raise KernelError(f"A stored kernel must be one, and is {format_value(kernel, 50)}.")
    return kernel


def fill_in_median_widths(config: object) -> object:
    """Return JSON values of a kernel with the median for each width that they leave out, as `make_named_kernel` does.

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
    """Return the kernel of one of dkfm's names; a width that is not given is the median distance of the rows.

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
    """Return the kernel, or the kernel of the function f(X, Y), that a path ``module:name`` of the user imports."""
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
    """Return the class name of the kernel that the command line knows by a name; None if there is none.

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


def get_import_path(function: Callable[..., object]) -> str:
    """Return ``module:function``; raise a KernelError if another process could not import the function by that path.

    >>> from os.path import join
    >>> get_import_path(join)
    'posixpath:join'
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name:
        raise KernelError(f"{function!r} cannot be saved: only a function with a module and a name of its own can.")
    if module == "__main__" or "<" in name:
        raise KernelError(
            f"{name} of {module} cannot be saved, because no other process can import it; define it in a module, at "
            "the top level."
        )
    return f"{module}:{name}"


def describe_function(function: Callable[..., object]) -> dict[str, str]:
    """Return the JSON values of a function: its import path and the digest of its source."""
    path = get_import_path(function)
    if import_function(path) is not function:
        raise KernelError(f"{path} cannot be saved, because that name now means something else.")
    return {"function": path, "source": _digest_source(path, function)}


def validate_trusted_argument(trusted: object) -> tuple[str, ...]:
    """Return the user's argument ``trusted=`` as a tuple; raise unless it is a collection of names."""
    if isinstance(trusted, str) or not isinstance(trusted, Collection) or not all(isinstance(t, str) for t in trusted):
        raise InvalidInputError(f'trusted takes a list, as in trusted=["module:function"], and got {trusted!r:.100}.')
    return tuple(trusted)


def is_function_description(value: object) -> bool:
    """Return whether a stored value has the form that `describe_function` returns."""
    return isinstance(value, Mapping) and set(value) == {"function", "source"}


def require_small_config(config: object) -> None:
    """Raise a KernelError if stored values exceed the limits: a hostile file could exhaust time and memory."""
    parts, stack = 0, [config]
    while stack:
        value = stack.pop()
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise KernelError(f"A stored kernel has a text of {len(value)} characters, and may have {_MAX_TEXT}.")
        if isinstance(value, list) and len(value) > _MAX_NUMBERS:
            raise KernelError(f"A stored kernel has a list of {len(value)}, and may have {_MAX_NUMBERS}.")
        if isinstance(value, Mapping):
            parts += 1
            stack += [*value, *value.values()]
        elif isinstance(value, list):
            stack += [part for part in value if isinstance(part, str | list | Mapping)]
        if parts > _MAX_PARTS:
            raise KernelError(f"A stored kernel has more than {_MAX_PARTS} parts.")


def load_trusted_function(description: Mapping[str, object], trusted: Collection[str]) -> Callable[..., object]:
    """Import the function of a description, if the caller trusts it and its source is as it was when saved.

    Raises
    ------
    UntrustedError
        The function is not trusted, cannot be imported, or its source has changed.
    """
    path = str(description["function"])
    if path not in trusted:
        raise UntrustedError(
            f'This kernel is the function {path}, which is code; trusted=["{path}"] (on the command line, --trusted '
            f"{path}) imports and runs it."
        )
    try:
        function = import_function(path)
    except KernelError as error:
        raise UntrustedError(f"{error} Start where its module is, or name its folder in PYTHONPATH.") from None
    if _digest_source(path, function) != description["source"]:
        raise UntrustedError(
            f"The source of {path} is not what it was when the model was saved; restore it, or fit the model again."
        )
    return function


def import_function(path: str) -> Callable[..., object]:
    """Return the function of an import path, which runs its module: use it only for paths from the user."""
    module, _, name = path.partition(":")
    try:
        value: object = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except Exception as error:  # an import may raise anything
        raise KernelError(f"{path} cannot be imported here: {type(error).__name__}: {error}.") from error
    if not callable(value):
        raise KernelError(f"{path} is not a function.")
    return value


def _digest_source(path: str, function: Callable[..., object]) -> str:
    """Return the SHA-256 digest of a function's source; raise if the source is not that of the code in memory."""
    if not isinstance(function, FunctionType):
        raise KernelError(f"{path} has no source in Python, whose change would show; wrap it in a function of yours.")
    try:
        source = inspect.getsource(function)
        module_source = inspect.getsource(sys.modules[function.__module__])
        module_code = compile(module_source, function.__code__.co_filename, "exec", dont_inherit=True)
    except (OSError, TypeError, SyntaxError, KeyError) as error:
        raise KernelError(f"The source of {path} cannot be read: {error}.") from None
    if function.__code__.co_qualname != function.__qualname__ or function.__code__ not in _walk_code(module_code):
        raise KernelError(f"{path} is decorated, or its module was edited since it was imported; import it anew.")
    return hashlib.sha256(source.encode()).hexdigest()


def _walk_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects that a code object contains, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _walk_code(constant)
