"""The laws that every kernel, feature map, scoring estimator, store and source obeys; new classes run through them."""

from contracts.feature_map import check_feature_map
from contracts.kernel import check_kernel, value_scale
from contracts.scoring import check_scoring
from contracts.source import check_source
from contracts.store import check_store

__all__ = ["check_feature_map", "check_kernel", "check_scoring", "check_source", "check_store", "value_scale"]
