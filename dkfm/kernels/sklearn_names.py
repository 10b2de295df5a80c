"""scikit-learn's words for kernels in ours: names with their parameters and defaults, and Gaussian process kernels.

scikit-learn is not imported: its objects are told by their class names and parameters.
"""

import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from math import inf, sqrt
from typing import Any, TypeAlias

from dkfm.errors import DkfmWarning, KernelError
from dkfm.kernels import serialization
from dkfm.kernels.algebra import Constant, Power
from dkfm.kernels.base import Kernel
from dkfm.kernels.custom import Pairwise, Precomputed, qualified_name
from dkfm.kernels.dot_product import Cosine, Linear, Polynomial, Sigmoid
from dkfm.kernels.histogram import AdditiveChiSquared, ChiSquared
from dkfm.kernels.parameters import as_number
from dkfm.kernels.separable import Laplacian, Periodic
from dkfm.kernels.stationary import Gaussian, Matern, RationalQuadratic

KernelSpec: TypeAlias = Kernel | str | Callable[..., object]
"""What ``kernel=`` takes: a kernel, a name or Gaussian process kernel of scikit-learn's, or a function of two rows."""


def _rbf(gamma: float | None = None) -> Kernel:
    return Gaussian(None if gamma is None else sqrt(0.5 / _positive(gamma)))


def _laplacian(gamma: float | None = None) -> Kernel:
    return Laplacian(None if gamma is None else 1 / _positive(gamma))


def _polynomial(degree: float = 3, gamma: float | None = None, coef0: float = 1) -> Kernel:
    return Polynomial(_whole(degree), scale=gamma, offset=coef0)


def _sigmoid(gamma: float | None = None, coef0: float = 1) -> Kernel:
    return Sigmoid(scale=gamma, offset=coef0)


def _chi2(gamma: float = 1.0) -> Kernel:
    return ChiSquared(gamma)


_BY_NAME: dict[str, Callable[..., Kernel]] = {
    "additive_chi2": AdditiveChiSquared,
    "chi2": _chi2,
    "cosine": Cosine,
    "laplacian": _laplacian,
    "linear": Linear,
    "poly": _polynomial,
    "polynomial": _polynomial,
    "precomputed": Precomputed,
    "rbf": _rbf,
    "sigmoid": _sigmoid,
}
_PARAMETERS = {
    "chi2": ("gamma",),
    "laplacian": ("gamma",),
    "poly": ("degree", "gamma", "coef0"),
    "polynomial": ("degree", "gamma", "coef0"),
    "rbf": ("gamma",),
    "sigmoid": ("gamma", "coef0"),
}


def _whole(number: Any) -> Any:
    """Return an integer where a float is one: scikit-learn's degrees are real."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _positive(gamma: object) -> float:
    number = as_number(gamma)
    if not 0 < number < inf:
        raise KernelError(f"gamma must be a finite number > 0, and is {gamma!r:.50}.")
    return number


def from_sklearn(kernel: object, **parameters: object) -> Kernel:
    """Return the kernel that scikit-learn means by a name, or by an object of `sklearn.gaussian_process.kernels`.

    Parameters
    ----------
    kernel : str or Gaussian process kernel
        A name of `sklearn.metrics.pairwise.PAIRWISE_KERNEL_FUNCTIONS`, with its parameters and their defaults (a gamma
        of None is 1 / d for d columns), or "precomputed". Of Gaussian process kernels: RBF, Matern, RationalQuadratic,
        ExpSineSquared (of one column), DotProduct, ConstantKernel, and sums, products and integer powers of them.
    **parameters
        Of the name.

    Raises
    ------
    KernelError
        An unknown name or parameter, or a kernel that has no translation, like WhiteKernel, which is not a function of
        two rows.

    Examples
    --------
    >>> from dkfm import kernels
    >>> kernels.from_sklearn("poly", degree=2)
    Polynomial(degree=2, scale=None, offset=1.0)
    """
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str):
        if parameters:
            raise KernelError(f"{kernel!r:.100} has parameters of its own; {_names(parameters)} belong to a name.")
        return _from_process(kernel)
    if kernel not in _BY_NAME:
        near = get_close_matches(kernel, _BY_NAME) or sorted(_BY_NAME)
        own = serialization.kernel_class(kernel)
        hint = f"; dkfm's own is the class kernels.{own}" if own else ""
        raise KernelError(f"scikit-learn has no kernel named {kernel!r:.50}; near it: {', '.join(near)}{hint}.")
    known = _PARAMETERS.get(kernel, ())
    unknown = set(parameters).difference(known)
    if unknown:
        has = f"has the parameters {', '.join(known)}" if known else "has no parameters"
        raise KernelError(f"The kernel {kernel!r} {has}, and got {_names(unknown)}.")
    return _BY_NAME[kernel](**parameters)


def _names(parameters: Mapping[str, object] | set[str]) -> str:
    return ", ".join(sorted(parameters))


def _from_process(kernel: object) -> Kernel:
    name, module = type(kernel).__name__, type(kernel).__module__
    translate = _PROCESSES.get(name) if module == "sklearn.gaussian_process.kernels" else None
    if translate is None:
        raise KernelError(f"{kernel!r:.100} has no translation; there is one of {', '.join(sorted(_PROCESSES))}.")
    return translate(kernel)


def _exponent(k: Any) -> Kernel:
    return Power(_from_process(k.kernel), _whole(k.exponent))


def _matern(k: Any) -> Kernel:
    return Gaussian(k.length_scale) if k.nu == inf else Matern(k.nu, k.length_scale)


def _exp_sine_squared(k: Any) -> Kernel:
    # One length scale in a tuple belongs to rows of one column: of more, scikit-learn takes the sine of their norm.
    return Periodic(k.periodicity, (k.length_scale,))


_PROCESSES: dict[str, Callable[[Any], Kernel]] = {
    "ConstantKernel": lambda k: Constant(k.constant_value),
    "DotProduct": lambda k: Linear() + k.sigma_0**2,
    "ExpSineSquared": _exp_sine_squared,
    "Exponentiation": _exponent,
    "Matern": _matern,
    "Product": lambda k: _from_process(k.k1) * _from_process(k.k2),
    "RBF": lambda k: Gaussian(k.length_scale),
    "RationalQuadratic": lambda k: RationalQuadratic(k.alpha, k.length_scale),
    "Sum": lambda k: _from_process(k.k1) + _from_process(k.k2),
}


def given_parameters(spec: object, **parameters: object) -> dict[str, object]:
    """Return those of the parameters that are given and that a kernel of this name has; none where it is no name.

    >>> given_parameters("rbf", gamma=0.5, degree=3), given_parameters("linear", gamma=1.0)
    ({'gamma': 0.5}, {})
    """
    known = _PARAMETERS.get(spec, ()) if isinstance(spec, str) else ()
    return {name: parameters[name] for name in known if parameters.get(name) is not None}


def as_kernel(spec: object, parameters: Mapping[str, object] | None = None) -> Kernel:
    """Return the kernel that ``kernel=`` means: itself, scikit-learn's by name or object, or a function of two rows.

    Raises
    ------
    KernelError
        None of these, or parameters beside anything but a name.
    """
    if parameters is not None and not isinstance(parameters, Mapping):
        raise KernelError(f"kernel_params must be a mapping of names to numbers, and is {parameters!r:.100}.")
    if parameters and (not callable(spec) or isinstance(spec, Kernel | type)) and not isinstance(spec, str):
        raise KernelError(f"kernel_params belong to a name or a function of two rows, and kernel is {spec!r:.100}.")
    if isinstance(spec, str):
        return from_sklearn(spec, **(parameters or {}))
    if isinstance(spec, Kernel):
        return spec
    if type(spec).__module__ == "sklearn.gaussian_process.kernels":
        return _from_process(spec)
    if isinstance(spec, type) and issubclass(spec, Kernel):
        raise KernelError(f"kernel is the class {spec.__name__}, and must be a kernel: {spec.__name__}(..).")
    if not callable(spec):
        raise KernelError(
            f"kernel must be a dkfm kernel, a name of scikit-learn's, or a function; it is {spec!r:.100}."
        )
    warnings.warn(
        f"{qualified_name(spec)} is called for every pair of rows, which is slow; "
        "a function of blocks, f(X, Y) of shape (n, m), in kernels.Function is not.",
        DkfmWarning,
        stacklevel=4,
    )
    return Pairwise(partial(spec, **parameters) if parameters else spec)
