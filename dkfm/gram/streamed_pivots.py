"""Find pivots among rows that are never in memory together, in rounds of passes of tasks over their source.

A round draws candidates in proportion to the residuals of all rows, and adds the rows of the largest residuals. It
chooses pivots among them, the largest residual first, down to a share of the largest. Then it subtracts from every
residual the part that the new pivots explain. This needs only ``k(x, P)`` and the new columns of ``L^-T``, so all
rounds together cost one product with ``L^-T``. When no residual exceeds the threshold, a last pass recomputes all
residuals from all features.

Chen, Epperly, Tropp and Webber, "Randomly pivoted Cholesky" (2022). The rounds are the blocks of proposals of Epperly,
Tropp and Webber, "Embrace rejection" (2024), with rejection by exact residuals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dkfm.core.budget import MAX_DROPPED, ROUND_CANDIDATES
from dkfm.core.rows import Array, Rows, stack_rows
from dkfm.errors import KernelError
from dkfm.execution.executors import Executor
from dkfm.files.row_values import allocate_row_values, iter_blocks
from dkfm.gram.fit_checkpoints import NO_CHECKPOINT, Checkpoint
from dkfm.gram.row_passes import RowPasses
from dkfm.gram.shared_arrays import SharedArrays
from dkfm.kernels.base import Kernel
from dkfm.numerics.growing_cholesky import GrowingFactor
from dkfm.numerics.map_error_bounds import Residuals, make_probes
from dkfm.numerics.pivoted_cholesky import RESIDUAL_ROUNDING, Pivots
from dkfm.numerics.roots import Root, replace_zero_lengths, row_lengths
from dkfm.sources.base import Source

Indices = npt.NDArray[np.intp]

_LARGEST = 512
"""Number of candidates with the largest residuals; the others are drawn at random."""

_ROUND_SHARE = 0.1
"""Share of the largest residual down to which a round accepts pivots."""


@dataclass(frozen=True)
class PivotSearch:
    """Options of the search for pivots."""

    threshold: float
    """Residual, relative to k(x, x), that a pivot must exceed."""
    limit: int
    """Largest number of pivots."""
    is_random: bool
    """Whether pivots are drawn in proportion to residuals; else the largest residual is first."""
    rng: np.random.RandomState
    """Draws candidates."""
    shows_progress: bool = False
    """Whether the passes over the rows show progress bars."""
    on_round: Callable[[int, list[float]], object] = lambda pivots, largest: None
    """Called after each round with the number r of pivots, and the largest residual after 0, 1, .. r of them."""


@dataclass(eq=False)
class _State:
    """Pivots found so far, and the residuals of all rows."""

    residuals: Array
    """Residuals, relative to k(x, x): 1 at first, 0 for zero vectors and for pivots. Shape (N,)."""
    factor: GrowingFactor
    numbers: Indices
    """Row numbers of the pivots. Shape (r,)."""
    rows: Rows
    """The pivots. Shape (r, d)."""
    pivot_norms: Array
    """``sqrt k(x, x)`` of the pivots. Shape (r,)."""
    largest_residuals: list[float]
    """Largest residual after 0, 1, .. r pivots, or an upper bound of it."""
    n_pivots_at_recompute: int = -1
    """Number of pivots when all residuals were last recomputed."""

    def make_root_columns(self, first: int) -> Array:
        """Return the columns of ``D^-1 L^-T`` from number `first` on."""
        return self.factor.compute_inverse_transpose_columns(first) / self.pivot_norms[:, np.newaxis]


def find_streamed_pivots(
    kernel: Kernel,
    source: Source,
    search: PivotSearch,
    executor: Executor,
    shared: SharedArrays,
    checkpoint: Checkpoint = NO_CHECKPOINT,
) -> Pivots:
    """Find pivots among the rows of a source (N, d) by passes of tasks; see the module.

    Each round saves its state in the checkpoint, if that keeps one; the search resumes from an existing state.

    Raises
    ------
    KernelError
        A kernel value is not finite.
    InvalidInputError
        A row is not finite.
    ClusterError
        A tile of rows killed its workers repeatedly, or the cluster is gone.
    """
    passes = RowPasses(kernel, source, executor, shared, search.shows_progress)
    state = _resume(passes, search.rng, checkpoint) if checkpoint.numbers else _start(passes)
    while True:
        while len(state.numbers) < search.limit and state.residuals.max() > search.threshold:
            _run_round(state, passes, search)
            _save(state, search.rng, checkpoint)
            search.on_round(len(state.numbers), state.largest_residuals)
        if not len(state.numbers):  # no row has a positive k(x, x), but a model needs a landmark
            return _make_pivots(state, 1.0, float(state.residuals.min()))
        # L^-1 times random signs
        probes = state.factor.compute_inverse_transpose_columns(0).T @ make_probes(len(state.numbers))
        norm = passes.recompute_residuals(state.residuals, state.rows, state.make_root_columns(0), probes)
        lowest = float(state.residuals.min())
        state.residuals[state.numbers] = 0.0
        is_full = len(state.numbers) >= search.limit or state.residuals.max() <= search.threshold
        # Two ways to sum the same squares may differ by rounding.
        if is_full or len(state.numbers) == state.n_pivots_at_recompute:
            return _make_pivots(state, norm, lowest)
        state.n_pivots_at_recompute = len(state.numbers)


def _start(passes: RowPasses) -> _State:
    """Return the initial state, without pivots."""
    residuals, none = passes.compute_initial_residuals(), np.zeros(0, np.intp)
    empty = passes.take_rows(np.zeros(1, np.intp))[:0]
    return _State(residuals, GrowingFactor.empty(), none, empty, np.zeros(0), [float(residuals.max())])


def _save(state: _State, rng: np.random.RandomState, checkpoint: Checkpoint) -> None:
    """Save the state at the end of a round, with the state of the random generator."""
    generator: dict[str, Any] = rng.get_state(legacy=False)["state"]
    arrays = {
        "residuals": state.residuals[:, np.newaxis],
        "lower": state.factor.lower,
        "values": state.factor.pivot_values,
        "numbers": state.numbers,
        "lengths": state.pivot_norms,
        "largest": np.array(state.largest_residuals),
        "generator": generator["key"],
    }
    numbers = {"position": generator["pos"], "pivots": len(state.numbers), "recomputed": state.n_pivots_at_recompute}
    checkpoint.save(numbers, arrays)


def _resume(passes: RowPasses, rng: np.random.RandomState, checkpoint: Checkpoint) -> _State:
    """Return the saved state, and restore the state of the random generator."""
    load = checkpoint.load_array
    generator = {"key": load("generator"), "pos": int(checkpoint.numbers["position"])}
    rng.set_state({"bit_generator": "MT19937", "state": generator, "has_gauss": 0, "gauss": 0.0})
    numbers = load("numbers").astype(np.intp)
    factor = GrowingFactor(cast("Array", load("lower")), cast("Array", load("values")))
    rows, residuals = passes.take_rows(numbers), allocate_row_values(passes.source.shape[0])
    checkpoint.read_into(residuals[:, np.newaxis], "residuals")
    lengths, largest = (cast("Array", load(name)) for name in ("lengths", "largest"))
    recomputed = int(checkpoint.numbers["recomputed"])
    return _State(residuals, factor, numbers, rows, lengths, largest.tolist(), recomputed)


def _run_round(state: _State, passes: RowPasses, search: PivotSearch) -> None:
    """Choose pivots among candidates, and subtract the part that they explain from all residuals."""
    drawn = _draw_candidates(state.residuals, search)
    proposed = state.residuals[drawn]
    rows = passes.take_rows(drawn)
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite raise below
        lengths = row_lengths(passes.kernel.evaluate_diagonal(rows))
    divisors = replace_zero_lengths(lengths)
    among = _compute_normalized_values(passes.kernel, (rows, rows), (drawn, drawn), (divisors, divisors))
    with_pivots: Array = np.zeros((len(drawn), 0))
    if len(state.numbers):
        pairs, numbers = (rows, state.rows), (drawn, state.numbers)
        with_pivots = _compute_normalized_values(passes.kernel, pairs, numbers, (divisors, state.pivot_norms))
    largest, room = float(state.residuals.max()), search.limit - len(state.numbers)
    diagonal, old = np.sign(among.diagonal()), len(state.numbers)
    target = max(search.threshold, _ROUND_SHARE * largest)
    if search.is_random:
        uniform = search.rng.uniform(size=len(drawn))
        state.factor, chosen = state.factor.extend_by_rejection(
            among, with_pivots, diagonal, search.threshold, room, proposed, uniform
        )
    else:
        state.factor, chosen = state.factor.extend_by_largest(among, with_pivots, diagonal, target, room)
    if not len(chosen):  # the residuals of the candidates were rounding errors, or have been explained since
        features = state.factor.compute_features(with_pivots)
        exact = diagonal - np.einsum("ij,ij->i", features, features)
        state.residuals[drawn] = exact
        return
    state.numbers = np.append(state.numbers, drawn[chosen])
    state.pivot_norms = np.append(state.pivot_norms, lengths[chosen])
    state.rows = stack_rows([state.rows, rows[chosen]])
    passes.subtract_squares(state.residuals, state.rows, state.make_root_columns(old))
    state.residuals[state.numbers] = 0.0
    state.largest_residuals += [largest] * (len(chosen) - 1) + [float(state.residuals.max())]


def _draw_candidates(residuals: Array, search: PivotSearch) -> Indices:
    """Return the numbers of rows drawn in proportion to residuals and of rows of the largest; all rows if they are few.

    Rows whose residuals are not above the threshold cannot be pivots. They are not drawn, because they may be so many
    that few other rows would be drawn. For random pivots, the numbers are proposals in the order in which they were
    drawn, and may occur more than once.
    """

    def drawable(block: Array) -> Array:
        return np.where(block > search.threshold, block, 0.0)

    blocks = list(iter_blocks(residuals))
    n_drawable = sum(int(np.count_nonzero(block > search.threshold)) for _, block in blocks)
    if not search.is_random and n_drawable <= ROUND_CANDIDATES:
        return np.concatenate([rows.start + np.flatnonzero(block > search.threshold) for rows, block in blocks])
    totals = np.array([drawable(block).sum() for _, block in blocks])
    count = ROUND_CANDIDATES if search.is_random else ROUND_CANDIDATES - _LARGEST
    in_block = search.rng.choice(len(blocks), count, p=totals / totals.sum())
    drawn = np.empty(count, np.intp)
    for number in np.unique(in_block):
        (rows, block), here = blocks[number], np.flatnonzero(in_block == number)
        sums = np.cumsum(drawable(block))
        at = np.searchsorted(sums, search.rng.uniform(high=sums[-1], size=len(here)), side="right")
        drawn[here] = rows.start + np.minimum(at, len(sums) - 1)
    if search.is_random:
        return drawn
    return np.union1d(drawn, _find_largest(residuals))


def _find_largest(residuals: Array) -> Indices:
    """Return the numbers of the rows of the largest residuals."""
    found = np.zeros(0, np.intp)
    for rows, block in iter_blocks(residuals):
        at = np.argpartition(block, -_LARGEST)[-_LARGEST:] if len(block) > _LARGEST else np.arange(len(block))
        found = np.append(found, rows.start + at)
        if len(found) > _LARGEST:
            found = found[np.argpartition(residuals[found], -_LARGEST)[-_LARGEST:]]
    return found


def _compute_normalized_values(
    kernel: Kernel, rows: tuple[Rows, Rows], numbers: tuple[Indices, Indices], lengths: tuple[Array, Array]
) -> Array:
    """Return the scaled kernel values ``k(x, y) / (|x| |y|)`` of all pairs (n, m) of rows of the given numbers."""
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite raise
        values: Array = kernel.make_evaluator(rows[1])(rows[0])
    if not np.isfinite(values).all():
        i, j = np.unravel_index(int(np.isfinite(values).argmin()), values.shape)
        raise KernelError(f"{kernel!r} returned {values[i, j]} for rows {numbers[0][i]} and {numbers[1][j]}.")
    values /= lengths[0][:, np.newaxis]
    values /= lengths[1]
    return values


def _make_pivots(state: _State, norm: float, lowest: float) -> Pivots:
    """Return the pivots with the root ``D^-1 L^-T``; the residuals in `state` are overwritten."""
    rank, n, residuals = len(state.numbers), len(state.residuals), state.residuals
    state.largest_residuals[-1] = max(float(residuals.max()), 0.0)  # those of pivots are 0
    residuals[state.numbers] = -inf  # residuals of pivots are not among the dropped ones
    dropped = _sort_largest(residuals, min(MAX_DROPPED, n - rank))
    largest = np.maximum(np.maximum.accumulate(state.largest_residuals[::-1])[::-1], 0.0)
    limits = np.append(np.full(rank, inf), inf if n > rank else 0.0)
    shares = Residuals(largest, min(lowest, 0.0), norm, RESIDUAL_ROUNDING, limits=limits)
    root = Root(state.make_root_columns(0), state.factor.pivot_values, dropped, state.pivot_norms, triangular=True)
    return Pivots(state.numbers, root, shares)


def _sort_largest(residuals: Array, count: int) -> Array:
    """Return the largest residuals, descending."""
    kept: Array = np.zeros(0)
    for _, block in iter_blocks(residuals):
        kept = np.concatenate([kept, block])
        if len(kept) > count:
            smallest_first = np.partition(kept, max(0, len(kept) - count - 1))
            kept = smallest_first[len(kept) - count :].copy()
    return np.sort(kept)[::-1]
