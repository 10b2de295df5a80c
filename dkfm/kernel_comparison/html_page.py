"""Render and write a self-contained HTML page with a table, paragraphs and pictures; all text is escaped.

The content security policy of the page forbids scripts and external resources, so a browser makes no network request.
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dkfm.errors import MissingExtraError
from dkfm.files import local

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GENERATOR = '<meta name="generator" content="dkfm">'
"""Line of `page.html.jinja` that marks a page of dkfm, which may be replaced."""

_FIGURE_INCHES = (4.8, 3.8)
_DPI = 110


@dataclass(frozen=True)
class Picture:
    """A PNG image with its alternative text and its caption."""

    png: bytes
    alt: str
    caption: str

    @property
    def data_url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass(frozen=True)
class Section:
    """A section of a page: its heading and pictures."""

    title: str
    pictures: Sequence[Picture]


def draw_picture(draw: "Callable[[Axes], object]", alt: str, caption: str) -> Picture:
    """Return a picture of 528 x 418 pixels that `draw` draws on axes; needs no display.

    Raises
    ------
    MissingExtraError
        Matplotlib is not installed.

    Examples
    --------
    >>> from dkfm.kernel_comparison.html_page import draw_picture
    >>> draw_picture(lambda ax: ax.plot([1, 2]), "a line", "It rises.").png[1:4]
    b'PNG'
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("A page has pictures; install Matplotlib with pip install 'dkfm[plot]'.") from error
    figure, buffer = Figure(figsize=_FIGURE_INCHES, dpi=_DPI, layout="constrained"), io.BytesIO()
    draw(figure.add_subplot())
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return Picture(buffer.getvalue(), alt, caption)


def require_replaceable_page(path: Path) -> None:
    """Raise if a path holds a file that is not a page of dkfm.

    Raises
    ------
    StoreExistsError
        The path holds another file, which is left unchanged.
    """
    local.require_replaceable_file(path, GENERATOR.encode(), "page")


def write_page(path: str | Path, text: str) -> None:
    """Write a page atomically; replace an earlier page of dkfm. `text` must contain the line `GENERATOR`."""
    target = Path(path).resolve()  # write to the target of a symbolic link, and keep the link
    require_replaceable_page(target)
    with local.new_file(target, target.parent) as output:
        output.file.write(text.encode("utf-8"))
        output.commit()


def render_page(notes: Sequence[str], table: Sequence[Sequence[str]], sections: Sequence[Section]) -> str:
    """Return the HTML text of a page.

    Parameters
    ----------
    notes : sequence of str
        Paragraphs below the table.
    table : sequence of rows of str
        Cells of the table; the first row is the header.
    sections : sequence of Section
        Sections below the paragraphs.

    Examples
    --------
    >>> from dkfm.kernel_comparison.html_page import render_page
    >>> "<td>&lt;b&gt;</td>" in render_page([], [["kernel"], ["<b>"]], [])
    True
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("dkfm.kernel_comparison", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.jinja").render(notes=notes, table=table, sections=sections)
