"""Run a command as a process: handle standard streams and Ctrl-C, and report each error of the system in a sentence."""

import errno
import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dkfm.cli import failures, option_parsing
from dkfm.core.display.terminal_output import escape_control_characters, print_message
from dkfm.errors import (
    DkfmError,
    OutputError,
    ResourceError,
    StalledError,
    extract_reason,
    find_similar_names,
)
from dkfm.files import temporary_folders
from dkfm.files.signals import postpone_signal

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_REPEAT_AFTER = 0.01
"""Seconds after which an interruption is raised again if Python dropped the exception."""

_IGNORE_SECONDS = 2.0
"""Seconds for which further interruptions are ignored, because cleaning up takes time."""

_RESOURCE_ERRNOS = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC})
"""Error numbers for exhausted resources."""

_NO_MEMORY: tuple[tuple[type[Exception], str], ...] = (
    (MemoryError, ""),
    (ImportError, "failed to map segment"),
    (SystemError, "without exception set"),  # a compiled module lost the MemoryError of its import
    (SystemError, "without setting an exception"),
)
"""Errors that mean too little memory: their class, and a part of their message."""

_NO_THREAD = "can't start new thread"
"""Message of the RuntimeError that Python raises if the limit of threads is reached."""

_OUTPUT_ERROR = "Standard output cannot be written: {}."

_COMMAND_SYNONYMS = {
    **dict.fromkeys(("apply", "predict", "transform"), "score"),
    **dict.fromkeys(("check", "validate"), "verify"),
    **dict.fromkeys(("describe", "inspect", "show"), "info"),
    "benchmark": "bench",
    "train": "fit",
}
"""Names that users may expect for a command, with its actual name."""

_OPTION_SYNONYMS = {"--force": "--overwrite", "--id": "--id-column", "--lambda": "--alpha", "--seed": "--random-state"}
"""Names that users may expect for an option, with its actual name."""

_PARAMETER_FORMS = {"fit": "--param {}=VALUE", "compare": "--kernel NAME:{}=VALUE"}
"""How a command line gives a parameter of a kernel, by the name of the command."""

_owns_process = False
"""Whether this process runs only the command, and not, for example, a test."""


def run_command(command: Callable[[], object]) -> NoReturn:
    """Run a command as the main program of this process, and exit with its code.

    Parameters
    ----------
    command : callable
        Function that returns None or an exit code, or raises SystemExit.
    """
    global _owns_process  # noqa: PLW0603  # it describes the process
    _owns_process = True
    _reopen_closed_streams()
    interruption = _InterruptionHandler()
    code: object = 1
    try:
        code = command()
    except SystemExit as exit_request:
        code = exit_request.code
        if not isinstance(code, int | None):
            print_message(str(code))  # Python does the same
            code = 1
    except BaseException as error:
        if interruption.raised or isinstance(error, KeyboardInterrupt):  # a library may raise another error instead
            code = failures.report_failure(KeyboardInterrupt, "Interrupted.")
        else:
            code = failures.report_failure(*_classify_error(error))
    interruption.exit_on_next_interruption()
    if (failure := _flush_streams()) is not None and not code:
        code = failures.report_failure(OutputError, _OUTPUT_ERROR.format(failure))
    _owns_process = False  # a caller that catches SystemExit continues in this process
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def disable_gc_during_imports() -> Iterator[None]:
    """Import the modules of a command without garbage collection, if the command is the main program.

    Modules are never freed, so collecting their objects finds nothing, but takes a seventh of the time of a small job.
    """
    if not _owns_process or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # later collections ignore the objects that exist now
        gc.enable()


def _reopen_closed_streams() -> None:
    """Replace closed standard streams; otherwise the next opened file would get their descriptors.

    Standard output is opened for reading, so that printing a result raises an error instead of losing the result.
    """
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest free descriptor, which is the closed one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # for the life of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


class _InterruptionHandler:
    """Raise KeyboardInterrupt on Ctrl-C, at most once in `_IGNORE_SECONDS`, so that cleaning up is not interrupted.

    If Ctrl-C is ignored when the process starts, it stays ignored.
    """

    def __init__(self) -> None:
        self.raised = False
        self._last = -math.inf
        self._former_hook = sys.unraisablehook
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._raise)
            sys.unraisablehook = self._repeat_dropped

    def exit_on_next_interruption(self) -> None:
        """Raise no more exceptions while Python exits; another Ctrl-C then ends a process that hangs."""
        if signal.getsignal(signal.SIGALRM) == self._raise:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        if signal.getsignal(signal.SIGINT) == self._raise:
            self._last = time.monotonic()
            signal.signal(signal.SIGINT, self._exit_now)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._last >= _IGNORE_SECONDS and not postpone_signal(number, frame):
            self.raised, self._last = True, time.monotonic()
            raise KeyboardInterrupt

    def _exit_now(self, number: int, frame: FrameType | None) -> None:
        """Exit at once, without cleaning up, except in the `_IGNORE_SECONDS` after `exit_on_next_interruption`."""
        if time.monotonic() - self._last >= _IGNORE_SECONDS:
            os._exit(failures.find_exit_code(KeyboardInterrupt))

    def _repeat_dropped(self, unraisable: "UnraisableHookArgs") -> None:
        """Raise an interruption again if Python dropped it in a destructor or a callback."""
        if unraisable.exc_type is KeyboardInterrupt and threading.current_thread() is threading.main_thread():
            self._last = -math.inf
            signal.signal(signal.SIGALRM, self._raise)
            signal.setitimer(signal.ITIMER_REAL, _REPEAT_AFTER)
        elif not self.raised:
            self._former_hook(unraisable)


def _flush_streams() -> str | None:
    """Flush the standard streams; return the reason if standard output cannot be written, else None.

    Text that cannot be written is dropped, because Python would try again at exit and print a traceback.
    """
    failure = None
    for number, stream in enumerate((sys.stdout, sys.stderr), 1):
        try:
            stream.flush()
        except OSError as error:
            failure = failure or (_error_text(error) if number == 1 else None)
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                stream.flush()
    return failure


def _classify_error(error: BaseException) -> tuple[type[BaseException], str]:
    """Return the class and the sentence to report for an unexpected error."""
    if os.environ.get("DKFM_TRACEBACK"):
        raise error
    if isinstance(error, OSError) and (failure := _flush_streams()) is not None:
        return OutputError, _OUTPUT_ERROR.format(failure)
    refusal = _describe_refused_resource(error)
    if refusal is not None:
        return ResourceError, f"The system {refusal}."
    frame = traceback.extract_tb(error.__traceback__)[-1]
    cause = f"{extract_reason(error)} ({Path(frame.filename).name}, line {frame.lineno})"
    return type(error), f"{cause}; dkfm did not expect this: DKFM_TRACEBACK=1 shows more."


def _describe_refused_resource(error: BaseException) -> str | None:
    """Return a description of the exhausted resource; None for an error of another kind."""
    if not isinstance(error, OSError):
        error = _find_resource_error(error)
    if isinstance(error, OSError):
        what = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "the command"
        return f"refused {what}: {_error_text(error)}"
    if _lacks_memory(error):
        return f"gave no more memory ({extract_reason(error)}); raise its limit, or use fewer rows"
    if _NO_THREAD in str(error):
        return "gave no more threads; raise the limit of processes (ulimit -u), or that of memory (ulimit -v)"
    return None


def _lacks_memory(error: BaseException) -> bool:
    return any(isinstance(error, kind) and text in str(error) for kind, text in _NO_MEMORY)


def _find_resource_error(error: BaseException) -> BaseException:
    """Return the error of an exhausted resource in the chain of causes of an error; else the error itself."""
    cause: BaseException | None = error
    while cause is not None:
        if (
            _lacks_memory(cause)
            or (isinstance(cause, OSError) and cause.errno in _RESOURCE_ERRNOS)
            or (isinstance(cause, RuntimeError) and _NO_THREAD in str(cause))
        ):
            return cause
        cause = cause.__context__
    return error


def _error_text(error: OSError) -> str:
    return error.strerror or extract_reason(error)


class CommandGroup(click.Group):
    """Command group whose errors are sentences with the exit codes of `dkfm.cli.failures`."""

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:  # click's signature
        """Run a command; without `args`, as the main program with the command line of this process."""
        failures.remember_options(sys.argv[1:] if args is None else args)
        if args is None:
            run_command(lambda: super(CommandGroup, self).main(args, *others, **options))
        return super().main(args, *others, **options)

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:  # click's signature
        """Parse the options before the name of a command."""
        with _sanitize_usage_errors():
            return super().make_context(*arguments, **options)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:  # click's signature
        """Return the command that a command line names; for a synonym, suggest the actual name."""
        if args and not ctx.resilient_parsing and (name := _COMMAND_SYNONYMS.get(args[0])) is not None:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {name}?", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command that a command line names, and exit with a code if it fails."""
        former_format = warnings.formatwarning
        warnings.formatwarning = _format_warning
        try:
            with _sanitize_usage_errors():
                return super().invoke(ctx)
        except DkfmError as error:
            code = failures.report_failure(type(error), str(error))
            if isinstance(error, StalledError):
                temporary_folders.remove_all_folders()
                os._exit(code)  # a normal exit would wait for a thread that hangs
            ctx.exit(code)
        except KeyboardInterrupt:
            hint = _describe_resumption(ctx.invoked_subcommand)
            ctx.exit(failures.report_failure(KeyboardInterrupt, f"Interrupted{hint}."))
        finally:
            warnings.formatwarning = former_format


def _describe_resumption(command: str | None) -> str:
    """Return a clause on how to resume an interrupted command; empty if it starts again from the beginning."""
    if command == "score":
        return "; dkfm score goes on from there with the same command"
    if command == "fit" and failures.has_option("--workspace"):
        return "; dkfm fit goes on with the same command, from what --workspace has"
    return ""


@contextmanager
def _sanitize_usage_errors() -> Iterator[None]:
    """Escape control characters in usage errors, which quote arguments; with --json, print the errors as JSON too."""
    try:
        yield
    except click.UsageError as error:
        message = escape_control_characters(_describe_usage_error(error))
        failures.print_json_failure(click.UsageError, message)
        raise click.UsageError(message, error.ctx) from None


def _describe_usage_error(error: click.UsageError) -> str:
    """Return the message of a usage error, with a suggestion for a misspelt name."""
    wrong = getattr(error, "option_name", None) or getattr(error, "command_name", None)
    if wrong is None:
        return error.format_message()
    if error.ctx is not None and (hint := _find_option_hint(wrong, error.ctx.command)) is not None:
        return f"No such option '{wrong}'. {hint}"
    if not getattr(error, "possibilities", None):
        return error.format_message()
    near = find_similar_names(wrong, error.possibilities)  # type: ignore[attr-defined]  # of two of click's classes
    return f"{error.message} Did you mean {' or '.join(near)}?" if near else error.message


def _find_option_hint(wrong: str, command: click.Command) -> str | None:
    """Return a hint on what to use instead of an option that a command does not have; None if there is none."""
    form, parameter = _PARAMETER_FORMS.get(str(command.name)), wrong.lstrip("-").replace("-", "_")
    if form is not None and parameter in option_parsing.KERNEL_PARAMETERS:
        return f"Write a parameter of the kernel as {form.format(parameter)}."
    meant = _OPTION_SYNONYMS.get(wrong)
    is_option = any(meant in known.opts for known in command.params)
    return f"Did you mean {meant}?" if is_option else None


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning in one line, without the line of code that issued it."""
    return f"{escape_control_characters(f'{category.__name__}: {message}')}\n"
