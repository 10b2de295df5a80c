"""What stands in cluster/kubernetes: objects, the pods within them, and what a container is told to run."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "cluster" / "kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))


def read(name):
    """Return the only object of a file."""
    (found,) = yaml.safe_load_all((FOLDER / name).read_text())
    return found


def pods(name):
    """Return the pod specifications within an object, by what they are of."""
    found = read(name)
    spec = found.get("spec", {})
    if found["kind"] == "Job":
        return {"smoke": spec["template"]["spec"]}
    within = {"runner": spec["job"]["spec"]} if found["kind"] == "DaskJob" else {}
    cluster = spec["cluster"]["spec"] if found["kind"] == "DaskJob" else spec
    if found["kind"] in ("DaskJob", "DaskCluster"):
        within |= {role: cluster[role]["spec"] for role in ("scheduler", "worker")}
    return within


def containers(pod):
    """Return all containers of a pod."""
    return [*pod.get("initContainers", []), *pod["containers"]]


PODS = [(name, role) for name in FILES for role in pods(name)]


def services(name):
    """Return the services within an object."""
    spec = read(name)["spec"]
    cluster = spec["cluster"]["spec"] if "cluster" in spec else spec
    return [cluster["scheduler"]["service"]]


@cache
def operator_schema(kind):
    """Return the schema of one of the operator's own kinds, in which what it does not name is an error.

    It is read as data of a package that is not imported: the operator's imports are many.
    """
    package = Path(find_spec("dask_kubernetes").origin).parent
    definitions = package / "operator" / "deployment" / "helm" / "dask-kubernetes-operator" / "crds"
    definition = yaml.load(
        (definitions / f"{kind.lower()}.yaml").read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    (version,) = definition["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"] |= {"apiVersion": {"const": "kubernetes.dask.org/v1"}, "kind": {"const": kind}, "metadata": {}}
    return _closed(schema)


def _closed(schema):
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type", "object") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def bytes_of(quantity):
    """Return a quantity of Kubernetes' in bytes, as 64Mi."""
    number, unit = re.fullmatch(r"(\d+)([KMG]i)", quantity).groups()
    return int(number) * 1024 ** (1 + "KMG".index(unit[0]))


def settings():
    """Return the environment that every container has."""
    return read("settings.yaml")["data"]


def command(container):
    """Return what a container runs, with the limits that it is told of filled in."""
    limits = container["resources"]["limits"]
    told = {"limits.cpu": limits["cpu"], "limits.memory": str(bytes_of(limits["memory"]))}
    values = {one["name"]: told[one["valueFrom"]["resourceFieldRef"]["resource"]] for one in container.get("env", [])}
    values["DASK_WORKER_NAME"] = "a-worker"  # the operator's
    return [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word) for word in container["args"]]
