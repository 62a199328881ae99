"""Anima's own facts: its modular checkpoint in Diffusers' own loader, guidance, its parts, names and sizes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ClassifierFreeGuidance, ModularPipeline
from diffusers.models.transformers import transformer_cosmos
from family_cases.anima import CASES
from family_cases.subject import CPU, adapted, changed, encoded_batch, open_subject
from launching import ROOT
from safetensors.torch import load_file, save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.diffusers_format import ADAPTER_FILE, save_adapter
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.anima.mask_resize import resize_mask
from dit_lora.families.base import Sampling

CONFIGS = ROOT / "tests" / "fixtures" / "configs" / "Anima-Base-v1.0-Diffusers"
FAMILY = get_family("anima")
SHAPE = VideoShape(1, 48, 80)


def opened(path: Path) -> Any:
    return FAMILY.open(ModelConfig(family="anima", path=str(path)))


def loaded_by_diffusers(path: Path) -> Any:
    """The pipeline by Diffusers' own loader, which reads the index."""
    pipe = ModularPipeline.from_pretrained(str(path))
    pipe.load_components(dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def calls_of(transformer: torch.nn.Module) -> list[tuple[dict[str, Any], torch.Tensor]]:
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    transformer.register_forward_hook(lambda _m, _args, kwargs, out: calls.append((kwargs, out[0])), with_kwargs=True)
    return calls


def test_a_call_of_diffusers_own_pipeline_is_a_prediction_and_its_picture_a_sample(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """Loaded, called and guided as its page says; bitwise."""
    path = tiny_checkpoints["anima"]
    pipe, checkpoint = loaded_by_diffusers(path), opened(path)
    assert type(pipe).__name__ == "AnimaModularPipeline"
    calls = calls_of(pipe.transformer)
    pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=3.0))
    images = pipe(
        prompt="a red disc",
        height=SHAPE.height,
        width=SHAPE.width,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
        output="images",
    )
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    text = {caption: encode([caption]) for caption in ("a red disc", "")}
    assert all(torch.isfinite(tensors["prompt_embeds"]).all() for tensors in text.values())
    transformer = checkpoint.denoiser.load_transformer(torch.float32).eval()
    assert len(calls) == 4
    for (call, expected), caption in zip(calls, ("a red disc", "") * 2, strict=True):
        timesteps = (call["timestep"].double() * 1000).float()
        with torch.no_grad():
            prediction = checkpoint.denoiser.predict(transformer, call["hidden_states"], timesteps, text[caption])
        assert torch.equal(prediction, expected)
    # From text and from cached tensors, by the same argument as other families' pipelines.
    sampler, sampling = checkpoint.sampler, Sampling(SHAPE, inference_steps=2, guidance_scale=3.0, seed=3)
    expected_picture = torch.from_numpy((images * 255).round().clip(0, 255).astype("uint8"))
    for has_text in (True, False):
        pipeline = sampler.pipeline(torch.float32, text=has_text)
        pipeline.set_progress_bar_config(disable=True)
        assert hasattr(pipeline, "text_conditioner") == has_text
        prompt = "a red disc" if has_text else text["a red disc"]
        kwargs = sampler.prompt_kwargs(prompt, None if has_text else text[""])
        assert torch.equal(sampler.generate(pipeline, kwargs, sampling), expected_picture)


@pytest.mark.parametrize("form", ["diffusers", "comfyui"])
def test_diffusers_own_loader_takes_the_adapter_in_both_forms(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, form: str
) -> None:
    """AnimaLoraLoaderMixin's `load_lora_weights`; the output is the trained model's."""
    subject = open_subject(CASES[0], tiny_checkpoints["anima"])
    trained = adapted(subject)
    save_adapter(trained, subject.checkpoint.info.pipeline_class, tmp_path, {})
    if form == "comfyui":
        tensors = {}
        for name, tensor in load_file(tmp_path / ADAPTER_FILE).items():
            layer, _, rest = name.removeprefix("transformer.").partition(".lora_")
            published = FAMILY.comfyui.translate_layer_name(layer)
            assert published is not None
            # ComfyUI reads no alpha here: 7 / 4 is in B.
            tensors[f"{published}.lora_{rest}"] = tensor * (7 / 4 if rest.startswith("B") else 1)
        (tmp_path / ADAPTER_FILE).unlink()
        save_file(tensors, tmp_path / ADAPTER_FILE)
        assert "diffusion_model.blocks.1.cross_attn.output_proj.lora_A.weight" in tensors
    pipe = loaded_by_diffusers(tiny_checkpoints["anima"])
    pipe.load_lora_weights(str(tmp_path))
    batch = encoded_batch(subject)
    noisy, timesteps = torch.randn(3, 16, 1, 8, 12), torch.tensor([100.0, 500.0, 900.0])
    with torch.no_grad():
        expected, actual = (
            subject.checkpoint.denoiser.predict(model.eval(), noisy, timesteps, batch)
            for model in (trained, pipe.transformer)
        )
    torch.testing.assert_close(
        actual, expected, rtol=0 if form == "diffusers" else 1e-5, atol=0 if form == "diffusers" else 1e-5
    )


def test_every_layer_has_a_name_in_comfyui_that_diffusers_reads_back(tiny_checkpoints: dict[str, Path]) -> None:
    transformer = opened(tiny_checkpoints["anima"]).denoiser.load_transformer(torch.float32)
    layers = [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    names = {f"{FAMILY.comfyui.translate_layer_name(name)}.lora_A.weight": name for name in layers}
    assert len(names) == len(layers) == 2 * 16 + 6
    pipeline_class: Any = opened(tiny_checkpoints["anima"]).info.pipeline_class
    read = pipeline_class.lora_state_dict(dict.fromkeys(names, torch.zeros(1)))
    assert set(read) == {f"transformer.{name}.lora_A.weight" for name in layers}


def test_the_mask_is_resized_as_by_torchvision() -> None:
    mask = (torch.arange(4 * 6).view(1, 1, 4, 6) % 5 == 0).float()
    assert torch.equal(resize_mask(mask, [4, 6], "nearest"), mask)
    assert torch.equal(resize_mask(mask, [2, 3], "nearest"), mask[..., ::2, ::2])
    assert resize_mask(mask.bfloat16(), [2, 3], "nearest").dtype is torch.bfloat16
    # Diffusers' transformer has torchvision's function, or this one.
    resized = transformer_cosmos.transforms.functional.resize(
        mask, [2, 3], interpolation=transformer_cosmos.transforms.InterpolationMode.NEAREST
    )
    assert torch.equal(resized, mask[..., ::2, ::2])


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("scheduler/scheduler_config.json", {"use_dynamic_shifting": True}, "shifts by image size"),
        ("transformer/config.json", {"in_channels": 17}, "in_channels of its transformer must be 16.*got 17"),
        ("transformer/config.json", {"patch_size": [1, 1, 1]}, "patch_size of its transformer must be"),
        ("text_conditioner/config.json", {"target_dim": 8}, "target_dim of its text_conditioner must be 16"),
        ("text_conditioner/config.json", {"min_sequence_length": 256}, "must be 512 or more.*got 256"),
        ("modular_model_index.json", {"_class_name": "WanModularPipeline"}, "is a WanModularPipeline checkpoint"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, file: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(DitLoraError, match=message):
        opened(changed(tiny_checkpoints["anima"], tmp_path / "changed", file, **values))


def counted(config: dict[str, Any]) -> int:
    """Weights of every layer, by hand."""
    width, text, low = 128 * config["num_attention_heads"], config["text_embed_dim"], config["adaln_lora_dim"]
    attentions = 6 * width * width + 2 * text * width + 4 * 128
    block = 3 * (width * low + low * 3 * width) + attentions + 8 * width * width
    ends = 17 * 4 * width + 4 * width * width + width + width * low + low * 2 * width + width * 64
    return config["num_layers"] * block + ends


def test_sizes_are_the_published_ones_and_its_recipe_fits(tmp_path: Path) -> None:
    """Its card speaks of 2 billion parameters, and readings of its file of 685 tensors, the conditioner's included."""
    recipe = load_recipe(ROOT / "recipes" / "anima" / "base.yaml")
    assert recipe.model.path == "circlestone-labs/Anima-Base-v1.0-Diffusers"
    path = Path(shutil.copytree(CONFIGS, tmp_path / "Anima"))
    for file in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, file.with_name("model.safetensors"))
    checkpoint = opened(path).apply_recipe(recipe)
    with torch.device("meta"):
        config = checkpoint.info.transformer_config
        transformer = checkpoint.denoiser.transformer_class.from_config(config).requires_grad_(False)
        (conditioner_class,) = checkpoint.encoders.text_postprocessors.values()
        conditioner = conditioner_class()
        counts = [sum(p.numel() for p in model.parameters()) for model in (transformer, conditioner)]
    assert len(transformer.state_dict()) + len(conditioner.state_dict()) == 685
    with torch.device("meta"):
        report = attach_lora(transformer, LoraConfig(rank=32), FAMILY.lora_targets, seed=0)
    assert counts == [counted(config), 134_663_680]
    assert counts[0] == 1_956_405_248
    assert (report.num_adapted, report.num_parameters) == (224, 27_525_120)
    assert checkpoint.denoiser.objective.shift == 1.0
    licence = FAMILY.get_license("circlestone-labs/Anima-Base-v1.0-Diffusers")
    assert licence is not None
    assert (licence.id, licence.name) == ("other", "circlestone-labs-non-commercial-license")
