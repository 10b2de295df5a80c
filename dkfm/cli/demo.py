"""Run the demo: fit scikit-learn's handwritten digits and score a larger data set on a local cluster."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dkfm import plotting
from dkfm.core import chunking
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, MissingExtraError, StoreExistsError
from dkfm.estimators import ExactFeatureMap, KernelPCA
from dkfm.execution import memory
from dkfm.execution.clusters.local import local_cluster
from dkfm.gram.build import build_gram, gram_store_path
from dkfm.kernels import Gaussian
from dkfm.plotting.axes import require_replaceable_picture
from dkfm.scoring.run import batch_score
from dkfm.scoring.score_readers import open_scores
from dkfm.storage import zarr_store

KERNEL = Gaussian(2.0)
"""Kernel for pixels in [0, 1]."""

TRAINING, TILE, COMPONENTS, NEIGHBOURS = 1000, 250, 20, 5
"""Training rows, rows of a Gram tile, components, and neighbours of the classifier."""

_SIDE = 8
"""Pixels of a side of an image."""

_NOISE = 0.05
"""Standard deviation of the noise on the rows to score."""

_CHUNK_ROWS = 10_000
_SEED = 2024
_MARKER = "dkfm-demo.json"
"""Name of the file that marks a folder of the demo."""

_STORES = {"features": "model", "components": "model", "rows.zarr": "rows", "scores.zarr": "scores"}
_PICTURES = ("spectrum.png", "components.png")


@dataclass(frozen=True)
class Digits:
    """scikit-learn's bundled handwritten digits, pixels in [0, 1], in a seeded order."""

    train: Array
    train_labels: npt.NDArray[np.int64]
    held_out: Array
    held_out_labels: npt.NDArray[np.int64]

    @classmethod
    def load(cls) -> "Digits":
        """Read the 1,797 images and split off the first 1,000 of a seeded order."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(_SEED).permutation(len(images))
        first, rest = order[:TRAINING], order[TRAINING:]
        return cls(images[first] / 16, labels[first], images[rest] / 16, labels[rest])


def run_demo(directory: str | Path, rows: int, say: Callable[[str], None]) -> None:
    """Run the demo in a directory, and report the results line by line.

    Parameters
    ----------
    directory : str or Path
        Directory to create, or the directory of an earlier demo, whose files are removed.
    rows : int
        Number of rows to score.
    say : callable
        Function that is called with each line.

    Raises
    ------
    StoreExistsError
        The directory contains files that no demo wrote; it is left untouched.
    """
    from distributed import Client

    if rows < 1:
        raise InvalidInputError(f"The demo scores at least one row, and --rows is {rows}.")
    folder, digits = Path(directory).absolute(), Digits.load()
    _prepare_folder(folder)
    with local_cluster() as cluster, Client(cluster) as client:
        say(f"dashboard     {client.dashboard_link}")
        seconds = _measure_seconds(
            lambda: build_gram(KERNEL, digits.train, gram_store_path(KERNEL, digits.train, folder), tile_rows=TILE)
        )
        tiles = list(chunking.lower_triangle_tile_indices(TRAINING, TILE))
        say(f"Gram          {len(tiles)} tiles of {TILE} x {TILE} in {seconds:.1f} s")
        phi = ExactFeatureMap(KERNEL, tile_rows=TILE, workspace=folder).fit(digits.train)
        phi.save(folder / "features")
        say(f"rank          {phi.rank_} of {TRAINING}, condition {phi.condition_:.1e}")
        say(f"certificate   {phi.certificate_}")
        pca = KernelPCA(COMPONENTS, kernel=KERNEL, tile_rows=TILE, workspace=folder).fit(digits.train)
        pca.save(folder / "components")
        _write_rows(folder / "rows.zarr", digits.held_out, rows)
        report = batch_score(folder / "components", folder / "rows.zarr", folder / "scores.zarr", client=client)
        say(f"scored        {report.rows:,} rows, {report.rows_per_second:,.0f} rows per second")
        peaks = [memory.peak_memory(), *client.run(memory.peak_memory).values()]
        say(f"peak memory   driver {peaks[0] / 1e6:,.0f} MB, worker {max(peaks[1:]) / 1e6:,.0f} MB")
    train, held_out = np.asarray(pca.transform(digits.train)), np.asarray(pca.transform(digits.held_out))
    accuracy = _knn_accuracy(train, digits.train_labels, held_out, digits.held_out_labels)
    say(f"accuracy      {accuracy:.4f} of {NEIGHBOURS} nearest neighbours on {len(held_out)} untouched digits")
    _save_pictures(folder, phi, held_out, digits.held_out_labels)
    shape = open_scores(folder / "scores.zarr").shape
    say(f"files         {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}; scores {shape}")


def _prepare_folder(folder: Path) -> None:
    """Create the folder, or remove the files of an earlier demo from it."""
    marker = folder / _MARKER
    if folder.exists() and not folder.is_dir():
        raise StoreExistsError(f"{folder} is not a directory; choose another with --dir.")
    if folder.exists() and any(folder.iterdir()):
        if not marker.is_file():
            raise StoreExistsError(f"{folder} holds something that no demo wrote; choose another with --dir.")
        for name in _PICTURES:
            require_replaceable_picture(folder / name)
        gram = gram_store_path(KERNEL, Digits.load().train, folder).name
        for name, kind in {**_STORES, gram: "gram"}.items():
            if zarr_store.is_taken(folder / name):
                zarr_store.remove_own_store(folder / name, kind)
        for name in _PICTURES:
            (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text(json.dumps({"about": "made by dkfm demo, which removes what it made here when it runs again"}))


def _measure_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _write_rows(path: Path, images: Array, rows: int) -> None:
    """Write the rows to score chunk by chunk: held-out digits, shifted by up to one pixel, with seeded noise."""
    with zarr_store.new_store(path, "rows", {}, ["rows"]) as group:
        array = zarr_store.add_array(group, "rows", (rows, images.shape[1]), (min(_CHUNK_ROWS, rows), images.shape[1]))
        for part in chunking.row_slices(rows, _CHUNK_ROWS):
            array[part] = _augment_images(images, part.stop - part.start, np.random.default_rng([_SEED, part.start]))


def _augment_images(images: Array, count: int, rng: np.random.Generator) -> Array:
    """Return `count` images that are drawn at random, shifted by up to one pixel and made noisy."""
    padded = np.pad(images.reshape(-1, _SIDE, _SIDE), ((0, 0), (1, 1), (1, 1)))
    which, down, right = rng.integers(len(images), size=count), *rng.integers(3, size=(2, count))
    span = np.arange(_SIDE)
    shifted = padded[which[:, None, None], (down[:, None] + span)[:, :, None], (right[:, None] + span)[:, None, :]]
    noisy: Array = shifted.reshape(count, -1) + _NOISE * rng.normal(size=(count, _SIDE * _SIDE))
    return noisy


def _knn_accuracy(
    train: Array, train_labels: npt.NDArray[np.int64], test: Array, test_labels: npt.NDArray[np.int64]
) -> float:
    """Return the accuracy on test rows of a k-nearest-neighbours classifier that is fitted here to training rows."""
    from sklearn.neighbors import KNeighborsClassifier

    return float(KNeighborsClassifier(NEIGHBOURS).fit(train, train_labels).score(test, test_labels))


def _save_pictures(folder: Path, phi: ExactFeatureMap, scores: Array, labels: npt.NDArray[np.int64]) -> None:
    try:
        pictures = plotting.spectrum(phi.eigenvalues_, phi.dropped_), plotting.components(scores, labels)
    except MissingExtraError:
        return  # Matplotlib is not installed
    for picture, name in zip(pictures, _PICTURES, strict=True):
        plotting.save_picture(picture, folder / name)
