"""What tests of clusters need beside Python: a program or a package, or they skip."""

import shutil
from importlib.util import find_spec

import pytest


def needs(*names):
    """Skip a test file unless these programs (as "sshd") and Python packages (as "import asyncssh") are there."""
    for name in names:
        package = name.removeprefix("import ")
        there = (
            shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin") if package == name else find_spec(package)
        )
        if not there:
            pytest.skip(f"{name} is not on this machine.", allow_module_level=True)
