"""Write mathematics as MathML, which browsers show without a script and without a network."""

from latex2mathml.converter import convert


def visit_math(self, node):
    """Write a formula inside a line."""
    self.body.append(convert(node.astext()))
    raise_skip()


def visit_math_block(self, node):
    """Write a formula of its own, with its number, if it has one."""
    number = f'<span class="equation-number">({node["number"]})</span>' if node["number"] else ""
    anchor = f' id="{node["ids"][0]}"' if node["ids"] else ""
    self.body.append(f'<div class="math"{anchor}>{convert(node.astext(), display="block")}{number}</div>')
    raise_skip()


def raise_skip():
    """Skip the children of a node: its text was written."""
    from docutils.nodes import SkipNode

    raise SkipNode


def setup(app):
    """Register the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
