"""Render kernels and estimators as HTML for notebooks. All text is escaped."""

import re
from collections.abc import Mapping
from html import escape

_CARD = """<style>
table.dkfm-card{border-collapse:collapse;border:1px solid rgba(128,128,128,.5);margin:.5em 0;color:inherit;
background:transparent;font-size:inherit}
table.dkfm-card caption{caption-side:top;text-align:left;font-weight:bold;padding:.2em 0;color:inherit}
table.dkfm-card tr,table.dkfm-card tr:hover{background:transparent}
table.dkfm-card th,table.dkfm-card td{text-align:left;vertical-align:top;padding:.2em .7em;border:0;
white-space:normal;max-width:60em;overflow-wrap:anywhere;color:inherit}
table.dkfm-card th{font-weight:normal;opacity:.75;white-space:nowrap}
table.dkfm-card code{background:transparent;color:inherit;padding:0}
</style><table class="dkfm-card"><caption>{{ title }}</caption><tbody>
<tr><th scope="row">kernel</th><td><code>{{ kernel | safe }}</code></td></tr>
{%- for name, text in facts.items() %}
<tr><th scope="row">{{ name }}</th><td>{{ text }}</td></tr>
{%- endfor %}</tbody></table>"""
"""A template of Jinja2. Its style applies to one class, and inherits the colours of the page."""

_NUMBER = r"[-+.\de]+, "


def html_card(title: str, kernel: str, facts: Mapping[str, str]) -> str:
    """Return an HTML table with a title, a kernel as a formula, and facts by name.

    Parameters
    ----------
    title : str
        Caption of the table.
    kernel : str
        The repr of the kernel.
    facts : mapping of str to str
        Cells by the name of their row.

    Examples
    --------
    >>> from dkfm.core.display.html_cards import html_card
    >>> html_card("KernelPCA", "Linear()", {"rows": "a < b"}).endswith("<td>a &lt; b</td></tr></tbody></table>")
    True
    """
    from jinja2 import Environment

    card = Environment(autoescape=True).from_string(_CARD)
    return card.render(title=title, kernel=html_formula(kernel), facts=facts)


def html_formula(kernel: str) -> str:
    """Return the repr of a kernel as an HTML formula: dots for products, superscripts for powers, long tuples cut.

    Examples
    --------
    >>> from dkfm.core.display.html_cards import html_formula
    >>> html_formula("0.5 * (Linear() + Gaussian(sigma=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0))) ** 2")
    '0.5 · (Linear() + Gaussian(sigma=(1.0, 2.0, …, 6.0)))<sup>2</sup>'
    """
    text = re.sub(rf"((?:{_NUMBER}){{2}})(?:{_NUMBER}){{3,}}", r"\1…, ", escape(kernel))
    return re.sub(r" \*\* (\d+)", r"<sup>\1</sup>", text).replace(" * ", " · ")
