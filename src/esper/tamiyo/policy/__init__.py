"""What a policy sees and may do: Observation V3, its normalisation, masks and distributions."""

from esper.tamiyo.policy.action_masks import (
    MaskedCategorical,
    available_heads,
    base_mask,
    causal_heads,
    compute_action_masks,
    heads_mask,
)
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.layout import (
    FEATURE_NAMES,
    FeatureSpec,
    feature_names,
    feature_specs,
    get_feature_size,
)
from esper.tamiyo.policy.normalizer import ObservationNormalizer

__all__ = [
    "FEATURE_NAMES",
    "FeatureSpec",
    "MaskedCategorical",
    "ObservationNormalizer",
    "available_heads",
    "base_mask",
    "batch_obs_to_features",
    "causal_heads",
    "compute_action_masks",
    "feature_names",
    "feature_specs",
    "get_feature_size",
    "heads_mask",
]
