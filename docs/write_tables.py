"""Run the commands whose output a page shows, and write their output into the page.

python docs/write_tables.py accuracy
python docs/write_tables.py benchmarks   # about twenty minutes

A page has the command in a comment, ``<!-- output of: COMMAND -->``, and ``<!-- end -->`` after its output.
"""

import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from dkfm import __version__
from dkfm.bench.machine import describe_process

PAGES = Path(__file__).parent / "explanation"
MARKED = re.compile(r"<!-- output of: (.*?) -->\n.*?<!-- end -->", re.S)


def run(found):
    """Run the command of a match; return its marks with the date, the machine and the output between them."""
    program, *arguments = shlex.split(found[1])
    command = [sys.executable, *(["-m", "dkfm"] if program == "dkfm" else []), *arguments]
    printed = subprocess.run(command, cwd=PAGES.parents[1], check=True, stdout=subprocess.PIPE, text=True).stdout
    facts = ", ".join(f"{name} {fact}" for name, fact in describe_process().items())
    written = f"Written on {datetime.now(UTC):%Y-%m-%d} by `{found[1]}` of dkfm {__version__}: {facts}."
    return f"<!-- output of: {found[1]} -->\n{written}\n\n```text\n{printed.strip(chr(10))}\n```\n<!-- end -->"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = PAGES / f"{name}.md"
        page.write_text(MARKED.sub(run, page.read_text(encoding="utf-8")), encoding="utf-8")
