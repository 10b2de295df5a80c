"""Store a user's function as its import path, and import it only if the reader trusts it.

A file is data, and a function of a file is code: it runs only if the user names it, and its source is what it was.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from types import CodeType, FunctionType

from dkfm.errors import InvalidInputError, KernelError, UntrustedError


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
    if function.__code__.co_qualname != function.__qualname__:
        raise KernelError(f"{path} is decorated and cannot be saved; call it in a plain function of a module of yours.")
    if function.__code__ not in _walk_code(module_code):
        raise KernelError(f"The module of {path} was edited since it was imported; import it anew.")
    return hashlib.sha256(source.encode()).hexdigest()


def _walk_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects that a code object contains, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _walk_code(constant)
