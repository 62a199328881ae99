"""The recorded model output separates an adapter that acts differently from rounding error."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dit_lora.adapters.attach import attach_lora, find_tuner_layers, is_lora_b
from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.families import get_family
from dit_lora.verify.diffusion_model import DiffusionReferenceModel
from dit_lora.verify.output_fingerprint import compare_output, record_output


def test_an_effect_below_rounding_is_compared_at_a_multiple_of_its_scale(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """In bf16 rounding hides a weak adapter: one at twice its scale is found all the same, one as it was is not."""
    family = get_family("cogvideox")
    checkpoint: Any = family.open(ModelConfig(family="cogvideox", path=str(tiny_checkpoints["cogvideox-2b"])))
    reference = DiffusionReferenceModel(checkpoint)

    def adapted(dtype: torch.dtype) -> Any:
        model = reference.load_model(dtype)
        attach_lora(model, LoraConfig(rank=4, alpha=8), family.lora_targets, seed=0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if is_lora_b(name):
                parameter.data = 1e-3 * torch.randn(parameter.shape, generator=generator)
        return model

    sizes = {"latent_mean": [4, 3, 4, 6], "latent_logvar": [4, 3, 4, 6], "prompt_embeds": [226, 32]}
    inputs = {name: {"shape": size, "dtype": "compute"} for name, size in sizes.items()}
    recorded_output = record_output(reference, adapted(torch.bfloat16), inputs, torch.bfloat16)
    assert recorded_output["louder"]["times"] > 10
    for dtype in (torch.bfloat16, torch.float32):
        model = adapted(dtype)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        unchanged_result = compare_output(reference, model, recorded_output, dtype, "the base")
        assert unchanged_result.passed, unchanged_result
        assert "(bfloat16 on cpu " in unchanged_result.message
        assert [name for name, p in model.named_parameters() if p.requires_grad] == trained
        for layer in find_tuner_layers(model):
            layer.scale_layer(2)
        doubled_result = compare_output(reference, model, recorded_output, dtype, "the base")
        assert not doubled_result.passed
        assert "does not act as trained" in doubled_result.message
    output_without_scale = {key: value for key, value in recorded_output.items() if key != "louder"}
    unseen_result = compare_output(reference, adapted(torch.float32), output_without_scale, torch.float32, "the base")
    assert "the effect of the adapter is not checked" in unseen_result.message


@pytest.fixture(scope="module")
def noted_at_other_levels(tiny_checkpoints: dict[str, Path]) -> tuple[Any, Any, dict[str, Any]]:
    """The checkpoint, its model, and the output recorded by a run with another timestep shift."""
    path = str(tiny_checkpoints["sd3.5-medium"])
    checkpoint: Any = get_family("sd3").open(ModelConfig(family="sd3", path=path))
    denoiser = checkpoint.denoiser
    shifted_denoiser = replace(denoiser, objective=replace(denoiser.objective, shift=9.0))
    shifted = replace(checkpoint, denoiser=shifted_denoiser)
    channels = checkpoint.info.transformer_config["in_channels"]
    size = torch.Size([channels, 8, 8])
    latents = dict.fromkeys(("latent_mean", "latent_logvar"), (size, torch.float32))
    clips = SimpleNamespace(
        video_specs={VideoShape(1, 64, 64): latents},
        text_spec=checkpoint.encoders.text_spec(torch.float32),
    )
    model = DiffusionReferenceModel(checkpoint).load_model(torch.float32)
    attach_lora(model, LoraConfig(rank=2), get_family("sd3").lora_targets, seed=0)
    reference = DiffusionReferenceModel(shifted)
    recorded_output = record_output(reference, model, reference.make_input_spec(clips, full_size=True), torch.float32)
    return checkpoint, model, recorded_output


def test_an_output_is_compared_at_the_noise_level_that_it_was_noted_at(
    noted_at_other_levels: tuple[Any, Any, dict[str, Any]],
) -> None:
    """Independent of the checkpoint's default: `train.timesteps` does not take part."""
    checkpoint, model, recorded_output = noted_at_other_levels
    (level,) = recorded_output["inputs"]["draw/timestep"]["values"]
    assert 0 < level < 1
    check = compare_output(DiffusionReferenceModel(checkpoint), model, recorded_output, torch.float32, "the base")
    assert check.passed, check.message
    assert check.message.startswith("as trained")


def test_a_file_that_does_not_say_its_noise_level_is_judged_by_the_bases_digest(
    noted_at_other_levels: tuple[Any, Any, dict[str, Any]],
) -> None:
    checkpoint, model, recorded_output = noted_at_other_levels
    reference = DiffusionReferenceModel(checkpoint)
    sizes = {k: value for k, value in recorded_output["inputs"].items() if not k.startswith("draw/")}
    earlier = {**recorded_output, "inputs": sizes}
    same_base = compare_output(reference, model, earlier, torch.float32, "the base", digest=reference.compute_digest())
    assert same_base.passed
    assert same_base.message.startswith("not compared: an earlier version wrote the file")
    other_base = compare_output(reference, model, earlier, torch.float32, "the base", digest="0" * 64)
    assert not other_base.passed
    assert "the base differs" in other_base.message
    assert "without the noise level" in other_base.message
    # A file that says it has no such excuse.
    inputs = {**recorded_output["inputs"], "draw/timestep": {"values": [0.01], "dtype": "float32"}}
    moved_output = {**recorded_output, "inputs": inputs}
    moved_result = compare_output(
        reference, model, moved_output, torch.float32, "the base", digest=reference.compute_digest()
    )
    assert not moved_result.passed
