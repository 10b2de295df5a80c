"""The job that is disturbed, and what all faults came to."""

import pytest

from helpers import harness


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    return harness.Job.made(tmp_path_factory.mktemp("job"))


@pytest.fixture
def site(tmp_path):
    with harness.Site(tmp_path / "site") as started:
        yield started


def pytest_terminal_summary(terminalreporter):
    if harness.TOTALS.faults:
        terminalreporter.write_line(str(harness.TOTALS))
