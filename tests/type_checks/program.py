"""Use every public name as a typed program does: mypy --strict and pyright find no error in this file."""

from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt

import dkfm
from dkfm import kernels
from dkfm.errors import DkfmError

Array = npt.NDArray[np.floating[Any]]


def fit(X: Array, y: npt.NDArray[np.int64]) -> dkfm.KernelPCA:
    kernel: kernels.Kernel = 0.5 * kernels.Gaussian(2.0) + kernels.Polynomial(2) ** 2 * kernels.Laplacian("median")
    plan: dkfm.FitPlan = dkfm.plan_fit(dkfm.KernelPCA(2, kernel=kernel), X)
    plan.require()
    phi = dkfm.ExactFeatureMap(kernel, basis="cholesky", landmarks="uniform", n_landmarks=20).fit(X)
    features: Array = phi.transform(X)
    lazy: da.Array = phi.transform(da.asarray(features))
    errors: Array = phi.residual(X)
    labels: npt.NDArray[np.generic] = dkfm.KernelFisher(kernel="rbf", shrinkage="auto").fit(X, y).predict(X)
    ridge = dkfm.KernelRidge("loo", kernel=kernel).fit(X, y)
    predicted: Array = ridge.predict(X)
    later: da.Array = dkfm.KernelRidgeClassifier(0.1, solver="cg").fit(X, y).predict(lazy)
    print(predicted.shape, later.shape, ridge.alpha_, ridge.certificate_)
    print(lazy.shape, errors.max(), labels[0], phi.error_bound_, phi.certificate_)
    dkfm.fold(phi, object()).save("folded")
    return dkfm.KernelPCA.from_map(phi, 2, X)


def score(pca: dkfm.KernelPCA, rows: da.Array) -> dkfm.ScoreReport:
    pca.save("model", overwrite=True)
    model = dkfm.load("model", trusted=["module:function"])
    assert isinstance(model, dkfm.KernelPCA)
    plan: dkfm.Plan = dkfm.plan_score(model, rows, "scores.zarr", on_invalid="nan")
    try:
        report = dkfm.batch_score("model", rows, "scores.zarr", on_invalid="nan", append=False)
    except DkfmError as error:
        raise SystemExit(f"{error} (of {plan.seconds} seconds)") from None
    for block, numbers in dkfm.iter_scores("scores.zarr"):
        print(block.mean(), numbers[0], dkfm.open_scores("scores.zarr").shape)
    print(dkfm.verify_scores("scores.zarr", rows).worst, dkfm.build_gram(pca.kernel_, "rows.npy", "gram.zarr"))
    comparison: dkfm.Comparison = dkfm.compare_kernels([kernels.Linear(), "rbf"], np.eye(4), [0, 0, 1, 1])
    dkfm.plotting.spectrum(pca)
    print(comparison, dkfm.__version__)
    return report
