"""
Denoising
=========

Remove noise from digits with pre-images of their components, and compare with the method of scikit-learn's example. See
the error of both. The picture shows noisy digits, cleaned digits, and the originals.
"""

import gzip
import os
import sys
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA, KernelPCA

import dkfm

NOISE = 0.25


def digits() -> tuple[str, np.ndarray]:
    """Return images of digits (n, d), pixels in [0, 1], in a seeded order: MNIST of DKFM_MNIST, or scikit-learn's."""
    folder = os.environ.get("DKFM_MNIST")
    if folder is None:
        name, images = "scikit-learn's digits (DKFM_MNIST names no folder with MNIST)", load_digits().data / 16
    else:
        packed = (Path(folder) / "t10k-images-idx3-ubyte.gz").read_bytes()
        name, images = "MNIST", np.frombuffer(gzip.decompress(packed), np.uint8, offset=16).reshape(-1, 784) / 255
    return name, images[np.random.default_rng(0).permutation(len(images))]


def main(rows: int = 1000) -> None:
    """Fit everything to the same noisy digits and clean the same others; print mean squared errors."""
    name, images = digits()
    noisy = images + np.random.default_rng(1).normal(scale=NOISE, size=images.shape)
    train, test, truth = noisy[:rows], noisy[rows : rows + 100], images[rows : rows + 100]

    kernel = dkfm.kernels.Gaussian("median").resolve(train)
    kernel = dkfm.kernels.Gaussian(kernel.sigma / 2)
    ours = dkfm.KernelPCA(min(160, rows // 4), kernel=kernel).fit(train)
    linear = PCA(32, random_state=0).fit(train)
    # As in "Image denoising using kernel PCA" of scikit-learn's documentation, and with the kernel from above.
    ridge = {"fit_inverse_transform": True, "alpha": 5e-3, "kernel": "rbf"}
    theirs = KernelPCA(400, gamma=1e-3, random_state=0, **ridge).fit(train)
    same = KernelPCA(len(ours.eigenvalues_), gamma=1 / (2 * kernel.sigma**2), random_state=0, **ridge).fit(train)

    cleaned = {
        "as it came": test,
        "PCA, 32 components": linear.inverse_transform(linear.transform(test)),
        "scikit-learn's KernelPCA, its example's numbers": theirs.inverse_transform(theirs.transform(test)),
        "scikit-learn's KernelPCA, the kernel below": same.inverse_transform(same.transform(test)),
        f"dkfm's preimage, {len(ours.eigenvalues_)} components": ours.preimage(ours.transform(test), test),
    }
    print(f"{name}: {len(test)} noisy images, mean squared error")
    for way, found in cleaned.items():
        print(f"{way:<50} {np.mean((found - truth) ** 2):.4f}")
    draw({"noisy": test, "cleaned": list(cleaned.values())[-1], "truth": truth})


def draw(images: dict[str, np.ndarray]) -> None:
    """Draw the first ten images of each kind in a row."""
    panels = plt.figure(figsize=(8, 3), layout="constrained").subplots(len(images), 10)
    for (name, rows), row in zip(images.items(), panels, strict=True):
        row[0].set_ylabel(name)
        for image, panel in zip(rows, row, strict=False):
            side = int(np.sqrt(len(image)))
            panel.imshow(image.reshape(side, side), cmap="gray", vmin=0, vmax=1)
            panel.set(xticks=[], yticks=[])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
