"""One HTML file that needs nothing else: words, a table and pictures; every text is escaped.

Its policy forbids scripts and whatever is not in the file, so a browser asks no network for anything.
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
"""A line of `page.html.jinja`, by which a page of dkfm's is known that may be replaced."""

_INCHES, _DOTS = (4.8, 3.8), 110


@dataclass(frozen=True)
class Picture:
    """A PNG, with words for who sees it and for who does not."""

    png: bytes
    alt: str
    caption: str

    @property
    def url(self) -> str:
        """The picture as a `data:` URL."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass(frozen=True)
class Section:
    """A heading, some paragraphs and pictures."""

    title: str
    words: Sequence[str]
    pictures: Sequence[Picture]


def draw_picture(draw: "Callable[[Axes], object]", alt: str, caption: str) -> Picture:
    """Return what a function draws on axes, 528 x 418 dots; without a display.

    Raises
    ------
    MissingExtraError
        Matplotlib is not installed.

    Examples
    --------
    >>> from dkfm.comparison.html_page import draw_picture
    >>> draw_picture(lambda ax: ax.plot([1, 2]), "a line", "It rises.").png[1:4]
    b'PNG'
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("A page has pictures; install Matplotlib with pip install 'dkfm[plot]'.") from error
    figure, file = Figure(figsize=_INCHES, dpi=_DOTS, layout="constrained"), io.BytesIO()
    draw(figure.add_subplot())
    figure.savefig(file, format="png", metadata={"Software": None})
    return Picture(file.getvalue(), alt, caption)


def require_replaceable(path: Path) -> None:
    """Raise where there is a file that is no page of dkfm's.

    Raises
    ------
    StoreExistsError
        It is left untouched.
    """
    local.require_signature(path, GENERATOR.encode(), "page")


def write_page(path: str | Path, text: str) -> None:
    """Write a page, whole, in place of an earlier one of dkfm's; `text` has the line `GENERATOR`."""
    target = Path(path).resolve()  # a link stays one
    require_replaceable(target)
    with local.new_file(target, target.parent) as new:
        new.file.write(text.encode("utf-8"))
        new.commit()


def render_page(title: str, words: Sequence[str], table: Sequence[Sequence[str]], sections: Sequence[Section]) -> str:
    """Return a page.

    Parameters
    ----------
    title : str
    words : sequence of str
        Paragraphs below the table.
    table : sequence of rows of str
        The first is the header.
    sections : sequence of Section

    Examples
    --------
    >>> from dkfm.comparison.html_page import render_page
    >>> "<td>&lt;b&gt;</td>" in render_page("Kernels", [], [["kernel"], ["<b>"]], [])
    True
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("dkfm.comparison", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return pages.get_template("page.html.jinja").render(title=title, words=words, table=table, sections=sections)
