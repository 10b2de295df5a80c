"""What processes listen on, and what they were started with."""

import base64
import binascii
import re
import shutil
import socket
from contextlib import suppress

import psutil


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def program(name):
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def family(pid):
    """Return a process and all that it started."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def listening(processes):
    """Return the addresses on which processes listen."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return found


def command(process):
    """Return the words with which a process was started; none of one that is gone."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def decoded(process):
    """Return a command line with what is base64 in it, as Dask gives its configuration, decoded as well."""
    words = " ".join(command(process))
    found = [words.encode()]
    for run in re.findall(r"[\w+/=-]{40,}", words):
        with suppress(binascii.Error):
            found.append(base64.urlsafe_b64decode(run))
    return b" ".join(found)
