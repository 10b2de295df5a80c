"""The job that is disturbed, and what all faults came to."""

from dataclasses import asdict

import pytest

from helpers import harness


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    return harness.Job.made(tmp_path_factory.mktemp("job"))


@pytest.fixture
def site(tmp_path):
    with harness.Site(tmp_path / "site") as started:
        yield started


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist, whose workers count what they did themselves
        session.config.workeroutput["faults"] = asdict(harness.TOTALS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for name, count in getattr(node, "workeroutput", {}).get("faults", {}).items():
        setattr(harness.TOTALS, name, getattr(harness.TOTALS, name) + count)


def pytest_terminal_summary(terminalreporter):
    if harness.TOTALS.faults:
        terminalreporter.write_line(str(harness.TOTALS))
