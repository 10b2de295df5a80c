"""Words of the command line: how they become numbers, lists and parameters, and which are refused."""

import sys

import click

__all__ = ["components", "find_modules", "listed", "parameters", "shrinkage"]


def parameters(values: tuple[str, ...]) -> dict[str, object]:
    """Return the parameters of a kernel, by name."""
    parameters: dict[str, object] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (name and equals and text):
            raise click.UsageError(f"--param takes NAME=VALUE, and got {value!r}.")
        parts = [_number(part) for part in text.strip("()[] ").split(",") if part.strip()]
        parameters[name] = parts[0] if len(parts) == 1 and "," not in text else tuple(parts)
    return parameters


def _number(text: str) -> object:
    """Return a number; another word is for the kernel to take or refuse."""
    try:
        return int(text) if text.strip().lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def components(context: click.Context, parameter: click.Parameter, text: str | None) -> int | float | None:
    """Return a count, or a share of the variance below 1."""
    number = None if text is None else _number(text)
    if number is None or (isinstance(number, int) and number >= 1) or (isinstance(number, float) and 0 < number < 1):
        return number
    raise click.BadParameter(f"{text} is no number of components, nor a share of variance below 1.")


def shrinkage(context: click.Context, parameter: click.Parameter, text: str | None) -> float | str | None:
    """Return a ridge, or "auto"."""
    number = None if text is None else _number(text)
    if number is None or number == "auto" or isinstance(number, float | int):
        return number
    raise click.BadParameter(f'{text} is no number, nor "auto".')


def find_modules(*functions: str) -> None:
    """Let functions that the user names be imported from the working directory, after all that is installed."""
    if any(":" in function for function in functions) and "" not in sys.path:
        sys.path.append("")


def listed(text: str | None) -> list[str] | None:
    """Return names that stand with commas between them.

    >>> listed("a, b")
    ['a', 'b']
    """
    return None if text is None else [part.strip() for part in text.split(",")]
