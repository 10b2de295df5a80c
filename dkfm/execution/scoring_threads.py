"""Choose how many threads of this process score rows in memory, or measure a certificate."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from dkfm.core import cpus
from dkfm.core.rows import estimate_float64s_per_row
from dkfm.execution import stage_log
from dkfm.execution.blas_threads import single_blas_thread, single_blas_thread_in_worker
from dkfm.execution.clusters.current_client import is_inside_worker
from dkfm.kernels.base import Kernel
from dkfm.kernels.serialization import is_code_free
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import Scorer, prepare_scorer

_MIN_TILES = 2
"""Smallest number of tiles per thread. Fewer tiles are scored one after another, with all threads of BLAS."""

_MAX_SINGLE_THREAD_MULTIPLICATIONS = 2**25
"""Number of multiplications (about a millisecond) up to which more BLAS threads save no time.

If other processes are busy, a product on several threads waits up to ten milliseconds for each thread to get a core.
"""


def may_use_threads(kernel: Kernel) -> bool:
    """Return whether work on rows in memory may take all cores of this process.

    It may not if the kernel has user functions, which may not be thread-safe, or if the caller has its own threads. A
    Dask task has one core, because its worker uses the others.
    """
    is_alone = threading.current_thread() is threading.main_thread() and not is_inside_worker()
    return is_alone and is_code_free(kernel)


@contextmanager
def choose_scoring_threads(scorer: Scorer, output: str, n: int) -> Iterator[Scorer]:
    """Yield a scorer that scores n rows on as many threads as save time, and limit the threads of BLAS meanwhile.

    Tiles of many rows are scored on all cores, if `may_use_threads`.
    """
    many = scorer.count_tiles(output, n) >= _MIN_TILES * cpus.COUNT
    few = scorer.count_multiplications(output, n) <= _MAX_SINGLE_THREAD_MULTIPLICATIONS
    in_threads = many and may_use_threads(scorer.model.kernel)
    limit = single_blas_thread(uses_scipy=in_threads) if in_threads or few else single_blas_thread_in_worker()
    with limit:
        yield replace(scorer, threads=cpus.COUNT) if in_threads else scorer


@contextmanager
def open_certificate_scorer(model: Model, output: str, n: int) -> Iterator[Scorer]:
    """Yield a scorer of n training rows on as many threads as save time, and log the predicted time if it is long."""
    with choose_scoring_threads(prepare_scorer(model), output, n) as scorer:
        d, width = estimate_float64s_per_row(model.landmarks), model.head(output).n_columns
        seconds = n * model.predict_row_seconds(d, width) / scorer.threads
        if seconds >= stage_log.LONG_SECONDS:
            text = f"kernel values of {n:,} training rows and {model.landmarks.shape[0]:,} landmarks, in this process"
            stage_log.log_stage("certificate", text, seconds=seconds, rows=n)
        yield scorer
