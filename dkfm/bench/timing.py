"""Time rivals in turn, and compare them within each round, because a busy machine slows all of them."""

import shutil
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ratio:
    """Ratios of pairs of values that were measured in the same round.

    Attributes
    ----------
    median, least, most : float
        Median, minimum and maximum of the ratios.
    rounds : int
        Number of pairs.
    """

    median: float
    least: float
    most: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> "Ratio":
        """Divide the values of each pair.

        >>> Ratio.of([1.0, 4.0, 3.0], [1.0, 2.0, 1.0])
        Ratio(median=2.0, least=1.0, most=3.0, rounds=3)
        """
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


@dataclass(frozen=True)
class Times:
    """Seconds of each rival in each round."""

    seconds_by_name: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """Return the median seconds of a rival."""
        return statistics.median(self.seconds_by_name[name])

    def find_fastest_name(self, names: Collection[str]) -> str:
        """Return the name with the smallest median."""
        return min(names, key=self.median)

    def ratio(self, above: str, below: str) -> Ratio:
        """Return the seconds of the job `above` divided by those of the job `below`, round by round."""
        return Ratio.of(self.seconds_by_name[above], self.seconds_by_name[below])


def time_round_robin(rivals: Mapping[str, Callable[[Path], object]], rounds: int, output: Path | None = None) -> Times:
    """Time all rivals once in each round, in round-robin order: every round starts with the next rival.

    Parameters
    ----------
    rivals : mapping of str to callable
        Functions by name, each called with the path `output`, or with an empty path without one.
    rounds : int
        Number of rounds.
    output : Path, optional
        Unused path. The files that a rival leaves there are removed after each call, off the clock.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    names, path = list(rivals), Path() if output is None else output
    for first in range(rounds):
        start_at = first % len(names)
        for name in names[start_at:] + names[:start_at]:
            start = time.perf_counter()
            rivals[name](path)
            seconds[name].append(time.perf_counter() - start)
            if output is not None:
                shutil.rmtree(output, ignore_errors=True)
    return Times(seconds)
