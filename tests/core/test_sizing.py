"""Jobs on paper: the tasks that a plan has, machines that are enough and no more, and the table of cluster/README."""

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm.core.chunking import MAX_CHUNKS
from dkfm.core.display.quantities import format_bytes, format_seconds
from dkfm.core.sizing import _PLANNED_SHARE, Constants, sizing
from dkfm.errors import BudgetError, InvalidInputError
from dkfm.execution.memory import _SPILL_SHARE, thread_budget
from dkfm.kernels import Gaussian
from dkfm.numerics.model import Head, Model
from dkfm.scoring import planning
from dkfm.sources.memory import MemorySource

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"


def zeros(*shape, dtype="f8"):
    return np.broadcast_to(np.zeros(1, dtype), shape)


@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("machines", [1, 3])
@pytest.mark.parametrize(("rows", "n", "d", "p"), [(3, 1, 1, 1), (10**6, 1000, 50, 10), (10**7, 4000, 784, 100)])
def test_a_job_on_paper_has_the_tasks_and_the_bytes_of_a_plan(rows, n, d, p, machines, dtype):
    head = Head(zeros(n, p, dtype=dtype), zeros(p, dtype=dtype))
    model, source = Model(Gaussian(), zeros(n, d, dtype=dtype), {"scores": head}), MemorySource(zeros(rows, d))
    plan = planning.plan_with_model_in_memory(model, ["scores"], source, threads=16 * machines)
    free = Constants(scheduler_seconds=0.0)
    found = sizing(rows, n, d, p, machines=machines, itemsize=model.dtype.itemsize, constants=free)
    assert not found.asked
    assert (found.chunk_rows, found.tasks, found.model_bytes) == (plan.chunk_rows, plan.chunks, plan.model_bytes)
    assert found.written_bytes == plan.output_bytes
    assert found.task_bytes == pytest.approx(plan.task_bytes, rel=0.05)
    assert found.worker_bytes == pytest.approx(plan.worker_bytes(16, 0), rel=0.05)


sizes = {"rows": st.integers(1, 10**11), "n": st.integers(1, 30_000), "d": st.integers(1, 2000)}


@given(**sizes, width=st.integers(1, 1000), hours=st.floats(0.1, 100.0), scheduler=st.floats(0, 1e-2))
def test_the_machines_are_enough_and_hardly_more_for_a_job_that_a_plan_takes(rows, n, d, width, hours, scheduler):
    constants = Constants(scheduler_seconds=scheduler)
    found = sizing(rows, n, d, width, hours=hours, constants=constants)
    assert found.hours <= hours
    assert found.tasks <= MAX_CHUNKS
    assert found.hours * 3600 >= found.tasks * scheduler * (1 - 1e-9)
    assert found.hours * found.threads >= found.core_hours * (1 - 1e-9)
    work = found.core_hours / (hours * found.cores)
    assert found.machines <= 1.03 * work + 1  # threads are evenly busy
    if found.tasks > found.threads and found.asked and found.tasks < MAX_CHUNKS / 2:
        assert found.scheduler_share <= 0.26


def test_tasks_are_larger_only_where_the_scheduler_would_be_busy():
    small, large = (sizing(rows, 20_000, 784, 100) for rows in (10**8, 10**10))
    assert not small.asked
    assert large.asked
    unasked = sizing(10**10, 20_000, 784, 100, machines=large.machines, chunk_rows=small.chunk_rows)
    assert large.scheduler_share <= 0.25
    assert unasked.scheduler_share > 1
    assert unasked.hours == pytest.approx(unasked.tasks * Constants().scheduler_seconds / 3600)
    assert unasked.threads > unasked.scheduler_threads
    assert large.threads < large.scheduler_threads / 4


def test_where_the_scheduler_is_the_limit_the_refusal_says_how_many_rows_a_task_leave_it_time():
    with pytest.raises(BudgetError, match="the scheduler is the limit") as refusal:
        sizing(10**10, 20_000, 784, 100, chunk_rows=600)
    rows = int(re.search(r"chunk_rows of (\d+)", str(refusal.value))[1])
    assert sizing(10**10, 20_000, 784, 100, chunk_rows=rows).hours <= 1
    with pytest.raises(BudgetError, match=f"on any number of machines, and {format_seconds(1.0)} are there: use fewer"):
        sizing(10**6, 20_000, 784, 100, chunk_rows=10**5, hours=1 / 3600)


def test_a_limit_has_room_for_python_and_what_dask_keeps_free():
    size = sizing(10**8, 4000, 784, 10)
    assert _PLANNED_SHARE == _SPILL_SHARE
    assert size.memory_limit * _PLANNED_SHARE == pytest.approx(size.worker_bytes + 2e8)
    assert thread_budget(size.memory_limit, size.cores, size.model_bytes, int(2e8)) >= size.task_bytes
    printed = str(size).splitlines()
    assert printed[0] == "rows      100,000,000 of 784 columns, against 4,000 landmarks, to 10 columns"
    assert f"a limit of {format_bytes(size.memory_limit)}" in str(size)
    assert "chunk_rows" not in str(size)
    assert "20,000 of 5,000 rows, with chunk_rows=5000" in str(sizing(10**8, 4000, 784, 10, chunk_rows=5000))


def test_what_is_no_number_of_a_job_is_refused():
    for wrong in ({"rows": 0}, {"n": 2.5}, {"cores": -1}, {"chunk_rows": -5}, {"machines": -1}, {"itemsize": 0}):
        with pytest.raises(InvalidInputError, match=f"{next(iter(wrong))} must be a positive integer"):
            sizing(**{"rows": 10, "n": 1, "d": 1, "width": 1, **wrong})
    for optional in ("chunk_rows", "machines"):
        with pytest.raises(InvalidInputError, match=f"{optional} must be a positive integer, and is 0"):
            sizing(10, 1, 1, 1, **{optional: 0})
    for hours in (0, -1.0, math.nan):
        with pytest.raises(InvalidInputError, match="hours must be a positive number"):
            sizing(10, 1, 1, 1, hours=hours)


def test_constants_are_those_of_a_report_and_what_it_lacks_are_those_of_paper():
    told = {name: 3.0 * value for name, value in asdict(Constants()).items()}
    assert asdict(Constants.from_report({"constants": told, "machine": {}})) == told
    assert Constants.from_report({"constants": {}}) == Constants()


@pytest.mark.parametrize(
    "report",
    [{}, {"constants": [1]}, {"constants": {"of_nature": 1.0}}]
    + [{"constants": {"read_bytes": value}} for value in (0, -1.0, math.inf, math.nan, None, "1", True)],
)
def test_a_report_without_constants_or_with_other_ones_is_refused(report):
    with pytest.raises(InvalidInputError, match=r"constants|The constant read_bytes must be a number"):
        Constants.from_report(report)


def test_the_table_of_sizes_is_that_of_the_constants_beside_it(tmp_path):
    text = (CLUSTER / "README.md").read_text()
    constants = re.search(r"```json\n(.*?\n)```\n", text, re.S)[1]
    (tmp_path / "bench.json").write_text(constants)
    command = [sys.executable, str(CLUSTER / "sizing.py"), str(tmp_path / "bench.json")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert printed.startswith(constants)
    assert len(printed.removeprefix(constants).splitlines()) >= 8
    assert f"\n\n{printed.removeprefix(constants)}\n" in text
    assert json.loads(constants)["constants"].keys() == asdict(Constants()).keys()
