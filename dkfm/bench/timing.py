"""Times of rivals that run in turn, and their ratios pair by pair: what slows the machine a while slows all."""

import shutil
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ratio:
    """Ratios of pairs that were measured in the same round.

    Attributes
    ----------
    median, least, most : float
    rounds : int
        How many pairs.
    """

    median: float
    least: float
    most: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> "Ratio":
        """Divide pair by pair.

        >>> Ratio.of([1.0, 4.0, 3.0], [1.0, 2.0, 1.0])
        Ratio(median=2.0, least=1.0, most=3.0, rounds=3)
        """
        ratios = [a / b for a, b in zip(above, below, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


@dataclass(frozen=True)
class Times:
    """Seconds of each rival, round by round."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """Return the median seconds of a rival."""
        return statistics.median(self.seconds[name])

    def best(self, names: Collection[str]) -> str:
        """Return which of some rivals has the least median."""
        return min(names, key=self.median)

    def ratio(self, above: str, below: str) -> Ratio:
        """Return how many times as long the first took as the second."""
        return Ratio.of(self.seconds[above], self.seconds[below])


def time_in_turn(rivals: Mapping[str, Callable[[Path], object]], rounds: int, place: Path) -> Times:
    """Time rivals one after the other, `rounds` times; each round starts with another one.

    Parameters
    ----------
    rivals : mapping of str to callable
        Each is given a path where nothing is; what it leaves there is removed, off the clock, before the next one runs.
    rounds : int
    place : Path
        That path.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    names = list(rivals)
    for first in range(rounds):
        for name in _from(names, first):
            start = time.perf_counter()
            rivals[name](place)
            seconds[name].append(time.perf_counter() - start)
            shutil.rmtree(place, ignore_errors=True)
    return Times(seconds)


def _from(names: Sequence[str], first: int) -> list[str]:
    cut = first % len(names)
    return [*names[cut:], *names[:cut]]
