"""One HTML file that needs nothing else: words, a table and pictures; every text is escaped.

Its policy forbids scripts and whatever is not in the file, so a browser asks no network for anything.
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from dkfm.errors import MissingExtraError
from dkfm.files import local

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GENERATOR = '<meta name="generator" content="dkfm">'
"""What a page of dkfm's says of itself, and by which one is known that may be replaced."""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; overflow-wrap: anywhere; margin-top: 2.5rem; }
p { max-width: 46rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #d0d0d0; padding: .3rem .5rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 7rem; overflow-wrap: anywhere; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; flex: 0 1 26rem; min-width: 0; } img { width: 100%; height: auto; }
figcaption { font-size: .875rem; color: #444; }
"""
_INCHES, _DOTS = (4.8, 3.8), 110


@dataclass(frozen=True)
class Picture:
    """A PNG, with words for who sees it and for who does not."""

    png: bytes
    alt: str
    caption: str


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
    >>> from dkfm.page import picture
    >>> picture(lambda ax: ax.plot([1, 2]), "a line", "It rises.").png[1:4]
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
        new.keep()


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
    >>> from dkfm.page import document
    >>> "<td>&lt;b&gt;</td>" in document("Kernels", [], [["kernel"], ["<b>"]], [])
    True
    """
    header, *rows = table
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{GENERATOR}
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
<link rel="icon" href="data:,">
</head>
<body>
<h1>{escape(title)}</h1>
<div class="wide" tabindex="0">
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{lines}
</tbody>
</table>
</div>
{_paragraphs(words)}
{"".join(map(_section, sections))}</body>
</html>
"""


def _section(section: Section) -> str:
    figures = "\n".join(map(_figure, section.pictures))
    heading = f"<h2>{escape(section.title)}</h2>"
    return (
        f'<section>\n{heading}\n{_paragraphs(section.words)}\n<div class="pictures">\n{figures}\n</div>\n</section>\n'
    )


def _paragraphs(words: Sequence[str]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in words)


def _figure(shown: Picture) -> str:
    data = base64.b64encode(shown.png).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(shown.alt)}">'
    return f"<figure>{image}<figcaption>{escape(shown.caption)}</figcaption></figure>"
