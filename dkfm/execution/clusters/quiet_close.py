"""How the workers of a local cluster leave it: without a word."""

import logging

from distributed import Worker, WorkerPlugin


class LeaveQuietly(WorkerPlugin):
    """Print nothing from a worker that closes.

    It closes its connections with whatever is under way on them, and a heartbeat that waits for its answer just then
    would print a traceback, of no use to anybody: the worker goes because it was told to.
    """

    def teardown(self, worker: Worker) -> None:
        """Silence the logger of workers; this process has one, and ends with it."""
        logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)
