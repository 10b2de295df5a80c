"""Functions of the user's in a store: their import path and a digest of their source, and no code.

Nothing is imported that the caller has not named, and what is imported must have the source that was saved.
"""

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping
from importlib import import_module

from dkfm.errors import KernelError, UntrustedError

__all__ = ["describe", "find", "import_path", "imported", "is_description"]


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


def describe(function: Callable[..., object]) -> dict[str, str]:
    """Return what a store keeps of a function."""
    path = import_path(function)
    if imported(path) is not function:
        raise KernelError(f"{path} cannot be saved, because that name now means something else.")
    return {"function": path, "source": _digest(path, function)}


def is_description(value: object) -> bool:
    """Whether a stored value is what `describe` made."""
    return isinstance(value, Mapping) and set(value) == {"function", "source"}


def find(description: Mapping[str, object], trusted: Collection[str]) -> Callable[..., object]:
    """Return the function of a description, if the caller trusts it and its source is the one that was saved.

    Raises
    ------
    UntrustedError
        It is not among the trusted ones, or has changed.
    """
    path = str(description["function"])
    if isinstance(trusted, str):
        raise KernelError(f'trusted takes a list, as in trusted=["{trusted}"], and not a string.')
    if path not in trusted:
        raise UntrustedError(
            f'This kernel is the function {path}, which is code; trusted=["{path}"] (on the command line, --trusted '
            f"{path}) imports and runs it."
        )
    function = imported(path)
    if _digest(path, function) != description["source"]:
        raise UntrustedError(f"The source of {path} is not what it was when the model was saved.")
    return function


def imported(path: str) -> Callable[..., object]:
    """Return the function of an import path; only for a path that the user gave."""
    module, _, name = path.partition(":")
    try:
        found: object = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise KernelError(f"{path} cannot be imported here: {error}.") from None
    if not callable(found):
        raise KernelError(f"{path} is not a function.")
    return found


def _digest(path: str, function: Callable[..., object]) -> str:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        raise KernelError(f"{path} has no source in Python, so that a change of it would not be seen.") from None
    return hashlib.sha256(source.encode()).hexdigest()
