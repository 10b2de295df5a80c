"""The manifests are what the operator and Kubernetes take, safe, and as large as the plan says; their commands run."""

import copy
import math
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import zarr

import dkfm
from cluster import manifests
from cluster.manifests import FILES, FOLDER, PODS, bytes_of, command, containers, pods, read, services, settings
from cluster.needs import needs
from dkfm import kernels
from dkfm.execution.model_cache import import_and_measure_peak_memory
from helpers import harness

needs("import dask_kubernetes", "import kubernetes_validate", "hadolint", "openssl")


NAME = "dkfm"
OURS = {"dask.org/cluster-name": NAME}
ROLES = {"scheduler": "scheduler", "worker": "worker", "runner": "client"}
"""Which certificate a pod has."""

EXAMPLE_ROWS, EXAMPLE_CHUNK, COLUMNS, LANDMARKS, COMPONENTS = 100_000_000, 10_000, 50, 2_000, 20
"""Of the job in the README for which the workers are sized."""

BEFORE = 200_000_000
"""What the README grants a worker process before its first task."""

SHARE, STEP = 0.6, 2**26
"""Of its limit a worker uses so much; limits are so many bytes, or a multiple."""


def validate(found):
    """Raise unless this is what the API server takes; fields that it does not know are errors."""
    import jsonschema
    import kubernetes_validate

    version = kubernetes_validate.latest_version()
    if not found["apiVersion"].startswith("kubernetes.dask.org/"):
        kubernetes_validate.validate(found, version, strict=True)
        return
    jsonschema.Draft202012Validator(manifests.operator_schema(found["kind"])).validate(found)
    cluster = found["spec"]["cluster"]["spec"] if found["kind"] == "DaskJob" else found["spec"]
    specs = [cluster["scheduler"]["spec"], cluster["worker"]["spec"]]
    specs += [found["spec"]["job"]["spec"]] if found["kind"] == "DaskJob" else []
    core = [{"kind": "Pod", "spec": spec} for spec in specs] + [
        {"kind": "Service", "spec": cluster["scheduler"]["service"]}
    ]
    for one in core:
        kubernetes_validate.validate({"apiVersion": "v1", "metadata": {"name": NAME}, **one}, version, strict=True)


@pytest.mark.parametrize("name", FILES)
def test_manifests_are_what_the_operator_and_kubernetes_take(name):
    validate(read(name))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("settings.yaml", ["data"]),
        ("volume.yaml", ["spec", "accessModes"]),
        ("network-policy.yaml", ["spec", "ingress"]),
        ("smoke.yaml", ["spec", "template", "spec", "automountServiceAccountToken"]),
        ("cluster.yaml", ["spec", "worker", "replicas"]),
        ("cluster.yaml", ["spec", "scheduler", "service", "type"]),
        ("cluster.yaml", ["spec", "worker", "spec", "containers", 0, "securityContext", "readOnlyRootFilesystem"]),
        ("job.yaml", ["spec", "job"]),
        ("job.yaml", ["spec", "job", "spec", "initContainers", 0, "envFrom", 0, "configMapRef"]),
        ("job.yaml", ["spec", "cluster", "spec", "scheduler", "spec", "containers", 0, "livenessProbe"]),
    ],
)
def test_a_misspelt_field_is_refused(name, path):
    import jsonschema

    found = copy.deepcopy(read(name))
    *above, field = path
    place = found
    for key in above:
        place = place[key]
    place[field + "s"] = place.pop(field)
    with pytest.raises(jsonschema.ValidationError):
        validate(found)


def test_the_job_has_the_cluster_that_stays():
    job, cluster = read("job.yaml"), read("cluster.yaml")
    assert job["spec"]["cluster"]["spec"] == cluster["spec"]
    assert job["metadata"]["name"] == cluster["metadata"]["name"] == NAME


@pytest.mark.parametrize(("name", "role"), PODS)
def test_pods_have_no_more_rights_than_they_need(name, role):
    pod = pods(name)[role]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user())
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & pod.keys()
    for volume in pod["volumes"]:
        assert len({"emptyDir", "secret", "persistentVolumeClaim"} & volume.keys()) == 1
        assert len(volume) == 2
        assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": None})
    for container in containers(pod):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory", "ephemeral-storage"} == container["resources"]["limits"].keys()
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert not any("hostPort" in port for port in container.get("ports", []))
        written = sum(bytes_of(volume["emptyDir"]["sizeLimit"]) for volume in pod["volumes"] if "emptyDir" in volume)
        assert written < bytes_of(container["resources"]["limits"]["ephemeral-storage"])
        assert container["image"].rpartition("/")[2] == f"dkfm:{dkfm.__version__}"


@pytest.mark.parametrize("name", ["cluster.yaml", "job.yaml"])
def test_only_pods_of_the_cluster_reach_its_ports(name):
    policy = read("network-policy.yaml")["spec"]
    assert policy["podSelector"] == {"matchLabels": OURS}
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": OURS}}]
    found = pods(name)
    listening = {
        port["containerPort"] for pod in found.values() for one in containers(pod) for port in one.get("ports", [])
    }
    assert [port["port"] for port in rule["ports"]] == sorted(listening) == [8786, 8787, 8788, 8789]
    assert all(port["protocol"] == "TCP" for port in rule["ports"])
    words = [word for pod in found.values() for one in containers(pod) for word in one["args"]]
    assert {int(port) for word in words for port in re.findall(r"\b87\d\d$", word)} == listening
    (service,) = services(name)
    assert service["type"] == "ClusterIP"
    assert service["selector"] == OURS | {"dask.org/component": "scheduler"}
    assert [port["port"] for port in service["ports"]] == [8786, 8787]


@pytest.mark.parametrize("name", ["cluster.yaml", "job.yaml"])
def test_every_connection_is_encrypted_by_certificates_of_a_secret(name):
    environment = settings()
    assert environment["DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION"] == "true"
    for role, pod in pods(name).items():
        (volume,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "tls")
        mine = ROLES[role]
        assert {item["path"] for item in volume["items"]} == {"ca.pem", f"{mine}.pem", f"{mine}.key"}
        assert all(item["key"] == item["path"] for item in volume["items"])
        told = [value for key, value in environment.items() if re.search(rf"TLS__(CA_FILE|{mine.upper()}__)", key)]
        assert sorted(told) == sorted(f"/tls/{item['path']}" for item in volume["items"])
        for container in containers(pod):
            assert {"configMapRef": {"name": "dkfm-dask"}} in container["envFrom"]
            assert {"name": "tls", "mountPath": "/tls", "readOnly": True} in container["volumeMounts"]
            assert not any("tcp://" in word for word in container["args"])


def test_workers_are_as_large_as_the_plan_of_the_example(tmp_path):
    import dask
    from distributed import Client, LocalCluster

    worker = read("cluster.yaml")["spec"]["worker"]
    (container,) = worker["spec"]["containers"]
    limits = container["resources"]["limits"]
    threads, memory = int(limits["cpu"]), bytes_of(limits["memory"])
    X = np.random.default_rng(0).normal(size=(LANDMARKS, COLUMNS))
    dkfm.KernelPCA(COMPONENTS, kernel=kernels.Gaussian(7.0)).fit(X).save(tmp_path / "model")
    shape, chunks = (EXAMPLE_ROWS, COLUMNS), (EXAMPLE_CHUNK, COLUMNS)
    zarr.create_array(tmp_path / "rows.zarr", shape=shape, chunks=chunks, dtype="float64")
    with (
        # The workers are threads of this process, in whose memory other tests count, too.
        dask.config.set({"temporary-directory": str(tmp_path), "distributed.worker.memory.pause": False}),
        LocalCluster(
            n_workers=worker["replicas"],
            threads_per_worker=threads,
            memory_limit=memory,
            processes=False,
            dashboard_address="127.0.0.1:0",
        ) as started,
        Client(started) as client,
    ):
        paths = tmp_path / "model", tmp_path / "rows.zarr", tmp_path / "scores.zarr"
        plan = dkfm.plan_score(*paths, client=client)
    plan.require()
    assert plan.threads == worker["replicas"] * threads
    assert memory == math.ceil(plan.worker_bytes(threads, BEFORE) / SHARE / STEP) * STEP
    stored = bytes_of(read("volume.yaml")["spec"]["resources"]["requests"]["storage"])
    assert 8 * EXAMPLE_ROWS * COLUMNS + plan.output_bytes < stored
    told = " ".join((FOLDER / "README.md").read_text().split())
    assert f"{EXAMPLE_ROWS:,} rows of {COLUMNS} columns" in told
    assert f"{LANDMARKS:,} landmarks and {COMPONENTS} components" in told
    figures = [BEFORE, 2**24, plan.model_bytes, plan.task_bytes]
    assert (
        " + ".join(f"{figure / 1e6:.3g}" for figure in figures[:3]) + f" + {threads} x {figures[3] / 1e6:.3g}" in told
    )
    assert f"{limits['memory']}" in told


def test_the_readme_tells_of_every_file_and_applies_those_that_are_objects():
    told = (FOLDER / "README.md").read_text()
    table = re.findall(r"^\| `(\S+)` \|", told, re.MULTILINE)
    assert sorted(table) == sorted(["Dockerfile", *FILES])
    commands = told.rpartition("## The smoke job")[2]
    applied = [name for line in re.findall("apply (.*)", commands) for name in re.findall(r"-f (\S+)", line)]
    assert sorted(applied) == sorted(set(FILES) - {"cluster.yaml"})  # which takes the place of the job


def user():
    return re.search(r"^USER (\d+):(\d+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)[1]


def lint(path):
    return subprocess.run(["hadolint", path], capture_output=True, text=True, timeout=60, check=False)


def test_the_dockerfile_is_linted_and_takes_what_is_built():
    done = lint(FOLDER / "Dockerfile")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = (FOLDER / "Dockerfile").read_text()
    assert int(user()) > 0
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"python:3.12.12-slim-bookworm"}
    let_in = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert let_in[:5] == ["*", "!dkfm", "!pyproject.toml", "!README.md", "!LICENSE"]


def test_the_linter_sees_what_is_wrong(tmp_path):
    text = (FOLDER / "Dockerfile").read_text()
    (tmp_path / "Dockerfile").write_text(text.replace("3.12.12-slim-bookworm", "latest").replace("--no-cache-dir ", ""))
    done = lint(tmp_path / "Dockerfile")
    assert done.returncode == 1
    assert "DL3007" in done.stdout
    assert "DL3042" in done.stdout


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Pods:
    """Processes of this machine that run what containers are told to, with their environment, on loopback."""

    def __init__(self, folder):
        self._folder, self._ports = folder, {port: free_port() for port in (8786, 8787, 8788, 8789)}
        self.address = f"tls://127.0.0.1:{self._ports[8786]}"
        for name in ("data", "scratch"):
            (folder / name).mkdir()
        harness.run([FOLDER.parent / "tls" / "make-certificates.sh", folder / "tls"])
        self._environment = harness.environment(**{key: self._here(value) for key, value in settings().items()})

    def _here(self, word):
        word = re.sub(r"(?<![\w.])/(data|scratch|tls)(?=/|$)", lambda place: str(self._folder / place[1]), word)
        word = word.replace("dkfm-scheduler:", "127.0.0.1:").replace('"/data/', f'"{self._folder}/data/')
        return re.sub(
            r"^:(\d+)$", r"127.0.0.1:\1", re.sub(r"\b(878[6-9])$", lambda p: str(self._ports[int(p[1])]), word)
        )

    def command(self, container):
        program, *words = map(self._here, command(container))
        loopback = ["--host", "127.0.0.1"] if program == "dask" else []
        return [sys.executable, *(["-m", program] if program != "python" else []), *words, *loopback]

    def run(self, container):
        """Run a container to its end; return what it printed and the most memory that it had."""
        with (self._folder / "log").open("w+") as log:
            started = subprocess.Popen(self.command(container), env=self._environment, stdout=log, stderr=log)
            try:
                code, peak = wait_peak(started)
            finally:
                harness.end(started)
            log.seek(0)
            told = log.read()
        assert code == 0, told
        return told, peak

    def start(self, container):
        log = self._folder / f"{container['name']}.log"
        return harness.process(self.command(container), log, env=self._environment)

    def client(self):
        from distributed import Client, Security

        tls = self._folder / "tls"
        files = {"tls_client_cert": str(tls / "client.pem"), "tls_client_key": str(tls / "client.key")}
        security = Security(tls_ca_file=str(tls / "ca.pem"), require_encryption=True, **files)
        return Client(self.address, timeout=60, security=security)


def memory(pid):
    """Return the most bytes that a process and those that it started have had, while they are there."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(FileNotFoundError, ProcessLookupError):
                told = Path(f"/proc/{process.pid}/status").read_text()
                total += sum(int(size) * 1024 for size in re.findall(r"^VmHWM:\s+(\d+)", told, re.MULTILINE))
    return total


def wait_peak(started):
    """Wait for a process; return its exit code and the most memory that it was seen with."""
    peak, deadline = 0, time.monotonic() + harness.LIMIT
    while started.poll() is None and time.monotonic() < deadline:
        peak = max(peak, memory(started.pid))
        time.sleep(0.02)
    return started.poll(), peak


def test_what_the_manifests_say_runs_over_tls_within_its_limits(tmp_path):
    here = Pods(tmp_path)
    (smoke,) = containers(pods("smoke.yaml")["smoke"])
    found = pods("job.yaml")
    (scheduler,), (worker,) = (containers(found[role]) for role in ("scheduler", "worker"))
    score, verify = containers(found["runner"])
    peaks = {"smoke": here.run(smoke)[1]}
    with here.start(scheduler) as scheduling, here.start(worker) as working:
        with here.client() as client:
            client.wait_for_workers(1, timeout=60)
            (before,) = client.run(import_and_measure_peak_memory).values()
            (fact,) = client.scheduler_info()["workers"].values()
        limits = worker["resources"]["limits"]
        assert (fact["nthreads"], fact["memory_limit"]) == (int(limits["cpu"]), bytes_of(limits["memory"]))
        assert fact["id"] == "a-worker"
        assert before < BEFORE
        told, peaks["score"] = here.run(score)
        assert "20,000 rows" in told
        told, peaks["verify"] = here.run(verify)
        assert "scored anew" in told
        peaks |= {"scheduler": memory(scheduling.pid), "worker": memory(working.pid)}
    print({name: f"{peak / 1e6:.0f} MB" for name, peak in peaks.items()}, f"before {before / 1e6:.0f} MB")
    for container in (smoke, scheduler, worker, score, verify):
        assert 0 < peaks[container["name"]] < bytes_of(container["resources"]["limits"]["memory"])
