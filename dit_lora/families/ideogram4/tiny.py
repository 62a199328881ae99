"""A tiny random Ideogram 4, without the prompt enhancer. Text is encoded as bytes."""

from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, Ideogram4Pipeline, Ideogram4Transformer2DModel
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import QWEN3_VL_ACTIVATION_LAYERS

from dit_lora.families.tiny.chat_text import QWEN3_VL_TOKENS, TEXT_WIDTH, build_byte_tokenizer, build_qwen3_vl
from dit_lora.families.tiny.vae import LATENT_CHANNELS, build_flux2_vae

# Qwen3-VL's template for messages whose content is a list of parts.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny Ideogram 4 pipeline with weights from torch's default generator."""
    tokenizer = build_byte_tokenizer(QWEN3_VL_TOKENS, end_token="<|im_end|>")
    tokenizer.chat_template = _TEMPLATE
    pipeline: Any = Ideogram4Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=build_flux2_vae(),
        # As many layers as the published one has: the pipeline reads the last one's hidden states too.
        text_encoder=build_qwen3_vl(tokenizer, QWEN3_VL_ACTIVATION_LAYERS[-1] + 1),
        tokenizer=tokenizer,
        transformer=_build_transformer(),
        unconditional_transformer=_build_transformer(),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_transformer() -> Any:
    transformer: Any = Ideogram4Transformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=48,
        adaln_dim=8,
        llm_features_dim=len(QWEN3_VL_ACTIVATION_LAYERS) * TEXT_WIDTH,
        mrope_section=(4, 2, 2),
    )
    return transformer.eval()
