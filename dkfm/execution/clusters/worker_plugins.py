"""Define the plugin that silences the log lines of local workers while their cluster closes."""

import logging

from distributed import Worker, WorkerPlugin


class SilenceClosingWorker(WorkerPlugin):
    """Silence a worker's log when it closes.

    A worker closes its connections while a heartbeat may wait for an answer on one of them, which would print a
    traceback although nothing is wrong.
    """

    def teardown(self, worker: Worker) -> None:
        """Silence the logger of workers in this process, which ends with its one worker."""
        logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)
