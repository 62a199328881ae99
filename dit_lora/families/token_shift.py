"""The shift of noise levels by a sample's number of tokens, as Diffusers' pipelines compute it for their schedulers."""

from collections.abc import Mapping
from typing import Any

from diffusers.pipelines.flux.pipeline_flux import calculate_shift


def mu_by_tokens(scheduler: Mapping[str, Any], tokens: int) -> float:
    """Return the shift's logarithm for this many image or video tokens, by a scheduler's config filled up with its defaults."""
    return calculate_shift(
        tokens,
        scheduler["base_image_seq_len"],
        scheduler["max_image_seq_len"],
        scheduler["base_shift"],
        scheduler["max_shift"],
    )
