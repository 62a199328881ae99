"""What is noted of a model's output tells an adapter that acts otherwise from rounding."""

from pathlib import Path
from typing import Any

import torch

from dit_lora.adapters.attach import attach_lora, is_lora_b
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.families import get_family
from dit_lora.results.verify.diffusion_model import DiffusionStock
from dit_lora.results.verify.output import compare_output, note_output
from dit_lora.results.verify.reference_model import tuner_layers


def test_an_effect_below_rounding_is_compared_at_a_multiple_of_its_scale(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """In bf16 rounding hides a weak adapter: one at twice its scale is found all the same, one as it was is not."""
    family = get_family("cogvideox")
    checkpoint: Any = family.open(
        ModelConfig(family="cogvideox", path=str(tiny_checkpoints["cogvideox-2b"]))
    )
    stock = DiffusionStock(checkpoint)

    def adapted(dtype: torch.dtype) -> Any:
        model = stock.load(dtype)
        attach_lora(model, LoraConfig(rank=4, alpha=8), family.lora_targets, seed=0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if is_lora_b(name):
                parameter.data = 1e-3 * torch.randn(parameter.shape, generator=generator)
        return model

    sizes = {"latent_mean": [4, 3, 4, 6], "latent_logvar": [4, 3, 4, 6], "prompt_embeds": [226, 32]}
    inputs = {name: {"shape": size, "dtype": "compute"} for name, size in sizes.items()}
    noted = note_output(stock, adapted(torch.bfloat16), inputs, torch.bfloat16)
    assert noted["louder"]["times"] > 10
    for dtype in (torch.bfloat16, torch.float32):
        model = adapted(dtype)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        as_it_was = compare_output(stock, model, noted, dtype, "the base")
        assert as_it_was.passed, as_it_was
        assert "bfloat16 on cpu then" in as_it_was.words
        assert [name for name, p in model.named_parameters() if p.requires_grad] == trained
        for layer in tuner_layers(model):
            layer.scale_layer(2)
        doubled = compare_output(stock, model, noted, dtype, "the base")
        assert not doubled.passed
        assert "does not act as trained" in doubled.words
    quiet = {key: value for key, value in noted.items() if key != "louder"}
    unseen = compare_output(stock, adapted(torch.float32), quiet, torch.float32, "the base")
    assert "that the adapter acts is not seen" in unseen.words
