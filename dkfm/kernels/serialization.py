"""Kernels to JSON and back, through a closed registry: a name that is not in it is refused.

A function of the user's is kept as its import path, and imported only where the reader says to trust it.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

from dkfm.errors import InvalidInputError, KernelError, UntrustedError, shortened, shown
from dkfm.kernels.algebra import Constant, Power, Product, Scaled, Sum
from dkfm.kernels.base import Kernel
from dkfm.kernels.custom import Function, Outer, Pairwise, Precomputed
from dkfm.kernels.dot_product import ArcCosine, Cosine, Linear, Polynomial, Sigmoid
from dkfm.kernels.histogram import AdditiveChiSquared, ChiSquared, HistogramIntersection, JensenShannon
from dkfm.kernels.separable import Laplacian, Periodic
from dkfm.kernels.series import Exp, Normalized, PowerSeries
from dkfm.kernels.stationary import Exponential, Gaussian, Matern, NegativeSquaredDistance, RationalQuadratic
from dkfm.kernels.transformed import Affine, Columns, Warped

_PLAIN: dict[str, type[Kernel]] = {
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
"""Made of numbers alone: these have a name on the command line."""

_REGISTRY: dict[str, type] = {
    **_PLAIN,
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
    "sum": Sum,
    "warped": Warped,
}
_OTHER_NAMES = {"additive_chi2": "additive_chi_squared", "chi2": "chi_squared", "poly": "polynomial", "rbf": "gaussian"}
"""What scikit-learn calls them."""
_NAMES = {kernel: name for name, kernel in _REGISTRY.items()}
_MAX_DEPTH = 32
"""A kernel nested deeper than this in a stored model is nobody's kernel."""


def to_config(kernel: Kernel) -> dict[str, object]:
    """Return the kernel as plain JSON values.

    Raises
    ------
    KernelError
        A class of your own, or a function that another process could not import.

    Examples
    --------
    >>> from dkfm.kernels import Gaussian, config
    >>> config.to_config(Gaussian(5.0))
    {'name': 'gaussian', 'sigma': 5.0}
    """
    if type(kernel) not in _NAMES:
        raise KernelError(
            f"{kernel!r} cannot be written to a store: only the kernels of dkfm.kernels can; wrap a function of blocks "
            "in Function."
        )
    stored = _encode(kernel, _MAX_DEPTH)
    require_small_config(stored)
    return stored  # type: ignore[return-value]  # what a kernel is encoded as


def _encode(value: object, depth: int) -> object:
    if depth == 0:
        raise KernelError(f"A kernel nested deeper than {_MAX_DEPTH} cannot be written to a store.")
    if type(value) in _NAMES:
        parameters = {field.name: _encode(getattr(value, field.name), depth - 1) for field in fields(value)}  # type: ignore[arg-type]  # the registry is of dataclasses
        return {"name": _NAMES[type(value)], **parameters}
    if isinstance(value, Kernel):
        return to_config(value)
    if callable(value):
        return describe_function(value)
    return [_encode(part, depth - 1) for part in value] if isinstance(value, tuple) else value


def is_code_free(kernel: object) -> bool:
    """Whether a kernel is told by its numbers: it holds no code, which may change under its name."""
    if type(kernel) in _NAMES:
        return all(is_code_free(getattr(kernel, field.name)) for field in fields(kernel))  # type: ignore[arg-type]  # the registry is of dataclasses
    if isinstance(kernel, tuple):
        return all(map(is_code_free, kernel))
    return not isinstance(kernel, Kernel) and not callable(kernel)


def is_serializable(kernel: Kernel) -> bool:
    """Whether `to_config` writes a kernel."""
    try:
        to_config(kernel)
    except KernelError:
        return False
    return True


def function_paths(value: object) -> tuple[str, ...]:
    """Return the import paths of the user's functions in a kernel that can be written."""
    if type(value) in _NAMES:
        return function_paths(tuple(getattr(value, field.name) for field in fields(value)))  # type: ignore[arg-type]  # the registry is of dataclasses
    if isinstance(value, tuple):
        return tuple(path for part in value for path in function_paths(part))
    return (import_path(value),) if callable(value) else ()


def from_config(config: object, trusted: Collection[str] = ()) -> Kernel:
    """Return the kernel of a `to_config` dictionary, every parameter checked anew.

    Parameters
    ----------
    config : mapping
    trusted : collection of str
        Functions, as ``module:function``, that may be imported and run.

    Raises
    ------
    KernelError
        An unknown name or parameter, or a parameter that the kernel refuses.
    UntrustedError
        A function that is not trusted, or has changed.
    """
    require_small_config(config)
    kernel = _decode(config, trusted, _MAX_DEPTH)
    if not isinstance(kernel, Kernel):
        raise KernelError(f"A stored kernel must be one, and is {shown(kernel, 50)}.")
    return kernel


def _decode(config: object, trusted: Collection[str], depth: int) -> object:
    if is_function_description(config):
        return load_trusted_function(config, trusted)  # type: ignore[arg-type]  # a mapping, as seen
    if not isinstance(config, Mapping) or "name" not in config or depth == 0:
        raise KernelError("A stored kernel must be a JSON object with a 'name', nested at most 32 deep.")
    made = _lookup(config["name"], _REGISTRY)
    return _build(made, {key: _decode_value(v, trusted, depth - 1) for key, v in config.items() if key != "name"})


def _decode_value(value: object, trusted: Collection[str], depth: int) -> object:
    if isinstance(value, Mapping):
        return _decode(value, trusted, depth)
    if not isinstance(value, list):
        return value
    if depth == 0:
        raise KernelError(f"A stored kernel is nested deeper than {_MAX_DEPTH}.")
    return tuple(_decode_value(part, trusted, depth - 1) for part in value)


def kernel_by_name(name: str, parameters: Mapping[str, object]) -> Kernel:
    """Return a kernel by its name, as the command line does; ``module:name`` is a function of blocks, or a kernel.

    Examples
    --------
    >>> from dkfm.kernels import config
    >>> config.by_name("gaussian", {"sigma": 5.0})
    Gaussian(sigma=5.0)
    """
    if ":" in name:
        if parameters:
            raise KernelError(f"The function {name} has no parameters that could be given here.")
        found = import_function(name)
        return found if isinstance(found, Kernel) else Function(found)
    kernel: Kernel = _build(_lookup(name, _PLAIN), parameters)
    return kernel


def kernel_class(name: str) -> str | None:
    """Return the class that has a name on the command line.

    >>> kernel_class("arc_cosine")
    'ArcCosine'
    """
    found = _PLAIN.get(name)
    return None if found is None else found.__name__


def _lookup(name: object, registry: Mapping[str, type]) -> type:
    if isinstance(name, str) and name in registry:
        return registry[name]
    other = _OTHER_NAMES.get(str(name))
    near = get_close_matches(str(name).lower(), _PLAIN) if other is None else [other]
    hint = f"near it: {', '.join(near)}" if near else f"there are {', '.join(_PLAIN)}"
    raise KernelError(f"There is no kernel named {shown(name, 50)}; {hint}.")


def _build(made: type, parameters: Mapping[str, object]) -> Any:
    known = {field.name: field.default is MISSING for field in fields(made)}
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        has = f"has the parameters {', '.join(known)}" if known else "has no parameters"
        raise KernelError(f"{made.__name__} {has}, and got {shortened(', '.join(unknown))}.")
    missing = [name for name, required in known.items() if required and name not in parameters]
    if missing:
        raise KernelError(f"{made.__name__} needs {', '.join(missing)}.")
    return made(**parameters)


def kernel_digest(kernel: Kernel) -> str:
    """Return a hexadecimal digest of the kernel's JSON: equal kernels, equal digests."""
    return hashlib.sha256(json.dumps(to_config(kernel), sort_keys=True).encode()).hexdigest()


_MAX_PARTS, _MAX_TEXT, _MAX_NUMBERS = 1024, 1000, 2**20
"""Of a kernel in a stored model: its kernels and maps, the characters of a text, and the numbers of a list. What has
more is nobody's kernel, and would take a reader's time and memory.
"""


def import_path(function: Callable[..., object]) -> str:
    """Return ``module:function``, or raise where no other process could import it by that.

    >>> from os.path import join
    >>> import_path(join)
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
    """Return what a store keeps of a function."""
    path = import_path(function)
    if import_function(path) is not function:
        raise KernelError(f"{path} cannot be saved, because that name now means something else.")
    return {"function": path, "source": _digest(path, function)}


def check_trusted(trusted: object) -> tuple[str, ...]:
    """Return what a user gave as ``trusted=``, a collection of names, or say that it is none."""
    if isinstance(trusted, str) or not isinstance(trusted, Collection) or not all(isinstance(t, str) for t in trusted):
        raise InvalidInputError(f'trusted takes a list, as in trusted=["module:function"], and got {trusted!r:.100}.')
    return tuple(trusted)


def is_function_description(value: object) -> bool:
    """Whether a stored value is what `describe_function` made."""
    return isinstance(value, Mapping) and set(value) == {"function", "source"}


def require_small_config(config: object) -> None:
    """Raise a KernelError where stored values are more or longer than those of any kernel."""
    parts, waiting = 0, [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise KernelError(f"A stored kernel has a text of {len(value)} characters, and may have {_MAX_TEXT}.")
        if isinstance(value, list) and len(value) > _MAX_NUMBERS:
            raise KernelError(f"A stored kernel has a list of {len(value)}, and may have {_MAX_NUMBERS}.")
        if isinstance(value, Mapping):
            parts += 1
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += [part for part in value if isinstance(part, str | list | Mapping)]
        if parts > _MAX_PARTS:
            raise KernelError(f"A stored kernel has more than {_MAX_PARTS} parts.")


def load_trusted_function(description: Mapping[str, object], trusted: Collection[str]) -> Callable[..., object]:
    """Return the function of a description, if the caller trusts it and its source is the one that was saved.

    Raises
    ------
    UntrustedError
        It is not among the trusted ones, or has changed.
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
    if _digest(path, function) != description["source"]:
        raise UntrustedError(
            f"The source of {path} is not what it was when the model was saved; restore it, or fit the model again."
        )
    return function


def import_function(path: str) -> Callable[..., object]:
    """Return the function of an import path; only for a path that the user gave."""
    module, _, name = path.partition(":")
    try:
        found: object = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever a module does when it is imported
        raise KernelError(f"{path} cannot be imported here: {type(error).__name__}: {error}.") from error
    if not callable(found):
        raise KernelError(f"{path} is not a function.")
    return found


def _digest(path: str, function: Callable[..., object]) -> str:
    """Return the digest of a function's source, once it is seen to be the source of what runs."""
    if not isinstance(function, FunctionType):
        raise KernelError(f"{path} has no source in Python, whose change would show; wrap it in a function of yours.")
    try:
        source = inspect.getsource(function)
        whole = inspect.getsource(sys.modules[function.__module__])
        written = compile(whole, function.__code__.co_filename, "exec", dont_inherit=True)
    except (OSError, TypeError, SyntaxError, KeyError) as error:
        raise KernelError(f"The source of {path} cannot be read: {error}.") from None
    if function.__code__.co_qualname != function.__qualname__ or function.__code__ not in _codes(written):
        raise KernelError(f"{path} is decorated, or its module was edited since it was imported; import it anew.")
    return hashlib.sha256(source.encode()).hexdigest()


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
