"""A store that fails is asked again, after growing pauses, for two minutes; or as often as the user says."""

from types import SimpleNamespace

import numpy as np
import pytest
import zarr

from dkfm.errors import StoreError, UnreachableError
from dkfm.files import fsspec_access
from dkfm.files.object_store import Remote
from dkfm.sources.opening import open_source
from helpers import s3_server as s3

pytest.importorskip("s3fs", reason="the README's environment of tests has no extra s3; .ci/run has")


class Clock:
    """A time that passes only while somebody sleeps."""

    def __init__(self):
        self.now, self.pauses = 0.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(fsspec_access, "time", clock)
    return clock


@pytest.fixture
def files():
    from fsspec.implementations.memory import MemoryFileSystem

    return MemoryFileSystem()


class Failing:
    """A request that fails until a time of a clock, and then gives what it is said to give."""

    def __init__(self, clock, until, error):
        self.clock, self.until, self.error, self.asked = clock, until, error, 0

    def __call__(self, *_, **__):
        self.asked += 1
        if self.clock.now < self.until:
            raise self.error
        return "answer"


def answered(status):
    """An error as botocore raises it for a status."""
    error = OSError(f"status {status}")
    error.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {}}
    return error


def slow_down():
    error = OSError("reduce your request rate")
    error.response = {"ResponseMetadata": {}, "Error": {"Code": "SlowDown"}}
    return error


PASSING = [answered(500), answered(503), answered(429), slow_down(), ConnectionRefusedError("refused"), TimeoutError()]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_a_store_that_fails_for_a_minute_and_a_half_is_waited_for(clock, files, error):
    request = Failing(clock, 90.0, error)
    assert fsspec_access.retry(files, request) == "answer"
    assert 90 <= clock.now <= 90 + fsspec_access._MAX_PAUSE
    assert 8 <= request.asked <= 30


def test_a_store_that_fails_for_good_is_given_up_after_two_minutes(clock, files):
    request = Failing(clock, np.inf, answered(503))
    with pytest.raises(OSError, match="status 503"):
        fsspec_access.retry(files, request)
    assert 120 - fsspec_access._MAX_PAUSE <= clock.now <= 120
    longest = [min(0.5 * 2**i, fsspec_access._MAX_PAUSE) for i in range(len(clock.pauses))]
    assert all(most / 2 <= pause <= most for pause, most in zip(clock.pauses, longest, strict=True))
    assert len(set(clock.pauses)) == len(clock.pauses)  # no two of them alike: they are drawn


@pytest.mark.parametrize("error", [answered(403), answered(404), FileNotFoundError("x"), ValueError("x"), StoreError()])
def test_what_cannot_pass_is_raised_at_once(clock, files, error):
    request = Failing(clock, np.inf, error)
    with pytest.raises(type(error)):
        fsspec_access.retry(files, request)
    assert (request.asked, clock.pauses) == (1, [])


def operations(place):
    """Every operation of a place, the method of the file system's that it needs, and whether it writes."""
    return {
        "cat_file": lambda: place.read("x"),
        "info": lambda: place.size("x"),
        "ls": lambda: list(place.list_folders()),
        "find": lambda: list(place.list_objects()),
        "pipe_file": lambda: place.replace("x", b"data"),
        "pipe_file, once": lambda: place.create("y", b"data"),
        "rm_file": lambda: place.remove_objects("x"),
    }


@pytest.mark.parametrize("name", operations(None))
def test_every_operation_is_as_patient_and_ends_in_one_sentence(clock, files, monkeypatch, name, request):
    place = Remote(f"memory://{request.node.name.partition('[')[0]}")
    method, act = name.partition(",")[0], operations(place)[name]
    place.replace("x", b"data")
    honest = getattr(type(files), method)

    def failing(*args, **options):
        if clock.now < until:
            raise answered(503)
        return honest(*args, **options)

    monkeypatch.setattr(type(files), method, failing)
    until = 100.0
    act()
    assert 100 <= clock.now < 120
    until = np.inf
    with pytest.raises(UnreachableError, match="cannot be") as caught:
        act()
    assert s3.one_sentence(caught.value)


def test_rows_of_a_zarr_array_are_waited_for(clock, files, monkeypatch):
    place = Remote("memory://rows")
    values = np.arange(12.0).reshape(6, 2)
    zarr.create_array("memory://rows/x.zarr", data=values, chunks=(3, 2))
    source = open_source(f"{place.url}/x.zarr")
    honest = type(files).cat_file

    def failing(self, path, *args, **options):
        if clock.now < 50 and "/c/" in path:
            raise answered(503)
        return honest(self, path, *args, **options)

    monkeypatch.setattr(type(files), "cat_file", failing)
    np.testing.assert_array_equal(source.read(slice(0, 6)), values)
    assert clock.now >= 50


@pytest.fixture
def aws(monkeypatch, tmp_path):
    """An environment that says nothing of S3, and a file where AWS's configuration may be."""
    from fsspec.config import conf

    for name in fsspec_access._AWS_VARIABLES:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setitem(conf, "s3", {})
    return SimpleNamespace(file=tmp_path / "config", set=lambda **options: monkeypatch.setitem(conf, "s3", options))


def test_what_the_user_says_of_attempts_is_what_counts(aws, clock, monkeypatch):
    files, _ = fsspec_access.open_filesystem("s3://bucket/x", "x")
    assert files.config_kwargs == {**fsspec_access._S3_CONFIG, "retries": fsspec_access._S3_RETRIES}

    def attempts():
        clock.now, request = 0.0, Failing(clock, np.inf, answered(503))
        with pytest.raises(OSError, match="503"):
            fsspec_access.retry(files, request)
        return request.asked

    assert attempts() > 5
    aws.set(config_kwargs={"retries": {"max_attempts": 7}})
    assert attempts() == 1
    assert fsspec_access._botocore_config_kwargs()["retries"] == {"max_attempts": 7}
    aws.set()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "9")
    assert attempts() == 1
    assert "retries" not in fsspec_access._botocore_config_kwargs()  # which would go before the environment
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    assert attempts() > 5
    aws.file.write_text("[default]\nregion = us-east-1\n[profile patient]\nmax_attempts = 20\n")
    monkeypatch.setenv("AWS_PROFILE", "patient")
    assert attempts() == 1
    assert "retries" not in fsspec_access._botocore_config_kwargs()


@pytest.fixture
def unlimited(one_proxy, monkeypatch, clock):
    """A proxy before the server, of which the user says nothing but its address; botocore asks once."""
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {"endpoint_url": one_proxy.url})
    monkeypatch.setattr(fsspec_access, "_S3_RETRIES", {"total_max_attempts": 1})
    one_proxy.seen, one_proxy.faults = [], []
    return one_proxy


@pytest.mark.s3
@pytest.mark.parametrize("fault", [503, 500, "cut"])
def test_a_server_of_s3_that_fails_nine_times_is_asked_a_tenth_time(place, unlimited, clock, fault):
    place.replace("x", b"data")
    unlimited.faults = [("GET", "/x", fault)] * 9
    assert place.read("x") == b"data"
    assert unlimited.faults == []
    assert clock.pauses


@pytest.mark.s3
@pytest.mark.parametrize(("method", "name"), [("HEAD", "/x"), ("PUT", "/x"), ("DELETE", "/x"), ("GET", "/bucket")])
def test_every_request_of_s3_is_made_again(place, unlimited, clock, method, name):
    place.replace("x", b"data")
    unlimited.faults = [(method, name, 503)] * 5
    acts = {"HEAD": lambda: place.size("x"), "PUT": lambda: place.replace("x", b"y")}
    acts |= {"DELETE": lambda: place.remove_objects("x"), "GET": lambda: list(place.list_objects())}
    acts[method]()
    assert unlimited.faults == []
    unlimited.faults = [(method, name, 503)] * 1000
    with pytest.raises(UnreachableError) as caught:
        acts[method]()
    unlimited.faults = []
    assert s3.one_sentence(caught.value)
    assert clock.now > 100


@pytest.mark.s3
@pytest.mark.slow  # S3 takes parts of fifty megabytes
def test_a_large_object_of_which_a_part_fails_is_whole(place, unlimited, clock):
    data = np.random.default_rng(0).bytes(101 * 2**20)
    unlimited.faults = [("PUT", "partNumber=2", 503)] * 3
    place.replace("large", data)
    assert unlimited.faults == []
    assert place.read("large") == data


@pytest.mark.s3
def test_a_server_that_is_not_there_is_waited_for(place, clock, monkeypatch):
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {"endpoint_url": "http://127.0.0.1:9"})
    monkeypatch.setattr(fsspec_access, "_S3_RETRIES", {"total_max_attempts": 1})
    with pytest.raises(UnreachableError) as caught:
        place.read("x")
    assert s3.one_sentence(caught.value)
    assert clock.now > 100
