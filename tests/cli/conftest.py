"""Commands run in the process of the tests, each as if it were the first."""

import pytest

from dkfm.cli import failures


@pytest.fixture(autouse=True)
def no_command_before(monkeypatch):
    """Forget the command line of an earlier test, which may have had --json."""
    monkeypatch.setattr(failures, "_options", ())
