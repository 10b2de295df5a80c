"""How a kernel is shown in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dkfm import display

if TYPE_CHECKING:
    from dkfm.kernels.base import Kernel

__all__ = ["as_html"]


def as_html(kernel: Kernel) -> str:
    """Return a kernel in HTML: its expression, and what is known of it."""
    facts = {"definiteness": str(kernel.definiteness), "rows": "dense or sparse" if kernel.sparse else "dense"}
    return display.card(f"Kernel {type(kernel).__name__}", repr(kernel), facts)
