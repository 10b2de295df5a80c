"""Configure Sphinx, which builds these pages: `sphinx-build -n -W docs docs/_build`."""

import re
import sys
from pathlib import Path

import dkfm

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_extensions"))

project = "dkfm"
author = "The dkfm developers"
copyright = "The dkfm developers"  # noqa: A001  # Sphinx reads this name
version = release = dkfm.__version__

extensions = [
    "mathml",
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx_click",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery/*.ipynb", "gallery/*.py", "gallery/*.zip", "gallery/*.md5"]
templates_path = ["_templates"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
default_role = "literal"
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "none"  # the docstrings say it in words
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# Inventories of names lie here, so that the build needs no network; links lead to the pages on the web.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", str(DOCS / "inventories" / "python.inv")),
    "sklearn": ("https://scikit-learn.org/stable/", str(DOCS / "inventories" / "sklearn.inv")),
}

sphinx_gallery_conf = {
    "examples_dirs": str(DOCS.parent / "examples"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"/\d\d_",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "abort_on_example_error": True,
}

smartquotes = False  # quotes and dashes of commands are copied

html_theme = "pydata_sphinx_theme"
html_title = "dkfm"
html_static_path = ["_static"]
html_css_files = ["dkfm.css"]
html_context = {"default_mode": "auto"}
html_show_search_summary = False  # a browser reads no other page from disk
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"index": []}
html_theme_options = {
    "navigation_with_keys": False,
    "show_nav_level": 2,
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}


def setup(app):
    """Leave out the methods that scikit-learn writes into every estimator: its own reference has them."""
    generated = re.compile(r"set_\w+_request|get_metadata_routing|set_output")

    def skip(app, what, name, item, skips, options):
        return True if generated.fullmatch(name) else None

    app.connect("autodoc-skip-member", skip)
