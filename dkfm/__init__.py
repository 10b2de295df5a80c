"""dkfm: exact, explicit, finite-dimensional feature maps of any kernel, built and applied with Dask.

Everything is imported where it is first used, so that ``import dkfm`` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dkfm import kernels
    from dkfm.estimators import ExactFeatureMap, KernelFisher, KernelPCA, fold, load
    from dkfm.gram import build_gram
    from dkfm.planning import Plan
    from dkfm.readers import iter_scores, open_scores
    from dkfm.report import ScoreReport
    from dkfm.scoring import batch_score, plan_score
    from dkfm.verification import verify_scores

__version__ = "0.1.0"

__all__ = [
    "ExactFeatureMap",
    "KernelFisher",
    "KernelPCA",
    "Plan",
    "ScoreReport",
    "batch_score",
    "build_gram",
    "fold",
    "iter_scores",
    "kernels",
    "load",
    "open_scores",
    "plan_score",
    "verify_scores",
]

_HOMES = {
    "ExactFeatureMap": "dkfm.estimators",
    "KernelFisher": "dkfm.estimators",
    "KernelPCA": "dkfm.estimators",
    "Plan": "dkfm.planning",
    "ScoreReport": "dkfm.report",
    "batch_score": "dkfm.scoring",
    "build_gram": "dkfm.gram",
    "fold": "dkfm.estimators",
    "iter_scores": "dkfm.readers",
    "load": "dkfm.estimators",
    "open_scores": "dkfm.readers",
    "plan_score": "dkfm.scoring",
    "verify_scores": "dkfm.verification",
}


def __getattr__(name: str) -> object:
    if name == "kernels":
        return import_module("dkfm.kernels")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dkfm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
