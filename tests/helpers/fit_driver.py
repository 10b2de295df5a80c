"""A driver of long fits in a process of its own, whose products are computed anew, however fast the machine is."""

import sys

_SCRIPT = """
import sys
import numpy as np
from contextlib import nullcontext
from distributed import Client
from dkfm import ExactFeatureMap, KernelPCA, KernelRidge, kernels
from dkfm.estimators.fitting import eigenproblem_setup
from dkfm.gram import matrix_free, streamed_pivots
from dkfm.gram.fit_checkpoints import keep_states_until_end
from dkfm.gram.product_costs import ProductMethod

kind, rows, model, workspace, steps, address = sys.argv[1:]
select = eigenproblem_setup.rank_product_costs
only = ProductMethod.MATRIX_FREE
eigenproblem_setup.rank_product_costs = lambda *given: [c for c in select(*given) if c.method is only]

def count(owner, name):
    real = getattr(owner, name)
    def counted(*given):
        result = real(*given)
        if steps:
            with open(steps, "a") as file:
                file.write("x")
        return result
    setattr(owner, name, counted)

streamed_pivots.ROUND_CANDIDATES, streamed_pivots._LARGEST = 200, 50
count(matrix_free.MatrixFreeGram, "__matmul__")
count(streamed_pivots, "_run_round")
with keep_states_until_end(), Client(address) if address != "threads" else nullcontext():
    workspace = workspace or None
    if kind == "components":
        fitted = KernelPCA(5, kernel=kernels.Gaussian(5.0), workspace=workspace, tile_rows=1000).fit(np.load(rows))
    elif kind == "regression":
        X, options = np.load(rows), {"solver": "tiled", "tile_rows": 500, "leave_one_out": True}
        ridge = KernelRidge(0.1, kernel=kernels.Gaussian(5.0), workspace=workspace, **options)
        fitted = ridge.fit(X, np.column_stack([np.sin(X[:, 0]), X[:, 1]]))
    elif kind == "map":
        place, options = workspace or f"{model}-work", {"build": "tiled", "tile_rows": 500}
        phi = ExactFeatureMap(kernels.Gaussian(5.0), basis="cholesky", workspace=place, **options)
        fitted = phi.fit(np.load(rows))
    else:
        phi = ExactFeatureMap(kernels.Gaussian(4.0), basis="cholesky", tol=1e-2, workspace=workspace)
        fitted = phi.fit(rows)
    fitted.save(model, overwrite=True)
"""


def fit_command(kind, rows, model, *, workspace="", steps="", address="threads"):
    """Return the command of a fit of "components", "pivots", a "regression" or a "map" to rows in a file.

    It saves its model. A letter for each product or round is appended to the file `steps`. On threads, or on the
    cluster at an address.
    """
    return [sys.executable, "-c", _SCRIPT, kind, str(rows), str(model), str(workspace), str(steps), address]
