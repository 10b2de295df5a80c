"""Count recorded warnings: `pytest.warns` also records those that pyproject.toml ignores, which other tests leave."""

from dkfm.errors import DkfmWarning


def own_warnings(recorded):
    """Return the recorded warnings that are of dkfm, in order."""
    return [one for one in recorded if issubclass(one.category, DkfmWarning)]
