"""Ctrl-C in the first moments of a command ends it without a traceback."""

import os
import signal
import subprocess
import sys
import time

import pytest


@pytest.mark.parametrize("command", [["-m", "dkfm"], ["dkfm"]])
def test_an_interruption_during_the_imports_is_no_traceback(tmp_path, command):
    (tmp_path / "click.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(60)\n")
    (tmp_path / "dkfm").write_text("from dkfm.cli.app import main\nmain()\n")  # as pip writes it
    path = os.pathsep.join([str(tmp_path), *sys.path])
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = subprocess.Popen(
        [sys.executable, *command, "-h"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, **told
    )
    while not (tmp_path / "begun").exists():
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    said, _ = started.communicate(timeout=30)
    assert started.returncode == -signal.SIGINT
    assert said == b""
