"""Print the table of sizes in README.md, and the constants above it, from a report of `dkfm bench --json`.

python cluster/sizing.py bench.json
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from dkfm.core.display.quantities import format_bytes
from dkfm.core.sizing import Constants, sizing

JOBS = [
    (10**6, 1_000, 50, 10),
    (10**7, 4_000, 50, 10),
    (10**8, 4_000, 784, 10),
    (10**9, 1_000, 50, 10),
    (10**9, 4_000, 50, 100),
    (10**9, 20_000, 784, 10),
    (10**10, 1_000, 50, 10),
    (10**10, 4_000, 784, 100),
    (10**10, 20_000, 784, 100),
]
"""Rows, landmarks N, columns d, and outputs p: put yours here."""

HOURS, CORES = 1.0, 16

HEADER = [
    *("rows", "N", "d", "p", "rows a task", "tasks", "read", "written", "memory of a task", "of a worker"),
    *("core hours", "machines", "scheduler busy", "its limit, threads"),
]


def table(constants: Constants) -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield f"| {' | '.join(HEADER)} |"
    yield f"|{'---:|' * len(HEADER)}"
    for rows, n, d, p in JOBS:
        found = sizing(rows, n, d, p, hours=HOURS, cores=CORES, constants=constants)
        cells = [
            *(f"{number:,}" for number in (rows, n, d, p)),
            f"{found.chunk_rows:,}" + "*" * found.asked,
            f"{found.tasks:,}",
            *map(format_bytes, (found.read_bytes, found.written_bytes, found.task_bytes, found.worker_bytes)),
            f"{found.core_hours:,.2g}" if found.core_hours < 10 else f"{found.core_hours:,.0f}",
            f"{found.machines:,}",
            f"{found.scheduler_share:.0%}",
            f"{found.scheduler_threads:,.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Read the report that the command line names."""
    measured = asdict(Constants.from_report(json.loads(Path(sys.argv[1]).read_text())))
    constants = Constants(**{name: float(f"{value:.3g}") for name, value in measured.items()})
    print(json.dumps({"constants": asdict(constants)}, indent=2))
    print("\n".join(table(constants)))


if __name__ == "__main__":
    main()
