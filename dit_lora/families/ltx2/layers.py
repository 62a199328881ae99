"""Names of the layers in LTX-2's blocks, for video and for sound."""

from typing import TYPE_CHECKING

from dit_lora.errors import DitLoraError

if TYPE_CHECKING:
    # It takes a quarter of a second, and commands that only list families and recipes do not need it.
    from dit_lora.config.recipe import Recipe

ATTENTION_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
"""Adapted layers of an attention. With sound, all attentions are adapted.

Source: Lightricks/LTX-2, ltx-trainer, docs/configuration-reference.md.
"""
# Attention of the sound to itself and to its text, and between sound and video.
SOUND_ATTENTIONS = ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")


def _list_layers(attentions: tuple[str, ...], feed_forward: str) -> tuple[str, ...]:
    return (
        *(f"{attn}.{layer}" for attn in attentions for layer in (*ATTENTION_LAYERS, "to_gate_logits")),
        *(f"{feed_forward}.{layer}" for layer in ("net.0.proj", "net.2")),
    )


_SOUND_LAYERS = _list_layers(SOUND_ATTENTIONS, "audio_ff")
# All linear layers of a block, in the order of the video's and then the sound's.
BLOCK_LAYERS = (*_list_layers(("attn1", "attn2"), "ff"), *_SOUND_LAYERS)


def refuse_sound_layers(recipe: "Recipe") -> None:
    """Raise `DitLoraError` if layers for sound would train without sound: they get no gradient."""
    groups = recipe.optim.groups
    if recipe.train.mode == "full" or groups.connector is not None or groups.backbone is not None:
        raise DitLoraError(
            "train.mode: full and optim.groups.connector or backbone train the layers of sound too, which get no "
            "gradient without it; set data.sound: true, or train only an adapter"
        )
    # A target matches a layer's full name or its end, as in PEFT.
    names = [
        target
        for target in recipe.lora.targets or ()
        if any(f".{layer}".endswith(f".{target}") for layer in _SOUND_LAYERS)
    ]
    if names:
        raise DitLoraError(
            f"lora.targets: {', '.join(names)} adapts layers of sound too, which get no gradient without it; name the "
            f"video's (attn1.to_q, attn2.to_q, ff.net.2), or set data.sound: true"
        )
