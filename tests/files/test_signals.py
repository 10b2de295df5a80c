"""A signal never leaves a lock locked, whose with statement its handler interrupts."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # which runs on the newest Python: 3.14 leaves such locks locked by itself

INTERRUPTED = """
import signal, threading
from dkfm.files.signals import postpone_signal

class Interruption(Exception):
    pass

def interrupt(number, frame):
    if not postpone_signal(number, frame):
        raise Interruption

signal.signal(signal.SIGALRM, interrupt)
locked = 0
for _ in range(300):
    lock = threading.Lock()
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
        while True:
            with lock:
                pass
    except Interruption:
        locked += lock.locked()
print(locked)
"""

BLOCKED = """
import signal, threading
from dkfm.files.signals import postpone_signal

def interrupt(number, frame):
    if not postpone_signal(number, frame):
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
lock = threading.Lock()
lock.acquire()
try:
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    with lock:
        pass
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupted_with_statement_releases_its_lock():
    assert subprocess.check_output([sys.executable, "-c", INTERRUPTED], text=True).split() == ["0"]


def test_a_thread_that_waits_for_a_lock_is_interrupted():
    assert subprocess.check_output([sys.executable, "-c", BLOCKED], text=True).split() == ["interrupted"]
