"""Kernels to JSON and back, through a closed registry: a name that is not in it is refused.

A function of the user's is kept as its import path, and imported only where the reader says to trust it.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any

from dkfm.errors import KernelError, shortened, shown
from dkfm.kernels import trust
from dkfm.kernels.angle import ArcCosine
from dkfm.kernels.base import Kernel
from dkfm.kernels.compose import Constant, Power, Product, Scaled, Sum
from dkfm.kernels.dot import Cosine, Linear, Polynomial, Sigmoid
from dkfm.kernels.function import Function, Outer, Pairwise
from dkfm.kernels.histogram import AdditiveChiSquared, ChiSquared, HistogramIntersection, JensenShannon
from dkfm.kernels.manhattan import Laplacian
from dkfm.kernels.maps import Affine, Columns, Warped
from dkfm.kernels.matern import Matern
from dkfm.kernels.periodic import Periodic
from dkfm.kernels.precomputed import Precomputed
from dkfm.kernels.series import Exp, Normalized, PowerSeries
from dkfm.kernels.stationary import Exponential, Gaussian, NegativeSquaredDistance, RationalQuadratic

__all__ = ["by_name", "class_named", "digest", "from_config", "functions", "is_value", "is_writable", "to_config"]

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
    trust.require_modest(stored)
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
        return trust.describe(value)
    return [_encode(part, depth - 1) for part in value] if isinstance(value, tuple) else value


def is_value(kernel: object) -> bool:
    """Whether a kernel is told by its numbers: it holds no code, which may change under its name."""
    if type(kernel) in _NAMES:
        return all(is_value(getattr(kernel, field.name)) for field in fields(kernel))  # type: ignore[arg-type]  # the registry is of dataclasses
    if isinstance(kernel, tuple):
        return all(map(is_value, kernel))
    return not isinstance(kernel, Kernel) and not callable(kernel)


def is_writable(kernel: Kernel) -> bool:
    """Whether `to_config` writes a kernel."""
    try:
        to_config(kernel)
    except KernelError:
        return False
    return True


def functions(value: object) -> tuple[str, ...]:
    """Return the import paths of the user's functions in a kernel that can be written."""
    if type(value) in _NAMES:
        return functions(tuple(getattr(value, field.name) for field in fields(value)))  # type: ignore[arg-type]  # the registry is of dataclasses
    if isinstance(value, tuple):
        return tuple(path for part in value for path in functions(part))
    return (trust.import_path(value),) if callable(value) else ()


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
    trust.require_modest(config)
    kernel = _decode(config, trusted, _MAX_DEPTH)
    if not isinstance(kernel, Kernel):
        raise KernelError(f"A stored kernel must be one, and is {shown(kernel, 50)}.")
    return kernel


def _decode(config: object, trusted: Collection[str], depth: int) -> object:
    if trust.is_description(config):
        return trust.find(config, trusted)  # type: ignore[arg-type]  # a mapping, as seen
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


def by_name(name: str, parameters: Mapping[str, object]) -> Kernel:
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
        found = trust.imported(name)
        return found if isinstance(found, Kernel) else Function(found)
    kernel: Kernel = _build(_lookup(name, _PLAIN), parameters)
    return kernel


def class_named(name: str) -> str | None:
    """Return the class that has a name on the command line.

    >>> class_named("arc_cosine")
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


def digest(kernel: Kernel) -> str:
    """Return a hexadecimal digest of the kernel's JSON: equal kernels, equal digests."""
    return hashlib.sha256(json.dumps(to_config(kernel), sort_keys=True).encode()).hexdigest()
