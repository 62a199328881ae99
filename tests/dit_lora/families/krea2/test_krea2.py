"""Krea 2's own facts: pads in the middle, time rounded after it is divided, one shift of Turbo, norms in fp32."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Krea2Pipeline
from family_cases.subject import CPU
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.data.loading.batch import Batch
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.training.tasks.diffusion.second_model import open_sampling_checkpoint

VARIANT = "krea2-raw"
CAPTIONS = ("a red disc", "a longer caption, of a green square below a blue disc", "")
META = torch.device("meta")


class Asked(nn.Module):
    """A transformer that notes what it is asked."""

    def forward(self, **kwargs: Any) -> tuple[torch.Tensor]:
        self.asked = kwargs
        return (torch.zeros(()),)


def opened(path: Path) -> Any:
    return get_family("krea2").open(ModelConfig(family="krea2", path=str(path)))


def changed(tiny: Path, out: Path, config: str = "model_index.json", **values: Any) -> Path:
    """A copy of a checkpoint with other values in one config."""
    shutil.copytree(tiny, out)
    file = out / config
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return out


@pytest.fixture
def raw(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints[VARIANT]


@pytest.fixture
def turbo(raw: Path, tmp_path: Path) -> Path:
    return changed(raw, tmp_path / "turbo", is_distilled=True)


def batch_of(checkpoint: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Captions of other lengths, on 4 x 6 latents."""
    text: dict[str, torch.Tensor] = checkpoint.encoders.load_text_encoder(dtype, CPU)(CAPTIONS)
    return {"latent_mean": torch.zeros(len(CAPTIONS), 16, 1, 4, 6), **text}


def noisy_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    size = (len(batch["latent_mean"]), 6, 64)
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


def test_pads_in_the_middle_are_cut_to_the_longest_caption(raw: Path) -> None:
    """A caption keeps its tokens in their order, the closing ones behind it; what is between is masked."""
    checkpoint, model = opened(raw), Asked()
    batch = batch_of(checkpoint)
    lengths = [len(checkpoint.encoders.load_text_limit().tokenizer(caption).input_ids) for caption in CAPTIONS]
    assert min(lengths) == 0
    assert len(set(lengths)) == 3
    checkpoint.denoiser.predict(model, noisy_of(batch), torch.full((3,), 500.0), batch)
    text, mask = model.asked["encoder_hidden_states"], model.asked["encoder_attention_mask"]
    assert mask.dtype is torch.bool
    assert text.shape == (3, max(lengths) + 5, 3, 16)
    positions = torch.arange(max(lengths) + 5)
    for row, length in enumerate(lengths):
        is_text = (positions < length) | (positions >= max(lengths))
        assert torch.equal(mask[row], is_text)
        full = batch["prompt_embeds"][row]
        assert torch.equal(text[row][is_text], torch.cat([full[:length], full[-5:]]))
    assert model.asked["position_ids"].shape == (max(lengths) + 5 + 6, 3)


def test_one_caption_needs_no_mask(raw: Path) -> None:
    checkpoint, model = opened(raw), Asked()
    batch = {name: tensor[:1] for name, tensor in batch_of(checkpoint).items()}
    checkpoint.denoiser.predict(model, noisy_of(batch), torch.full((1,), 500.0), batch)
    assert model.asked["encoder_attention_mask"] is None
    unpadded = batch["prompt_embeds"][batch["prompt_embeds_mask"]]
    assert torch.equal(model.asked["encoder_hidden_states"][0], unpadded)


def test_what_is_cut_changes_rounding_alone(raw: Path) -> None:
    checkpoint = opened(raw)
    batch, transformer = batch_of(checkpoint), checkpoint.denoiser.load_transformer(torch.float32)
    noisy, timesteps = noisy_of(batch), torch.tensor([20.0, 480.0, 901.0])
    with torch.no_grad():
        ours = checkpoint.denoiser.predict(transformer, noisy, timesteps, batch)
        stock = transformer(
            hidden_states=noisy,
            encoder_hidden_states=batch["prompt_embeds"],
            timestep=timesteps / 1000,
            position_ids=Krea2Pipeline.prepare_position_ids(512, 2, 3, CPU),
            encoder_attention_mask=batch["prompt_embeds_mask"],
        ).sample
        # Where pads were seen, it would show.
        reference = transformer(
            hidden_states=noisy,
            encoder_hidden_states=batch["prompt_embeds"],
            timestep=timesteps / 1000,
            position_ids=Krea2Pipeline.prepare_position_ids(512, 2, 3, CPU),
        ).sample
    torch.testing.assert_close(ours, stock, rtol=0, atol=5e-6)
    assert (ours - reference).abs().amax((1, 2)).min() > 1e-3


def test_the_mask_alone_stays_on_the_host(raw: Path) -> None:
    checkpoint, model = opened(raw), Asked()
    tensors = batch_of(checkpoint)
    batch = Batch(("a", "b", "c"), (1, 2, 3), tensors).to(META)
    assert {n for n, t in batch.tensors.items() if t.device != META} == {"prompt_embeds_mask"}
    noisy = noisy_of(tensors).to(META)
    checkpoint.denoiser.predict(model, noisy, torch.zeros(3, device=META), batch.tensors)
    devices = {n: t.device for n, t in model.asked.items() if isinstance(t, torch.Tensor)}
    assert set(devices.values()) == {META}
    assert "encoder_attention_mask" in devices


def calls_of(pipeline: Any) -> list[dict[str, Any]]:
    """The arguments of each call of its transformer, once it was called."""
    calls: list[dict[str, Any]] = []
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    return calls


def test_time_is_rounded_after_it_is_divided(raw: Path) -> None:
    """In bf16, as the pipeline has it; the other order gives other numbers."""
    checkpoint, model = opened(raw), Asked()
    pipeline = checkpoint.sampler.pipeline(torch.bfloat16)
    calls = calls_of(pipeline)
    sampling = Sampling(VideoShape(1, 32, 48), 7, 0.0, seed=0)
    checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs("a red disc"), sampling)
    timesteps = pipeline.scheduler.timesteps
    batch = {n: t[:1] for n, t in batch_of(checkpoint, torch.bfloat16).items()}
    assert len(calls) == 7
    for call, timestep in zip(calls, timesteps, strict=True):
        checkpoint.denoiser.predict(model, noisy_of(batch), timestep[None], batch)
        assert model.asked["timestep"].dtype is torch.bfloat16
        assert torch.equal(model.asked["timestep"], call["timestep"])
    assert not torch.equal(timesteps.bfloat16() / 1000, (timesteps / 1000).bfloat16())


@pytest.mark.parametrize("shape", [VideoShape(1, 32, 48), VideoShape(1, 96, 160)])
@pytest.mark.parametrize("kind", ["raw", "turbo"])
def test_noise_levels_are_shifted_as_the_pipeline_samples(
    request: pytest.FixtureRequest, kind: str, shape: VideoShape
) -> None:
    """Raw's shift goes by the image's tokens; Turbo's is alike at every size."""
    checkpoint = opened(request.getfixturevalue(kind))
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    calls = calls_of(pipeline)
    sampling = Sampling(shape, 5, 0.0, seed=0)
    checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs("a red disc"), sampling)
    shift = checkpoint.denoiser.compute_shift(torch.Size([16, 1, shape.height // 8, shape.width // 8]))
    levels = torch.linspace(1, 1 / 5, 5)
    expected = shift * levels / (1 + (shift - 1) * levels)
    sampled = torch.cat([call["timestep"] for call in calls])
    torch.testing.assert_close(sampled, expected, rtol=1e-6, atol=0)
    assert (abs(shift - 3.1582) < 1e-3) == (kind == "turbo")


def test_guidance_adds_to_the_prediction_and_0_is_off(raw: Path) -> None:
    """A prompt's tensors are given with those of the empty one, as validation does."""
    checkpoint = opened(raw)
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    text, empty = encode(["a red disc"]), encode([""])
    conditions = checkpoint.sampler.prompt_kwargs(text, empty)
    for scale, calls_per_step in ((0.0, 1), (0.5, 2)):
        pipeline = checkpoint.sampler.pipeline(torch.float32, text=False)
        calls = calls_of(pipeline)
        checkpoint.sampler.generate(pipeline, conditions, Sampling(VideoShape(1, 32, 48), 3, scale, 0))
        assert len(calls) == 3 * calls_per_step
        if calls_per_step == 2:
            assert torch.equal(calls[1]["encoder_hidden_states"], empty["prompt_embeds"])
            assert torch.equal(calls[1]["encoder_attention_mask"], empty["prompt_embeds_mask"])


def test_norms_stay_in_fp32(raw: Path) -> None:
    transformer = opened(raw).denoiser.load_transformer(torch.bfloat16)
    dtypes: dict[torch.dtype, set[str]] = {}
    for name, parameter in transformer.named_parameters():
        kind = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
        dtypes.setdefault(parameter.dtype, set()).add(kind)
    assert dtypes[torch.float32] == {"norm", "norm1", "norm2", "norm_q", "norm_k"}
    assert {"scale_shift_table", "to_q", "to_gate", "projector"} <= dtypes[torch.bfloat16]
    assert not dtypes[torch.float32] & dtypes[torch.bfloat16]


def recipe_for(path: Path, values: dict[str, Any], **sections: Any) -> Recipe:
    data = {"path": ".", "height": 64, "width": 96}
    model = {"family": "krea2", "path": str(path)}
    return parse_recipe({**values, "data": data, "model": model, **sections}, "test")


def test_turbo_is_refused_by_name_and_still_samples(raw: Path, turbo: Path, recipe_values: dict[str, Any]) -> None:
    """Unless an adapter below undoes the distillation or the target is guided.

    Turbo samples for Raw, with the same shift at every size.
    """
    family, recipe = get_family("krea2"), recipe_for(turbo, recipe_values)
    with pytest.raises(DitLoraError, match=r"turbo is step-distilled.*train krea/Krea-2-Raw"):
        family.open(recipe.model, recipe)
    lora = {"rank": 4, "under": [{"path": "theirs.safetensors"}]}
    trained = family.open(recipe.model, recipe_for(turbo, recipe_values, lora=lora))
    assert trained.denoiser.compute_shift_mu(torch.Size([16, 1, 128, 128])) == 1.15
    guided = recipe_for(turbo, recipe_values, train={**recipe_values["train"], "target": "guided"})
    assert family.open(guided.model, guided).info.is_distilled
    validation = {"model": str(turbo), "prompts": ["a cat"], "guidance_scale": 0}
    training = recipe_for(raw, recipe_values, validation=validation)
    second: Any = open_sampling_checkpoint(training, family.open(training.model, training))
    assert second.info.is_distilled
    pipeline = second.sampler.pipeline(torch.float32)
    assert pipeline.config.is_distilled


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        ("model_index.json", {"patch_size": 1}, "patch_size must be 2; got 1"),
        (
            "model_index.json",
            {"text_encoder_select_layers": [1, 2]},
            "text_encoder_select_layers must be 3.*got 2",
        ),
        # Those of the pipeline, which are twelve.
        ("model_index.json", {"text_encoder_select_layers": None}, "must be 3.*got 12"),
        (
            "model_index.json",
            {"_class_name": "QwenImagePipeline"},
            "a QwenImagePipeline checkpoint",
        ),
        ("transformer/config.json", {"in_channels": 16}, "in_channels must be 64"),
        ("scheduler/scheduler_config.json", {"time_shift_type": "linear"}, "time_shift_type"),
    ],
)
def test_a_checkpoint_that_contradicts_the_family_is_refused(
    raw: Path, tmp_path: Path, config: str, values: dict[str, Any], words: str
) -> None:
    path = changed(raw, tmp_path / "m", config, **values)
    with pytest.raises(DitLoraError, match=words):
        opened(path)
