"""LTX-2's guidances: the pipeline has four of the video and four of its sound."""

from typing import Any

_NONE = {
    "guidance_rescale": 0.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "audio_guidance_rescale": 0.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
}


def guidances(scale: float, *, perturbed: bool) -> dict[str, Any]:
    """Return the pipeline's arguments beside `guidance_scale`: its own defaults, all or none.

    Above 1, that is the video's, in the space of clean latents, beside the pipeline's defaults for sound, modalities and
    perturbed attention; else there is one call a step, as distilled checkpoints want. Without `perturbed` attention (2.0) its
    call would be the same once more.
    """
    if scale <= 1:
        return dict(_NONE)
    return {} if perturbed else {"stg_scale": 0.0, "audio_stg_scale": 0.0}
