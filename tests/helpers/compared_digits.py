"""What the tests of compare share."""

from html.parser import HTMLParser

from dkfm import kernels

NAMES = {"wide <b>&": kernels.Gaussian(20.0), "linear": kernels.Linear()}


K1 = kernels.Polynomial(9, scale=1 / 784)


class Parsed(HTMLParser):
    """What a page holds, by tag."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self._cell = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._cell = tag in ("td", "h2")

    def handle_data(self, data):
        if self._cell:
            self.cells.append(data)
            self._cell = False

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]
