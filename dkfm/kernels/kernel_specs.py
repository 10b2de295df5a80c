"""Convert names of kernels, and scikit-learn's Gaussian process kernels, to kernels.

Names are scikit-learn's, with its parameters and defaults, or dkfm's. scikit-learn is not imported: its objects are
recognized by their module and class name.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf, sqrt
from typing import Any, TypeAlias

from dkfm.errors import KernelError, find_similar_names, warn_caller
from dkfm.kernels import serialization
from dkfm.kernels.algebra import Constant
from dkfm.kernels.base import Kernel
from dkfm.kernels.custom import Pairwise, Precomputed, display_name
from dkfm.kernels.dot_product import Cosine, Linear, Polynomial, Sigmoid
from dkfm.kernels.functions_of_kernels import Power
from dkfm.kernels.histogram import AdditiveChiSquared, ChiSquared
from dkfm.kernels.parameters import as_float_or_nan
from dkfm.kernels.separable import Laplacian, Periodic
from dkfm.kernels.stationary import Gaussian, Matern, RationalQuadratic

KernelSpec: TypeAlias = Kernel | str | Callable[..., object]
"""Type of ``kernel=``: a kernel, a name, a Gaussian process kernel of scikit-learn, or a function of two rows."""


def _make_rbf(gamma: float | None = None) -> Kernel:
    return Gaussian(None if gamma is None else sqrt(0.5 / _require_positive(gamma)))


def _make_laplacian(gamma: float | None = None) -> Kernel:
    return Laplacian(None if gamma is None else 1 / _require_positive(gamma))


def _make_polynomial(degree: float = 3, gamma: float | None = None, coef0: float = 1) -> Kernel:
    return Polynomial(_convert_integral_float(degree), scale=gamma, offset=coef0)


def _make_sigmoid(gamma: float | None = None, coef0: float = 1) -> Kernel:
    return Sigmoid(scale=gamma, offset=coef0)


_FACTORIES: dict[str, Callable[..., Kernel]] = {
    "additive_chi2": AdditiveChiSquared,
    "chi2": ChiSquared,
    "cosine": Cosine,
    "laplacian": _make_laplacian,
    "linear": Linear,
    "poly": _make_polynomial,
    "polynomial": _make_polynomial,
    "precomputed": Precomputed,
    "rbf": _make_rbf,
    "sigmoid": _make_sigmoid,
}
"""Functions that build the kernel of a scikit-learn name from its parameters."""

_PARAMETERS = {
    "chi2": ("gamma",),
    "laplacian": ("gamma",),
    "poly": ("degree", "gamma", "coef0"),
    "polynomial": ("degree", "gamma", "coef0"),
    "rbf": ("gamma",),
    "sigmoid": ("gamma", "coef0"),
}
"""Parameters of scikit-learn's names; the other names have none."""

_COUNTERPARTS = {"rbf": ("sigma", "gaussian"), "gaussian": ("gamma", "rbf")}
"""For a name: a parameter that it lacks, and the name of the same kernel that has this parameter."""

SCIKIT_LEARN_PARAMETERS = frozenset(name for names in _PARAMETERS.values() for name in names)
"""Parameters of scikit-learn's kernels."""


def _convert_integral_float(number: Any) -> Any:
    """Return an int for an integral float, because scikit-learn's degrees are floats; return other values unchanged."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _require_positive(gamma: object) -> float:
    number = as_float_or_nan(gamma)
    if not 0 < number < inf:
        raise KernelError(f"gamma must be a finite number > 0, and is {gamma!r:.50}.")
    return number


def from_sklearn(kernel: object, **parameters: object) -> Kernel:
    """Return the dkfm kernel of a scikit-learn kernel name, or of an object of `sklearn.gaussian_process.kernels`.

    Parameters
    ----------
    kernel : str, Gaussian process kernel or Kernel
        A name in `sklearn.metrics.pairwise.PAIRWISE_KERNEL_FUNCTIONS`, or "precomputed". Or a Gaussian process kernel:
        RBF, Matern, RationalQuadratic, ExpSineSquared (for one column), DotProduct, ConstantKernel, or a sum, product
        or integer power of these. A dkfm kernel is returned unchanged.
    **parameters
        Parameters of a named kernel. The defaults are scikit-learn's; gamma=None means 1 / d for d columns.

    Raises
    ------
    KernelError
        The name or a parameter is unknown, or dkfm has no such kernel: WhiteKernel, for example, is not a function of
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
            raise KernelError(f"{kernel!r:.100} has parameters of its own; {_join_names(parameters)} belong to a name.")
        return _from_gaussian_process(kernel)
    if kernel not in _FACTORIES:
        near = find_similar_names(kernel[:50], _FACTORIES)
        hint = f"near it: {', '.join(near)}" if near else f"it has {', '.join(sorted(_FACTORIES))}"
        own = serialization.find_class_of_named_kernel(kernel)
        ours = f"; dkfm's own is the class kernels.{own}" if own else ""
        raise KernelError(f"scikit-learn has no kernel named {kernel!r:.50}; {hint}{ours}.")
    known = _PARAMETERS.get(kernel, ())
    unknown = set(parameters).difference(known)
    if unknown:
        has = f"has the parameter{'s' * (len(known) > 1)} {', '.join(known)}" if known else "has no parameters"
        raise KernelError(
            f"The kernel {kernel!r} {has}, and got {_join_names(unknown)}{_describe_counterpart(kernel, unknown)}."
        )
    return _FACTORIES[kernel](**parameters)


def from_name(name: str, parameters: Mapping[str, object]) -> Kernel:
    """Return the kernel of a name, as used in Python and on the command line.

    Parameters
    ----------
    name : str
        A scikit-learn name such as "rbf", or a dkfm name such as "gaussian". A name of both, such as "polynomial", has
        scikit-learn's parameters and defaults, unless a given parameter belongs to dkfm alone.
    parameters : mapping
        Parameters by name. The default width of a dkfm name is the median distance of the rows.

    Raises
    ------
    KernelError
        The name or a parameter is unknown, or the kernel does not accept the value of a parameter.

    Examples
    --------
    >>> from dkfm.kernels.kernel_specs import from_name
    >>> from_name("rbf", {"gamma": 0.5}), from_name("gaussian", {"sigma": 1.0}), from_name("gaussian", {})
    (Gaussian(sigma=1.0), Gaussian(sigma=1.0), Gaussian(sigma='median'))
    >>> from_name("polynomial", {"degree": 2}), from_name("polynomial", {"degree": 2, "scale": 0.5})
    (Polynomial(degree=2, scale=None, offset=1.0), Polynomial(degree=2, scale=0.5, offset=0.0))
    """
    own, is_theirs = serialization.find_parameters(name), name in _FACTORIES
    theirs = _PARAMETERS.get(name, ())
    if is_theirs and (own is None or set(parameters) <= set(theirs)):
        return from_sklearn(name, **parameters)
    if own is None:
        known = sorted({*_FACTORIES, *serialization.list_named_kernels()})
        near = find_similar_names(name[:50].partition(":")[0], known)
        hint = f"near it: {', '.join(near)}" if near else f"there are {', '.join(known)}"
        if ":" in name:
            hint += "; only the command line takes parameters after a colon"
        raise KernelError(f"There is no kernel named {name!r:.50}; {hint}.")
    if is_theirs and theirs and set(parameters).difference(own):
        raise KernelError(
            f"The kernel {name!r} has scikit-learn's parameters {', '.join(theirs)}, or dkfm's {', '.join(own)}, "
            f"and got {_join_names(parameters)}."
        )
    if hint := _describe_counterpart(name, set(parameters)):
        has = f"has the parameter{'s' * (len(own) > 1)} {', '.join(own)}"
        raise KernelError(f"The kernel {name!r} {has}, and got {_join_names(parameters)}{hint}.")
    return serialization.make_named_kernel(name, parameters)


def _describe_counterpart(kernel: str, parameters: set[str]) -> str:
    """Return a clause that names the kernel with a parameter that this kernel lacks; empty if none is known."""
    parameter, name = _COUNTERPARTS.get(kernel, ("", ""))
    return f"; {parameter} is one of {name!r}" if parameter in parameters else ""


def _join_names(parameters: Mapping[str, object] | set[str]) -> str:
    return ", ".join(sorted(parameters))


def _from_gaussian_process(kernel: object) -> Kernel:
    name, module = type(kernel).__name__, type(kernel).__module__
    convert = _CONVERTERS.get(name) if module == "sklearn.gaussian_process.kernels" else None
    if name == "WhiteKernel" and convert is None:
        raise KernelError(
            f"{kernel!r:.100} has no translation; noise belongs in alpha= of KernelRidge, not in a kernel."
        )
    if convert is None:
        raise KernelError(f"{kernel!r:.100} has no translation; there is one of {', '.join(sorted(_CONVERTERS))}.")
    return convert(kernel)


def _from_exponentiation(k: Any) -> Kernel:
    return Power(_from_gaussian_process(k.kernel), _convert_integral_float(k.exponent))


def _from_matern(k: Any) -> Kernel:
    return Gaussian(k.length_scale) if k.nu == inf else Matern(k.nu, k.length_scale)


def _from_exp_sine_squared(k: Any) -> Kernel:
    # A tuple of one length scale raises for rows of more columns, for which scikit-learn takes the sine of the norm.
    return Periodic(k.periodicity, (k.length_scale,))


_CONVERTERS: dict[str, Callable[[Any], Kernel]] = {
    "ConstantKernel": lambda k: Constant(k.constant_value),
    "DotProduct": lambda k: Linear() + k.sigma_0**2,
    "ExpSineSquared": _from_exp_sine_squared,
    "Exponentiation": _from_exponentiation,
    "Matern": _from_matern,
    "Product": lambda k: _from_gaussian_process(k.k1) * _from_gaussian_process(k.k2),
    "RBF": lambda k: Gaussian(k.length_scale),
    "RationalQuadratic": lambda k: RationalQuadratic(k.alpha, k.length_scale),
    "Sum": lambda k: _from_gaussian_process(k.k1) + _from_gaussian_process(k.k2),
}
"""Functions that convert the Gaussian process kernels of scikit-learn, by class name."""


def is_scikit_learn_name(name: str) -> bool:
    """Return whether scikit-learn has a kernel of this name.

    >>> is_scikit_learn_name("polynomial"), is_scikit_learn_name("gaussian")
    (True, False)
    """
    return name in _FACTORIES


def filter_parameters(spec: object, **parameters: object) -> dict[str, object]:
    """Return the parameters that are not None and that the named kernel takes; empty if `spec` is not a name.

    >>> filter_parameters("rbf", gamma=0.5, degree=3), filter_parameters("linear", gamma=1.0)
    ({'gamma': 0.5}, {})
    """
    known = _PARAMETERS.get(spec, ()) if isinstance(spec, str) else ()
    return {name: parameters[name] for name in known if parameters.get(name) is not None}


def as_kernel(spec: object, parameters: Mapping[str, object] | None = None) -> Kernel:
    """Return the kernel for the argument ``kernel=``, which may be any `KernelSpec`.

    Parameters
    ----------
    spec : Kernel, str, callable or Gaussian process kernel of scikit-learn
        A kernel, a name of dkfm or scikit-learn, or a function of two rows.
    parameters : mapping, default=None
        Parameters of a named kernel, or keyword arguments of a function.

    Raises
    ------
    KernelError
        The argument is not a `KernelSpec`, or parameters are given and it is neither a name nor a function.
    """
    if parameters is not None and not isinstance(parameters, Mapping):
        raise KernelError(f"kernel_params must be a mapping of names to numbers, and is {parameters!r:.100}.")
    if parameters and (not callable(spec) or isinstance(spec, Kernel | type)) and not isinstance(spec, str):
        raise KernelError(f"kernel_params belong to a name or a function of two rows, and kernel is {spec!r:.100}.")
    if isinstance(spec, str):
        return from_name(spec, parameters or {})
    if isinstance(spec, Kernel):
        return spec
    if type(spec).__module__ == "sklearn.gaussian_process.kernels":
        return _from_gaussian_process(spec)
    if isinstance(spec, type) and issubclass(spec, Kernel):
        raise KernelError(f"kernel is the class {spec.__name__}, and must be a kernel: {spec.__name__}(..).")
    if not callable(spec):
        raise KernelError(
            f"kernel must be a dkfm kernel, a name of dkfm's or scikit-learn's, or a function; it is {spec!r:.100}."
        )
    warn_caller(
        f"{display_name(spec)} is called for every pair of rows, which is slow; "
        "a function of blocks, f(X, Y) of shape (n, m), in kernels.Function is not."
    )
    return Pairwise(partial(spec, **parameters) if parameters else spec)
