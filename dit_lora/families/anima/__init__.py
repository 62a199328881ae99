"""Anima text-to-image, a model of Cosmos-Predict2's architecture for illustrations; its checkpoints are modular."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

_ATTENTION = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out.0": "output_proj"}
_MODULATIONS = {"norm1": "self_attn", "norm2": "cross_attn", "norm3": "mlp"}
# ComfyUI's model has the published names (comfy/ldm/cosmos/predict2.py at 267c1cc). Diffusers' loader converts them
# (_convert_non_diffusers_anima_lora_to_diffusers in loaders/lora_conversion_utils.py), and refuses `.alpha`.
_COMFYUI_NAMES = {
    **{
        f"transformer_blocks.*.{attention}.{name}": f"blocks.*.{published}.{published_name}"
        for attention, published in {"attn1": "self_attn", "attn2": "cross_attn"}.items()
        for name, published_name in _ATTENTION.items()
    },
    **{
        f"transformer_blocks.*.{norm}.linear_{number}": f"blocks.*.adaln_modulation_{published}.{number}"
        for norm, published in _MODULATIONS.items()
        for number in (1, 2)
    },
    "transformer_blocks.*.ff.net.0.proj": "blocks.*.mlp.layer1",
    "transformer_blocks.*.ff.net.2": "blocks.*.mlp.layer2",
    "patch_embed.proj": "x_embedder.proj.1",
    "time_embed.t_embedder.linear_1": "t_embedder.1.linear_1",
    "time_embed.t_embedder.linear_2": "t_embedder.1.linear_2",
    "norm_out.linear_1": "final_layer.adaln_modulation.1",
    "norm_out.linear_2": "final_layer.adaln_modulation.2",
    "proj_out": "final_layer.linear",
}

FAMILY = DiffusionFamily(
    name="anima",
    # The default targets are also SimpleTuner's (simpletuner/helpers/models/anima/model.py): attention of all blocks.
    group_patterns={
        "connector": ("patch_embed.*", "time_embed.*", "norm_out.*", "proj_out.*"),
        "backbone": ("transformer_blocks.*",),
    },
    pipeline_names=("AnimaModularPipeline",),
    # Cosmos' transformer resizes a mask with it.
    pipeline_packages=("torchvision",),
    default_recipe="anima/base",
    # From the card of circlestone-labs/Anima. Adapters are derivatives, for non-commercial purposes only.
    licenses={
        "circlestone-labs/Anima*": License(
            "other",
            "circlestone-labs-non-commercial-license",
            "https://huggingface.co/circlestone-labs/Anima/blob/main/LICENSE.md",
        )
    },
    comfyui=LayerNames(renames=_COMFYUI_NAMES, reads_alpha=False),
    tiny_variants=("anima",),
)
