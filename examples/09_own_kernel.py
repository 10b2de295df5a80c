"""
A kernel of your own
====================

Write a kernel function for signals that may be shifted in time. See its accuracy, and how a function that is not a
kernel is refused. The picture shows two discriminants of new signals, which the shift-invariant kernel separates.
"""

import sys

import numpy as np
from sklearn.linear_model import RidgeClassifier

import dkfm
from dkfm.kernels import Function, Gaussian

LENGTH = 24
GAUSSIAN = Gaussian(4.0)


def over_shifts(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Return the mean of a Gaussian over all circular shifts of one side: a kernel, and blind to shifts."""
    return np.mean([GAUSSIAN(X, np.roll(Y, shift, axis=1)) for shift in range(LENGTH)], axis=0)


def best_shift(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Return the largest of them: as plausible, but its Gram matrices have negative eigenvalues."""
    return np.max([GAUSSIAN(X, np.roll(Y, shift, axis=1)) for shift in range(LENGTH)], axis=0)


def signals(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return signals of three shapes, each shifted at random, with noise, and their shapes."""
    time, shape = np.arange(LENGTH), rng.integers(3, size=rows)
    shapes = np.stack([2.0 * (time < 6), 2.0 * ((time < 3) | ((time >= 6) & (time < 9))), time / 8])
    shifts = (time + rng.integers(LENGTH, size=(rows, 1))) % LENGTH
    return shapes[shape[:, np.newaxis], shifts] + 0.8 * rng.normal(size=(rows, LENGTH)), shape


def main(rows: int = 150) -> None:
    """Tell the shapes with a Gaussian and with the kernel that knows of shifts."""
    X, y = signals(np.random.default_rng(0), rows)
    Z, new = signals(np.random.default_rng(1), 1000)
    known = dkfm.KernelFisher(2, kernel=Function(over_shifts)).fit(X, y)
    dkfm.plotting.components(known.transform(Z), new)
    for kernel in (GAUSSIAN, Function(over_shifts)):
        phi = dkfm.ExactFeatureMap(kernel).fit(X)
        classifier = RidgeClassifier(alpha=1e-2).fit(phi.transform(X), y)
        print(f"{kernel!r:<24} {classifier.score(phi.transform(Z), new):.3f} of new signals are right")
    try:
        dkfm.ExactFeatureMap(Function(best_shift)).fit(X)
    except dkfm.errors.NotPSDError as error:
        print(f"{Function(best_shift)!r:<24} {error}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
