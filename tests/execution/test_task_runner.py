"""The window and the watchdog, on an executor that does as it is told: deaths, silence, copies, errors that pass."""

import itertools
from collections import deque
from types import SimpleNamespace

import pytest

from dkfm.errors import (
    ClusterError,
    InvalidInputError,
    StalledError,
    UnfitWorkerError,
    UnreachableError,
    WorkerDiedError,
)
from dkfm.execution import executors, task_runner
from dkfm.execution.clusters import current_client as clusters
from dkfm.execution.executors import ExecutorHealth, FinishedTask


class Scripted:
    """Tasks end as `outcome(number, copy)` says: with a value, an error, or not at all (None)."""

    threads = 2

    def __init__(self, outcome, health=None):
        self.outcome, self.state = outcome, health or ExecutorHealth(running_addresses=("a", "b"))
        self.waiting, self.submitted = deque(), []

    def submit(self, key, function, *arguments, workers=None):
        self.submitted.append((*key[1:], workers))
        ended = self.outcome(key[1], key[2])
        if ended is not None:
            wrong = isinstance(ended, BaseException)
            self.waiting.append(FinishedTask(key, None if wrong else ended, ended if wrong else None))

    def wait_for_task(self, timeout):
        return self.waiting.popleft() if self.waiting else None

    def update_health(self):
        return self.state

    def exclude_worker(self, error):
        self.unfit = [*getattr(self, "unfit", []), error.worker]
        return "the last" not in self.unfit

    def cancel(self, *, wait=True):
        pass


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A second passes with every look at the clock."""
    seconds = itertools.count()
    monkeypatch.setattr(task_runner.time, "monotonic", lambda: float(next(seconds)))


def go(executor, count, **options):
    found = []
    tally = task_runner.run_tasks(
        executor, "test", abs, ((i,) for i in range(count)), count, False, found.append, **options
    )
    return tally, found


def test_results_come_once_each_and_nothing_is_counted():
    tally, found = go(Scripted(lambda number, copy: number), 20)
    assert sorted(found) == list(range(20))
    assert tally == task_runner.Tally()


def test_a_task_of_a_worker_that_is_not_fit_is_run_by_another():
    executor = Scripted(lambda number, copy: UnfitWorkerError("b", "is not fit.") if copy < number % 3 else number)
    tally, found = go(executor, 9)
    assert sorted(found) == list(range(9))
    assert set(executor.unfit) == {"b"}
    assert tally == task_runner.Tally()


def test_where_no_worker_is_fit_the_job_ends_with_its_name():
    executor = Scripted(lambda number, copy: UnfitWorkerError("the last", "is not fit."))
    with pytest.raises(UnfitWorkerError, match="The worker the last is not fit"):
        go(executor, 9)


def test_what_a_task_raises_ends_the_job():
    executor = Scripted(lambda number, copy: InvalidInputError("Seven.") if number == 7 else number)
    with pytest.raises(InvalidInputError, match="Seven"):
        go(executor, 20)


def test_a_store_that_does_not_answer_is_asked_again_but_not_for_ever():
    tally, found = go(Scripted(lambda number, copy: number if copy == 2 else UnreachableError("500.")), 5)
    assert (sorted(found), tally.retries) == ([0, 1, 2, 3, 4], 10)
    never = Scripted(lambda number, copy: UnreachableError("500.") if number == 3 else number)
    with pytest.raises(UnreachableError, match="500"):
        go(never, 5)
    assert max(copy for number, copy, _ in never.submitted if number == 3) < 5


def test_tasks_whose_workers_died_are_run_alone_when_all_others_are_done():
    died = WorkerDiedError("All of them.")
    executor = Scripted(
        lambda number, copy: died if number in (2, 5) and (number == 5 or not copy_of(executor, 2)) else number
    )
    tally, found = go(executor, 8)
    assert (sorted(found), tally.fatal_task_numbers, tally.retries) == ([0, 1, 2, 3, 4, 6, 7], [5], 4)
    assert [number for number, _, _ in executor.submitted[-4:]] == [2, 5, 5, 5]
    assert len(set(executor.submitted)) == len(executor.submitted)  # no key twice: a cluster may have its old end


def copy_of(executor, number):
    """Return whether a task was submitted before."""
    return sum(1 for submitted, _, _ in executor.submitted if submitted == number) > 1


def hold(executor, number):
    """Let a silent worker hold a task of the run that begins next."""
    submit = executor.submit

    def submit_and_hold(key, *arguments, workers=None):
        if key[1:] == (number, 0):
            executor.state = ExecutorHealth(running_addresses=("b",), silent_addresses=("a",), stuck_tasks=(key,))
        submit(key, *arguments, workers=workers)

    executor.submit = submit_and_hold


def test_a_task_that_a_silent_worker_holds_has_one_copy_on_the_others_and_counts_once():
    executor = Scripted(lambda number, copy: None if number == 1 and copy == 0 else number)
    hold(executor, 1)
    late = executor.submit

    def submit(key, function, *arguments, workers=None):
        late(key, function, *arguments, workers=workers)
        if key[1:] == (1, 1):  # the first one ends after all, as the second does
            executor.waiting.append(FinishedTask((key[0], 1, 0), 1))

    executor.submit = submit
    tally, found = go(executor, 3, stall_seconds=1000.0)
    assert sorted(found) == [0, 1, 2]
    assert [entry for entry in executor.submitted if entry[0] == 1] == [(1, 0, None), (1, 1, ("b",))]
    assert tally.retries == 1


def test_an_error_of_one_copy_is_none_of_the_job_while_another_is_under_way():
    executor = Scripted(lambda number, copy: None if copy == 0 else number)
    hold(executor, 0)
    take = executor.submit

    def submit(key, *arguments, workers=None):
        if key[2] == 1:
            executor.waiting.append(FinishedTask((key[0], 0, 0), None, InvalidInputError("Late.")))
        take(key, *arguments, workers=workers)

    executor.submit = submit
    assert go(executor, 1, stall_seconds=1000.0)[1] == [0]


def test_a_task_of_an_earlier_run_that_is_stuck_has_no_copy_in_this_one(monkeypatch):
    monkeypatch.setattr(task_runner, "_HEALTH_INTERVAL", 0.0)
    executor = Scripted(lambda number, copy: number)
    executor.state = ExecutorHealth(running_addresses=("b",), silent_addresses=("a",), stuck_tasks=(("earlier", 2, 0),))
    tally, _ = go(executor, 6)
    assert (tally.retries, len(executor.submitted)) == (0, 6)


def test_results_of_an_earlier_run_are_not_taken_for_this_one_s():
    executor = Scripted(lambda number, copy: number)
    executor.waiting.append(FinishedTask(("earlier", 0, 0), "not this"))
    assert sorted(go(executor, 3)[1]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("health", "words"),
    [
        (ExecutorHealth(answers=False), "the scheduler does not answer"),
        (ExecutorHealth(), "there is no worker"),
        (ExecutorHealth(paused_addresses=("a", "b")), "paused, without memory"),
        (ExecutorHealth(silent_addresses=("tcp://a",)), "of tcp://a nothing is heard"),
        (ExecutorHealth(running_addresses=("a",)), "give them a longer stall timeout"),
    ],
)
def test_silence_ends_in_a_sentence_that_says_what_is_known(health, words):
    with pytest.raises(StalledError, match=words) as caught:
        go(Scripted(lambda number, copy: None if number == 3 else number, health), 9, stall_seconds=50.0)
    assert "8 of 9 are done" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_limit_a_task_takes_its_time_while_a_worker_is_well(monkeypatch):
    executor = Scripted(lambda number, copy: None)
    looks = 0

    def update_health():
        nonlocal looks
        looks += 1
        if looks == 1000:
            executor.waiting.append(FinishedTask((executor.name, 0, 0), 0))
        return ExecutorHealth(running_addresses=("a",)) if looks <= 1000 else ExecutorHealth()

    submit = executor.submit

    def noted(key, *arguments, workers=None):
        executor.name = key[0]
        submit(key, *arguments, workers=workers)

    executor.submit, executor.update_health = noted, update_health
    assert go(executor, 1)[1] == [0]
    executor = Scripted(lambda number, copy: None, ExecutorHealth())
    with pytest.raises(StalledError, match="there is no worker"):
        go(executor, 1)


class Client:
    """A scheduler of two workers, one of which says nothing any more."""

    asynchronous, status = False, "running"

    def __init__(self):
        self.now, self.held = 0, {}


def test_a_worker_is_silent_when_its_last_sign_of_life_stays_the_same(monkeypatch):
    client, clock = Client(), itertools.count(step=15)
    monkeypatch.setattr(executors.time, "monotonic", lambda: float(next(clock)))

    def facts(_):
        client.now += 1
        seen = {"a": 1, "b": client.now, "c": client.now}
        return {
            address: {"last_seen": last, "status": "paused" if address == "c" else "running", "nthreads": 3}
            for address, last in seen.items()
        }

    asked = []
    monkeypatch.setattr(executors, "fetch_workers", facts)
    monkeypatch.setattr(executors, "wait_for_workers", lambda client: None)
    monkeypatch.setattr(
        executors, "ask_scheduler", lambda *_, workers: asked.append(workers) or {"a": [("x", 1, 0), "y"]}
    )
    executor = executors.ClientExecutor(client)
    assert executor.threads == 6
    health = executor.update_health()
    assert (health.running_addresses, health.paused_addresses, health.silent_addresses) == (("a", "b"), ("c",), ())
    health = executor.update_health()
    assert (health.running_addresses, health.paused_addresses, health.silent_addresses) == (("b",), ("c",), ("a",))
    assert executor.threads == 3
    assert asked[-1] == ["c", "a"]
    assert health.stuck_tasks == ()  # no task of this executor


def test_a_result_that_does_not_come_is_made_elsewhere_while_some_worker_is_silent(monkeypatch):
    client, clock = Client(), itertools.count(step=15)
    monkeypatch.setattr(executors.time, "monotonic", lambda: float(next(clock)))

    def facts(_):
        client.now += 1
        return {a: {"last_seen": s, "status": "running", "nthreads": 1} for a, s in (("a", 1), ("b", client.now))}

    monkeypatch.setattr(executors, "fetch_workers", facts)
    monkeypatch.setattr(executors, "wait_for_workers", lambda client: None)
    monkeypatch.setattr(executors, "ask_scheduler", lambda *_, workers: {})
    executor = executors.ClientExecutor(client)
    future = type("Future", (), {"key": ("x", 3, 0), "status": "finished", "add_done_callback": lambda *_: None})()
    executor._pending[future.key] = future
    executor._done.put((future, executors._NO_RESULT))
    assert executor.wait_for_task(1) is None
    assert executor.update_health().stuck_tasks == ()  # "a" may only be slow
    assert executor.update_health().stuck_tasks == (future.key,)
    executor._done.put((future, 7))
    assert executor.wait_for_task(1) == FinishedTask(future.key, 7)
    assert executor.update_health().stuck_tasks == ()


def test_heartbeats_of_a_large_cluster_come_less_often(monkeypatch):
    client, clock = Client(), itertools.count(step=15)
    monkeypatch.setattr(executors.time, "monotonic", lambda: float(next(clock)))
    facts = {str(i): {"last_seen": 1, "status": "running", "nthreads": 1} for i in range(4000)}
    monkeypatch.setattr(executors, "fetch_workers", lambda client: facts)
    monkeypatch.setattr(executors, "wait_for_workers", lambda client: None)
    monkeypatch.setattr(executors, "ask_scheduler", lambda *_, workers: {})
    executor = executors.ClientExecutor(client)
    silent = [len(executor.update_health().silent_addresses) for _ in range(5)]
    assert silent == [0, 0, 0, 0, 4000]


def test_a_scheduler_that_does_not_answer_is_told(monkeypatch):
    seconds = itertools.count(step=10)
    monkeypatch.setattr(clusters, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    monkeypatch.setattr(clusters, "fetch_workers", lambda client: None)
    with pytest.raises(ClusterError, match="does not answer"):
        clusters.wait_for_workers(Client(), 3600)
    assert next(seconds) < 100


def test_a_late_answer_of_the_scheduler_does_not_end_a_wait_for_workers(monkeypatch):
    answers, facts = iter([None, None]), {"a": {"nthreads": 1}}
    monkeypatch.setattr(clusters, "fetch_workers", lambda client: next(answers, facts))
    assert clusters.wait_for_workers(Client(), 3600) == facts


@pytest.mark.parametrize(("status", "message"), [("closed", "client is closed"), ("connecting", "does not answer")])
def test_a_client_without_a_scheduler_is_told_at_once(status, message):
    client = Client()
    client.status = status
    with pytest.raises(ClusterError, match=message):
        clusters.wait_for_workers(client)


def test_a_process_that_was_stopped_is_not_taken_for_stalled(monkeypatch):
    now, pauses = [0.0], iter([1000.0] * 3)

    def wait_for_task(timeout):
        now[0] += timeout + next(pauses, 0)

    monkeypatch.setattr(task_runner.time, "monotonic", lambda: now[0])
    executor = Scripted(lambda number, copy: number)
    executor.wait_for_task = wait_for_task
    with pytest.raises(StalledError, match="No task finished for 60 seconds"):
        go(executor, 1, stall_seconds=60)
    assert next(pauses, None) is None


def test_a_slow_look_at_other_things_is_no_excuse_for_a_stall(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(task_runner.time, "monotonic", lambda: now[0])

    def look():
        now[0] += 5

    with pytest.raises(StalledError, match="No task finished for 65 seconds"):
        go(Scripted(lambda number, copy: None), 1, on_idle=look, stall_seconds=60)


def test_a_task_that_waits_for_a_result_starts_after_it():
    executor, done = Scripted(lambda number, copy: number), []

    def tasks():
        for number in range(6):
            while number > len(done):  # all before it have ended
                yield None
            yield (number,)

    task_runner.run_tasks(executor, "test", abs, tasks(), 6, False, done.append)
    assert done == list(range(6))


def test_tasks_that_wait_for_one_whose_worker_died_follow_it_when_it_has_run_alone():
    executor, done = Scripted(lambda number, copy: number if number != 1 or copy else WorkerDiedError("It.")), []

    def tasks():
        yield from ((0,), (1,))
        while 1 not in done:
            yield None
        yield from ((2,), (3,))

    tally = task_runner.run_tasks(executor, "test", abs, tasks(), 4, False, done.append)
    assert (done, tally.retries, tally.fatal_task_numbers) == ([0, 1, 2, 3], 1, [])
    fatal, done = Scripted(lambda number, copy: number if number != 1 else WorkerDiedError("It.")), []
    assert task_runner.run_tasks(fatal, "test", abs, tasks(), 4, False, done.append).fatal_task_numbers == [1]
    assert done == [0]
