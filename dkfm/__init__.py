"""dkfm: exact, explicit, finite-dimensional feature maps of any kernel, built and applied with Dask.

Each module is imported when one of its names is first used, so that ``import dkfm`` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dkfm import errors as errors
    from dkfm import kernels, plotting
    from dkfm.core import sizing as sizing
    from dkfm.estimators import ExactFeatureMap, KernelFisher, KernelPCA, KernelRidge, KernelRidgeClassifier, fold, load
    from dkfm.estimators.planning.fit_plan import plan_fit
    from dkfm.estimators.planning.plan_report import FitPlan
    from dkfm.gram.build import build_gram
    from dkfm.kernel_comparison import tsne_embedding
    from dkfm.kernel_comparison.compare import compare_kernels
    from dkfm.kernel_comparison.result import Comparison
    from dkfm.scoring.planning import Plan
    from dkfm.scoring.report import ScoreReport
    from dkfm.scoring.run import batch_score, plan_score
    from dkfm.scoring.score_readers import iter_scores, open_scores
    from dkfm.scoring.verification import verify_scores

    tsne = tsne_embedding

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "ExactFeatureMap",
    "FitPlan",
    "KernelFisher",
    "KernelPCA",
    "KernelRidge",
    "KernelRidgeClassifier",
    "Plan",
    "ScoreReport",
    "batch_score",
    "build_gram",
    "compare_kernels",
    "fold",
    "iter_scores",
    "kernels",
    "load",
    "open_scores",
    "plan_fit",
    "plan_score",
    "plotting",
    "verify_scores",
]

_MODULE_PATHS = {
    "errors": "dkfm.errors",
    "kernels": "dkfm.kernels",
    "plotting": "dkfm.plotting",
    "sizing": "dkfm.core.sizing",
    "tsne": "dkfm.kernel_comparison.tsne_embedding",
}
_DEFINING_MODULES = {
    "Comparison": "dkfm.kernel_comparison.result",
    "ExactFeatureMap": "dkfm.estimators",
    "FitPlan": "dkfm.estimators.planning.plan_report",
    "KernelFisher": "dkfm.estimators",
    "KernelPCA": "dkfm.estimators",
    "KernelRidge": "dkfm.estimators",
    "KernelRidgeClassifier": "dkfm.estimators",
    "Plan": "dkfm.scoring.planning",
    "ScoreReport": "dkfm.scoring.report",
    "batch_score": "dkfm.scoring.run",
    "build_gram": "dkfm.gram.build",
    "compare_kernels": "dkfm.kernel_comparison.compare",
    "fold": "dkfm.estimators",
    "iter_scores": "dkfm.scoring.score_readers",
    "load": "dkfm.estimators",
    "open_scores": "dkfm.scoring.score_readers",
    "plan_fit": "dkfm.estimators.planning.fit_plan",
    "plan_score": "dkfm.scoring.run",
    "verify_scores": "dkfm.scoring.verification",
}


def __getattr__(name: str) -> object:
    if name in _MODULE_PATHS:
        return import_module(_MODULE_PATHS[name])
    if name in _DEFINING_MODULES:
        return getattr(import_module(_DEFINING_MODULES[name]), name)
    raise AttributeError(f"module 'dkfm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULE_PATHS, "__version__"})
