"""The program for type checkers uses every public name."""

import re
from pathlib import Path

import dkfm

PROGRAM = Path(__file__).with_name("program.py").read_text()


def test_the_typed_program_uses_every_public_name():
    missing = [name for name in dkfm.__all__ if not re.search(rf"\b{name}\b", PROGRAM)]
    assert missing == []


def test_the_typed_program_is_short():
    assert len(PROGRAM.splitlines()) < 60
