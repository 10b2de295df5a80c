"""Kernels to JSON and back, through a closed registry: a name that is not in it is refused, nothing is imported."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches

from dkfm.errors import KernelError
from dkfm.kernels.base import Kernel
from dkfm.kernels.compose import Constant, Power, Product, Scaled, Sum
from dkfm.kernels.dot import Linear, Polynomial
from dkfm.kernels.stationary import Gaussian, Laplacian

__all__ = ["by_name", "digest", "from_config", "is_value", "to_config"]

_REGISTRY: dict[str, type[Kernel]] = {
    "constant": Constant,
    "gaussian": Gaussian,
    "laplacian": Laplacian,
    "linear": Linear,
    "polynomial": Polynomial,
    "power": Power,
    "product": Product,
    "scaled": Scaled,
    "sum": Sum,
}
_NAMES = {kernel: name for name, kernel in _REGISTRY.items()}
_COMPOSED = {"power", "product", "scaled", "sum"}
_MAX_DEPTH = 32
"""A kernel nested deeper than this in a stored model is nobody's kernel."""


def to_config(kernel: Kernel) -> dict[str, object]:
    """Return the kernel as plain JSON values.

    Raises
    ------
    KernelError
        A kernel that is not in the registry (`Function`, a class of your own).

    Examples
    --------
    >>> from dkfm.kernels import Gaussian, config
    >>> config.to_config(Gaussian(5.0))
    {'name': 'gaussian', 'sigma': 5.0}
    """
    name = _NAMES.get(type(kernel))
    if name is None:
        raise KernelError(f"{kernel!r} cannot be written to a store: only the kernels of dkfm.kernels can, never code.")
    parameters = ((field.name, getattr(kernel, field.name)) for field in fields(kernel))  # type: ignore[arg-type]  # every kernel of the registry is a dataclass
    return {"name": name, **{key: _encode(value) for key, value in parameters}}


def is_value(kernel: Kernel) -> bool:
    """Whether a kernel can be written to a store: it holds no code."""
    try:
        to_config(kernel)
    except KernelError:
        return False
    return True


def _encode(value: object) -> object:
    if isinstance(value, Kernel):
        return to_config(value)
    return [_encode(part) for part in value] if isinstance(value, tuple) else value


def from_config(config: object) -> Kernel:
    """Return the kernel of a `to_config` dictionary, every parameter checked anew.

    Raises
    ------
    KernelError
        An unknown name or parameter, or a parameter that the kernel refuses.
    """
    return _decode(config, _MAX_DEPTH)


def _decode(config: object, depth: int) -> Kernel:
    if not isinstance(config, Mapping) or "name" not in config or depth == 0:
        raise KernelError("A stored kernel must be a JSON object with a 'name', nested at most 32 deep.")
    kernel = _lookup(config["name"])
    return _build(kernel, {key: _decode_value(v, depth - 1) for key, v in config.items() if key != "name"})


def _decode_value(value: object, depth: int) -> object:
    if isinstance(value, Mapping):
        return _decode(value, depth)
    return tuple(_decode(part, depth) for part in value) if isinstance(value, list) else value


def by_name(name: str, parameters: Mapping[str, float]) -> Kernel:
    """Return a kernel by its name, as the command line does.

    Examples
    --------
    >>> from dkfm.kernels import config
    >>> config.by_name("gaussian", {"sigma": 5.0})
    Gaussian(sigma=5.0)
    """
    kernel = _lookup(name)
    if name in _COMPOSED:
        raise KernelError(f"A {name} of kernels has no name of its own; save a model that has one, in Python.")
    return _build(kernel, parameters)


def _lookup(name: object) -> type[Kernel]:
    if isinstance(name, str) and name in _REGISTRY:
        return _REGISTRY[name]
    plain = sorted(set(_REGISTRY) - _COMPOSED)
    near = get_close_matches(str(name), plain)
    hint = f"near it: {', '.join(near)}" if near else f"there are {', '.join(plain)}"
    raise KernelError(f"There is no kernel named {name!r:.50}; {hint}.")


def _build(kernel: type[Kernel], parameters: Mapping[str, object]) -> Kernel:
    known = {field.name: field.default is MISSING for field in fields(kernel)}  # type: ignore[arg-type]  # every kernel of the registry is a dataclass
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise KernelError(f"{kernel.__name__} has the parameters ({', '.join(known)}), and not {', '.join(unknown)}.")
    missing = [name for name, required in known.items() if required and name not in parameters]
    if missing:
        raise KernelError(f"{kernel.__name__} needs {', '.join(missing)}.")
    return kernel(**parameters)


def digest(kernel: Kernel) -> str:
    """Return a hexadecimal digest of the kernel's JSON: equal kernels, equal digests."""
    return hashlib.sha256(json.dumps(to_config(kernel), sort_keys=True).encode()).hexdigest()
