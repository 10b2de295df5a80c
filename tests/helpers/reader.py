"""A process that opens the stores it is told of, under a limit of memory, and says what came of each.

`Reader` is the tests' end of it. What is opened, and what is unpickled, is seen by an audit hook.
"""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

SPARE = 2**30
"""Bytes that it may take beside what its imports and one reading of every kind took."""

SECONDS = 120
"""After which an opening has hung."""

OWN_PICKLES = {"dask", "dkfm", "numpy", "pathlib"}
"""What dask pickles, and unpickles, of this process's own objects to name them."""


class Reader:
    """Asks a process of its own; one that died, or hung, is replaced."""

    def __init__(self, warm):
        self._warm, self._process = warm, None

    def ask(self, kind, path):
        """Return what came of a reading: `error`, `named`, `message`, `value`, `chunks` opened, `unpickled`."""
        if self._process is None:
            self._start()
        self._process.stdin.write(json.dumps([kind, str(path)]) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], SECONDS)[0]:
            self.close()
            raise AssertionError(f"reading the {kind} {path} has hung")
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            raise AssertionError(f"reading the {kind} {path} killed its process")
        return json.loads(answer)

    def _start(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"},
        )
        for kind, path in self._warm:
            answer = self.ask(kind, path)
            assert answer["error"] is None, answer
        assert self.ask("limit", "")["error"] is None

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def readings():
    """Return what reads each kind of thing that dkfm opens, into text."""
    import numpy as np
    from click.testing import CliRunner

    import dkfm
    from dkfm.cli import inspection
    from dkfm.cli.app import main
    from dkfm.errors import DkfmError
    from dkfm.gram.stored_gram import StoredGram
    from dkfm.sources.opening import open_source

    rows = np.random.default_rng(7).normal(size=(50, 3))

    def text(values):
        return f"{values.dtype}{values.shape[1:]}" + np.ascontiguousarray(values).tobytes().hex()

    def verify(path):
        result = CliRunner().invoke(main, ["verify", path])
        if result.exit_code == 1 and isinstance(result.exception, SystemExit):
            raise DkfmError(result.output.strip())
        if result.exception is not None:
            raise result.exception
        return result.output

    def gram(path):
        dkfm.build_gram(dkfm.kernels.Gaussian(2.0), rows, path, tile_rows=20)
        return text(StoredGram(Path(path), threads=1) @ np.eye(len(rows)))

    return {
        "source": lambda path: text(open_source(path).read(slice(0, 10))),
        "model": lambda path: text(dkfm.load(path).transform(rows[:5])),
        "gram": gram,
        "scores": lambda path: text(dkfm.open_scores(path).compute(scheduler="synchronous")),
        "verify": verify,
        "describe": lambda path: json.dumps(inspection.describe_store(path), sort_keys=True),
        "stamp": lambda path: open_source(path).stamp(),
        "limit": limit,
    }


def limit(_):
    """Let this process take no more than some memory from now on."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return str(most)


def serve():
    """Answer each line of standard input with one of standard output."""
    read, chunks, unpickled = readings(), set(), []

    def saw(event, arguments):
        if event == "open" and isinstance(arguments[0], str) and {"c"} & set(Path(arguments[0]).parts):
            chunks.add(arguments[0])
        elif event == "pickle.find_class" and arguments[0].partition(".")[0] not in OWN_PICKLES:
            unpickled.append(str(arguments))

    sys.addaudithook(saw)
    from dkfm.errors import DkfmError

    for line in sys.stdin:
        kind, path = json.loads(line)
        chunks.clear()
        unpickled.clear()
        answer = {"error": None, "named": False, "message": "", "value": None}
        try:
            answer["value"] = read[kind](path)
        except BaseException as error:
            answer.update(error=type(error).__name__, named=isinstance(error, DkfmError), message=str(error))
        print(json.dumps({**answer, "chunks": sorted(chunks), "unpickled": unpickled}), flush=True)


if __name__ == "__main__":
    serve()
