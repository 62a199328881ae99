"""Every adapter of a pipeline has the strength that is asked for: a text encoder's and both experts' too."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import FluxPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from exported import trained
from peft.utils import get_peft_model_state_dict

from dit_lora.adapters.diffusers_format import ADAPTER_FILE
from dit_lora.adapters.load import load_adapter
from dit_lora.adapters.strength import scale_adapters
from dit_lora.families import get_family

SIZE: dict[str, Any] = {"height": 32, "width": 48, "num_inference_steps": 2}


def latents(pipeline: Any, **more: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.manual_seed(3)
    outputs = pipeline("a red disc", **SIZE, **more, output_type="latent", generator=generator)
    latent: torch.Tensor = outputs[0]
    return latent


@pytest.mark.thorough
def test_a_text_encoders_adapter_has_the_strength_of_the_transformers(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    base = tiny_checkpoints["flux-dev"]
    reference = FluxPipeline.from_pretrained(base)
    stock_latents = latents(reference)
    states = {}
    for part, names in (("transformer", ["to_q", "to_k"]), ("text_encoder", ["q_proj"])):
        model = getattr(reference, part)
        model.add_adapter(peft.LoraConfig(r=2, lora_alpha=4, target_modules=names))
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        states[part] = convert_state_dict_to_diffusers(get_peft_model_state_dict(model))
    FluxPipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=states["transformer"],
        text_encoder_lora_layers=states["text_encoder"],
    )
    reference, pipeline = FluxPipeline.from_pretrained(base), FluxPipeline.from_pretrained(base)
    reference.load_lora_weights(tmp_path, adapter_name="both")
    load_adapter(pipeline, tmp_path / ADAPTER_FILE, get_family("flux").comfyui, name="both")
    for strength in (1.0, 0.5):
        reference.set_adapters("both", strength)
        with scale_adapters(pipeline, strength):
            assert torch.equal(latents(pipeline), latents(reference)), strength
    with scale_adapters(pipeline, 0.0):
        assert torch.equal(latents(pipeline), stock_latents)
    reference.set_adapters("both", {"transformer": 0.5, "text_encoder": 0.0})
    with scale_adapters(pipeline, 0.5):
        assert not torch.equal(latents(pipeline), latents(reference)), "the text encoder's has a part in it"


@pytest.mark.thorough
def test_both_experts_adapters_have_it_and_get_their_own_back(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    base = tiny_checkpoints["wan-2.2-t2v-a14b"]
    adapter = trained("wan", base, tmp_path / "adapter", scale=0.3)
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(base)
    adapter_latents = latents(pipeline, num_frames=5)
    for second in (False, True):
        pipeline.load_lora_weights(adapter.folder, load_into_transformer_2=second, adapter_name="own")
    full_latents = latents(pipeline, num_frames=5)
    with scale_adapters(pipeline, 0.0):
        assert torch.equal(latents(pipeline, num_frames=5), adapter_latents)
    with scale_adapters(pipeline, 0.5):
        half_latents = latents(pipeline, num_frames=5)
    assert torch.equal(latents(pipeline, num_frames=5), full_latents)
    pipeline.set_adapters("own", 0.5)
    assert torch.equal(latents(pipeline, num_frames=5), half_latents)
    assert not torch.equal(half_latents, full_latents)
