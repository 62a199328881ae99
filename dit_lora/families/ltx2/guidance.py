"""LTX-2's guidance: the pipeline has four kinds for the video and four for its sound."""

from typing import Any

# Values at which each kind of guidance has no effect: 0 for terms that are added, 1 for scales.
_GUIDANCE_OFF = {
    "guidance_rescale": 0.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "audio_guidance_rescale": 0.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
}


def guidance_kwargs(guidance_scale: float, *, has_perturbed_attention: bool) -> dict[str, Any]:
    """Pipeline arguments for all guidance other than `guidance_scale`: the pipeline's defaults, or all off.

    Above 1, the pipeline's defaults for sound, modalities and perturbed attention apply. Otherwise each step is a
    single call, as distilled checkpoints need.

    Args:
        guidance_scale: The video's classifier-free guidance, in the space of clean latents.
        has_perturbed_attention: True if the transformer has perturbed attention. Without it (2.0), its extra call
            would only repeat another one.
    """
    # Guidance scales up to 1 mean no guidance, as in the pipeline.
    if guidance_scale <= 1:
        return dict(_GUIDANCE_OFF)
    return {} if has_perturbed_attention else {"stg_scale": 0.0, "audio_stg_scale": 0.0}
