"""The job that is disturbed, which cases of a test are run, and what all faults came to."""

from dataclasses import asdict
from pathlib import Path

import pytest

from helpers import harness
from helpers.default_cases import list_left_out_cases


@pytest.hookimpl(trylast=True)  # after -k and -m: a case that is asked for by its name runs
def pytest_collection_modifyitems(config, items):
    """Keep one case for each value of a parameter in tests that `numbers` parametrizes; DKFM_FAULTS=all keeps all."""
    if harness.WHOLE_CAMPAIGN:
        return
    folder = Path(__file__).parent
    parametrized = [item for item in items if item.path.is_relative_to(folder) and hasattr(item, "callspec")]
    left_out = list_left_out_cases([item for item in parametrized if "faults" in item.callspec.params])
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


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
