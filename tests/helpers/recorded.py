"""Count recorded warnings: `pytest.warns` also records those that pyproject.toml ignores, which other tests leave."""


def drop_resource_warnings(recorded):
    """Return the recorded warnings, without those of sockets that distributed leaves on a busy machine."""
    return [one for one in recorded if not issubclass(one.category, ResourceWarning)]
