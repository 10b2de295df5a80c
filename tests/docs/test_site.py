"""The built pages open from disk without a network: nothing complains, search finds, nothing scrolls sideways."""

import os
from pathlib import Path

import pytest

from helpers.browser import open_page

pytestmark = pytest.mark.browser

MAX_BYTES = 1_000_000
"""Largest page, without its pictures."""

PHONE = 390
"""Width of a small telephone, in pixels."""

LOGGED = "[PST]"
"""What the theme writes to the console in passing; it is no error."""

SEARCHES = {
    "centring": "explanation/mathematics",
    "append": "user_guide/batch_scoring",
    "error bound": "explanation/mathematics",
    "which basis": "user_guide/bases",
}
"""Words, and a page that has to be among the results."""


@pytest.fixture(scope="module")
def site():
    built = os.environ.get("DKFM_SITE")
    if built is None:
        pytest.skip("DKFM_SITE names no folder of built pages.")  # reason: a build takes minutes
    return Path(built)


@pytest.fixture(scope="module")
def pages(site):
    return sorted(page for page in site.rglob("*.html") if "_static" not in page.parts)


def test_there_is_a_page_for_each_source_and_none_is_large(site, pages):
    sources = list(Path(__file__).parents[2].glob("docs/*/*.md"))
    assert len(pages) > len(sources) > 25
    assert {page for page in pages if page.stat().st_size > MAX_BYTES} == set()


def test_no_page_complains_or_scrolls_sideways_on_a_telephone(site, pages):
    wide = []
    with open_page((site / "index.html").as_uri(), width=PHONE, height=800) as (page, complaints):
        for path in pages:
            page.goto(path.as_uri())
            if page.evaluate("document.documentElement.scrollWidth") > PHONE:
                wide.append(str(path.relative_to(site)))
    assert wide == []
    assert [text for text in complaints if not text.startswith(LOGGED)] == []


@pytest.mark.parametrize("words", SEARCHES)
def test_search_finds(site, words):
    with open_page(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}") as (page, complaints):
        page.wait_for_selector("#search-results li a")
        found = page.eval_on_selector_all("#search-results li a", "links => links.map(link => link.href)")
    assert any(SEARCHES[words] in link for link in found)
    assert [text for text in complaints if not text.startswith(LOGGED)] == []


def test_formulas_are_mathml_and_need_no_script(site):
    text = (site / "explanation" / "mathematics.html").read_text(encoding="utf-8")
    assert text.count("<math") > 100
    assert "MathJax" not in text
