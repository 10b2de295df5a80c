"""What a local cluster sets of Dask's configuration, in a module that shares no cluster."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from dkfm.errors import ClusterError
from dkfm.execution.clusters import current_client, local


def test_what_a_user_has_set_of_dask_stays():
    import dask

    tick, trim = "distributed.admin.tick.interval", "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_"
    assert set(local.select_default_overrides(local._SETTINGS)) == set(local._SETTINGS), "these are Dask's defaults"
    with dask.config.set({tick: "5s", trim: 7}):
        assert set(local._SETTINGS) - set(local.select_default_overrides(local._SETTINGS)) == {tick, trim}


def test_an_older_dask_is_refused_with_both_versions_before_a_cluster_is_started(monkeypatch):
    oldest = re.search(r"dask\[.*\]>=([\d.]+)", (Path(__file__).parents[2] / "pyproject.toml").read_text())[1]
    current_client.require_dask_version()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2025.1.0")
    with pytest.raises(ClusterError, match=f"needs dask {oldest} or newer, and 2025.1.0 is installed"):
        local.local_cluster().__enter__()
