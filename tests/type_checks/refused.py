"""Programs that a type checker refuses: mypy --strict reports each comment below that is not needed."""

import numpy as np

import dkfm
from dkfm import kernels

K = kernels.Gaussian(2.0)
X = np.zeros((3, 2))

dkfm.ExactFeatureMap(K, basis="spectrall")  # type: ignore[arg-type]  # spectral is meant
dkfm.ExactFeatureMap(K, landmarks="k-means", n_landmarks=2)  # type: ignore[arg-type]  # kmeans is meant
dkfm.ExactFeatureMap(K, certify="some")  # type: ignore[arg-type]  # all or sample
dkfm.ExactFeatureMap(K, build="rows")  # type: ignore[arg-type]  # gram or columns
dkfm.ExactFeatureMap(K, on_indefinite="auto")  # type: ignore[arg-type]  # a map has no auto
dkfm.ExactFeatureMap(K, dtype="float16")  # type: ignore[arg-type]  # too few digits
dkfm.ExactFeatureMap(3)  # type: ignore[arg-type]  # a number is no kernel
dkfm.KernelPCA("two")  # type: ignore[arg-type]  # a number is asked for
dkfm.KernelPCA(2, eigen_solver="lanczos")  # type: ignore[arg-type]  # one of arpack, dense, randomized
dkfm.KernelPCA(2, formulation="both")  # type: ignore[arg-type]  # one of dual, primal, combined
dkfm.KernelFisher(shrinkage="cv")  # type: ignore[arg-type]  # a number or auto
dkfm.batch_score("model", X, "scores.zarr", on_invalid="skip")  # type: ignore[arg-type]  # raise or nan
dkfm.batch_score("model", X, "scores.zarr", chunk=3)  # type: ignore[call-arg]  # chunk_rows is meant
dkfm.KernelPCA(2).fit(X).transform(X).compute()  # type: ignore[attr-defined]  # an array in memory is not lazy
