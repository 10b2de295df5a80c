"""What is accepted of a stranger's kernel: so much of it, and of functions a path and a digest of their source.

Nothing is imported that the caller has not named, and what is imported must have the source that was saved.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from types import CodeType, FunctionType

from dkfm.errors import InvalidInputError, KernelError, UntrustedError

__all__ = ["as_trusted", "describe", "find", "import_path", "imported", "is_description", "require_modest"]

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


def describe(function: Callable[..., object]) -> dict[str, str]:
    """Return what a store keeps of a function."""
    path = import_path(function)
    if imported(path) is not function:
        raise KernelError(f"{path} cannot be saved, because that name now means something else.")
    return {"function": path, "source": _digest(path, function)}


def as_trusted(trusted: object) -> tuple[str, ...]:
    """Return what a user gave as ``trusted=``, a collection of names, or say that it is none."""
    if isinstance(trusted, str) or not isinstance(trusted, Collection) or not all(isinstance(t, str) for t in trusted):
        raise InvalidInputError(f'trusted takes a list, as in trusted=["module:function"], and got {trusted!r:.100}.')
    return tuple(trusted)


def is_description(value: object) -> bool:
    """Whether a stored value is what `describe` made."""
    return isinstance(value, Mapping) and set(value) == {"function", "source"}


def require_modest(config: object) -> None:
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


def find(description: Mapping[str, object], trusted: Collection[str]) -> Callable[..., object]:
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
        function = imported(path)
    except KernelError as error:
        raise UntrustedError(f"{error} Start where its module is, or name its folder in PYTHONPATH.") from None
    if _digest(path, function) != description["source"]:
        raise UntrustedError(
            f"The source of {path} is not what it was when the model was saved; restore it, or fit the model again."
        )
    return function


def imported(path: str) -> Callable[..., object]:
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
