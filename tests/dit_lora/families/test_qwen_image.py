"""Qwen-Image: text without its template, masks, guidance, modulation per token, and checkpoints of related models."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from exported import assert_same, deltas, trained
from family_cases.subject import CPU
from safetensors.torch import load_file, save_file
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.export.export import ExportRequest, export
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.numerics.streams import RandomStreams

CAPTIONS = ("a cat", "", "a longer caption, of a green square below a blue disc")
END = 5  # tokens of the template behind a caption
SHAPE = VideoShape(1, 48, 80)


def open_at(path: Path) -> Any:
    return get_family("qwen_image").open(ModelConfig(family="qwen_image", path=str(path)))


@pytest.fixture
def tiny(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["qwen-image"]


@pytest.fixture
def checkpoint(tiny: Path) -> Any:
    return open_at(tiny)


def changed(tiny: Path, out: Path, component: str, **values: Any) -> Path:
    """Copy a checkpoint with other values in one config."""
    shutil.copytree(tiny, out)
    names = {"": "model_index.json", "scheduler": "scheduler/scheduler_config.json"}
    file = out / names.get(component, f"{component}/config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return out


def batch_of(checkpoint: Any, captions: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    text = checkpoint.encoders.load_text_encoder(dtype, CPU)(captions)
    g = torch.Generator().manual_seed(0)
    size = (len(captions), 16, 1, SHAPE.height // 8, SHAPE.width // 8)
    latents = {n: torch.randn(size, generator=g) for n in ("latent_mean", "latent_logvar")}
    return {**latents, **text}


class Recorder(nn.Module):
    """Answers with zeros and keeps what it was asked."""

    def forward(self, **kwargs: Any) -> tuple[torch.Tensor]:
        self.asked = kwargs
        return (torch.zeros_like(kwargs["hidden_states"]),)


def test_captions_are_encoded_as_the_pipeline_does_whatever_their_neighbours(checkpoint: Any, tiny: Path) -> None:
    """Zeros behind them, and a mask of what is text; the bf16 that is asked for is that of the cache."""
    pipeline = DiffusionPipeline.from_pretrained(tiny)
    encoded = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(CAPTIONS)
    spec = checkpoint.encoders.text_spec(torch.float32)
    assert {n: (t.shape[1:], t.dtype) for n, t in encoded.items()} == spec
    for row, caption in enumerate(CAPTIONS):
        with torch.no_grad():
            stock, mask = pipeline.encode_prompt(caption)
        count = stock.shape[1]
        assert mask is None
        assert count == len(caption.encode()) + END or row == 2  # some words are one token
        assert torch.equal(encoded["prompt_embeds"][row, :count], stock[0])
        assert not encoded["prompt_embeds"][row, count:].any()
        expected = torch.arange(512) < count
        assert torch.equal(encoded["prompt_mask"][row], expected)
    half = checkpoint.encoders.load_text_encoder(torch.bfloat16, CPU)(CAPTIONS)
    assert half["prompt_embeds"].dtype is torch.bfloat16


def test_the_34_tokens_before_a_caption_are_dropped_and_those_behind_it_kept(checkpoint: Any, tiny: Path) -> None:
    """Encode by the language model alone: its last hidden state of the whole template, from the caption on."""
    pipeline = DiffusionPipeline.from_pretrained(tiny)
    template = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = pipeline.tokenizer(template.format(CAPTIONS[0]), return_tensors="pt").input_ids
    assert pipeline.tokenizer.decode(ids[0, :34]) == template.split("{}")[0]
    assert pipeline.tokenizer.decode(ids[0, 34:]) == CAPTIONS[0] + template.split("{}")[1]
    with torch.no_grad():
        states = pipeline.text_encoder.model(input_ids=ids).last_hidden_state[0]
    encoded = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(CAPTIONS[:1])
    caption_embeds = encoded["prompt_embeds"][0, : len(states) - 34]
    torch.testing.assert_close(caption_embeds, states[34:])
    assert int(encoded["prompt_mask"].sum()) == len(states) - 34 == len(CAPTIONS[0]) + END
    facts = checkpoint.encoders.text_cache_key()
    assert (facts["template"], facts["dropped"], facts["tokens"]) == (template, 34, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_unequal_captions_is_one_call_of_the_pipeline(checkpoint: Any, dtype: torch.dtype) -> None:
    """Bit for bit, in bf16 too, where the timestep's rounding shows."""
    batch = batch_of(checkpoint, CAPTIONS, dtype)
    pipeline = checkpoint.sampler.pipeline(dtype, text=False)
    pipeline.set_progress_bar_config(disable=True)
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    pipeline.transformer.register_forward_hook(
        lambda _m, _args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    text = {name: batch[name] for name in ("prompt_embeds", "prompt_mask")}
    sampling = Sampling(SHAPE, inference_steps=3, guidance_scale=1.0, seed=1)
    checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs(text), sampling)
    transformer = checkpoint.denoiser.load_transformer(dtype).eval()
    assert len(calls) == 3
    for (call, expected), t in zip(calls, pipeline.scheduler.timesteps, strict=True):
        with torch.no_grad():
            prediction = checkpoint.denoiser.predict(transformer, call["hidden_states"], t.repeat(3), batch)
        assert prediction.dtype is expected.dtype is dtype
        assert torch.equal(prediction, expected)
    assert len({tuple(row.flatten().tolist()) for row in expected}) == 3


def test_unequal_captions_in_a_batch_are_each_as_alone(checkpoint: Any) -> None:
    """Padded and masked among longer ones, up to rounding; what stands in the pads changes nothing."""
    batch = batch_of(checkpoint, CAPTIONS, torch.float32)
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    g = torch.Generator().manual_seed(1)
    noisy, timesteps = torch.randn(3, 15, 64, generator=g), torch.tensor([900.0, 40.0, 333.0])
    with torch.no_grad():
        batched_prediction = checkpoint.denoiser.predict(transformer, noisy, timesteps, batch)
        for row in range(3):
            single_batch = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            single_prediction = checkpoint.denoiser.predict(
                transformer, noisy[row : row + 1], timesteps[[row]], single_batch
            )
            torch.testing.assert_close(batched_prediction[row], single_prediction[0], rtol=1e-5, atol=1e-6)
        batch["prompt_embeds"][~batch["prompt_mask"]] = 5.0
        second_prediction = checkpoint.denoiser.predict(transformer, noisy, timesteps, batch)
    torch.testing.assert_close(second_prediction, batched_prediction, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("captions", "padded"), [(("a cat", "a dog"), False), (CAPTIONS, True)])
def test_text_is_cut_to_the_longest_and_masked_where_something_is_padded(
    checkpoint: Any, captions: tuple[str, ...], padded: bool
) -> None:
    batch, model = batch_of(checkpoint, captions, torch.bfloat16), Recorder()
    checkpoint.denoiser.losses(model, batch, RandomStreams(0, [*range(len(captions))]))
    counts, mask = batch["prompt_mask"].sum(1), model.asked["encoder_hidden_states_mask"]
    text = model.asked["encoder_hidden_states"]
    assert text.shape == (len(captions), int(counts.max()), 48)
    assert text.dtype is model.asked["hidden_states"].dtype is torch.bfloat16
    assert (mask is not None) is padded
    if padded:
        assert mask.dtype is torch.bool
        assert torch.equal(mask.sum(1), counts)
    # Lists, not tuples: with `zero_cond_t` the transformer takes the first picture of each.
    assert model.asked["img_shapes"] == [[(1, 3, 5)]] * len(captions)


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
def test_the_guidance_scale_is_the_pipelines_true_cfg_scale(
    checkpoint: Any,
    scale: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guidance of at most 1 takes one call per step; above 1, a second call for "" gives Diffusers' sample. No
    warnings.
    """
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    text, empty = encode([CAPTIONS[2]]), encode([""])
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    lengths: list[int] = []
    pipeline.transformer.register_forward_pre_hook(
        lambda _m, _args, kwargs: lengths.append(kwargs["encoder_hidden_states"].shape[1]),
        with_kwargs=True,
    )
    sampling = Sampling(SHAPE, inference_steps=2, guidance_scale=scale, seed=3)
    video = checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs(text, empty), sampling)
    of_text = checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs(CAPTIONS[2]), sampling)
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]
    count = int(text["prompt_mask"].sum())
    assert lengths == ([count, END] * 4 if scale > 1 else [count] * 4)
    stock = pipeline(
        CAPTIONS[2],
        negative_prompt="" if scale > 1 else None,
        true_cfg_scale=scale,
        height=SHAPE.height,
        width=SHAPE.width,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
    ).images[0]
    expected = torch.from_numpy((stock * 255).round().astype("uint8"))
    assert torch.equal(video[0], expected)
    assert torch.equal(of_text[0], expected)


def test_one_step_of_which_the_scheduler_makes_nan_is_refused(
    checkpoint: Any, recipe_values: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    """In a recipe and where one samples; a scheduler without `shift_terminal` samples in one."""
    message = r"must be 2 or more, as shift_terminal=0.02 of the scheduler gives NaN in one step; got 1"
    sampling = Sampling(SHAPE, inference_steps=1, guidance_scale=1.0, seed=0)
    with pytest.raises(DitLoraError, match=f"qwen-image: inference steps {message}"):
        checkpoint.sampler.generate(None, {}, sampling)
    data = {"path": ".", "height": 64, "width": 96}
    model = {"family": "qwen_image", "path": str(tiny)}
    values = {**recipe_values, "data": data, "model": model, "validation": {"inference_steps": 1}}
    recipe = parse_recipe(values, "test")
    with pytest.raises(DitLoraError, match=f"validation.inference_steps {message}"):
        checkpoint.apply_recipe(recipe)
    path = changed(tiny, tmp_path / "none", "scheduler", shift_terminal=None)
    other_checkpoint = open_at(path).apply_recipe(recipe)
    pipeline = other_checkpoint.sampler.pipeline(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    assert (
        len(
            other_checkpoint.sampler.generate(
                pipeline, other_checkpoint.sampler.prompt_kwargs("a cat"), sampling
            ).unique()
        )
        > 1
    )


def test_a_checkpoint_that_modulates_by_token_trains_as_one_that_does_not(
    checkpoint: Any, tiny: Path, tmp_path: Path
) -> None:
    """Without a reference all tokens have the timestep (`zero_cond_t`): the same losses, and the same gradients."""
    zero_cond = open_at(changed(tiny, tmp_path / "zero", "transformer", zero_cond_t=True))
    batch = batch_of(checkpoint, CAPTIONS, torch.float32)
    predictions = []
    for opened_checkpoint in (checkpoint, zero_cond):
        transformer = opened_checkpoint.denoiser.load_transformer(torch.float32)
        assert transformer.zero_cond_t is (opened_checkpoint is zero_cond)
        weight = transformer.transformer_blocks[0].img_mod[1].weight.requires_grad_()
        losses = opened_checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [3, 1, 2])).losses
        predictions.append((losses.detach(), torch.autograd.grad(losses.sum(), weight)[0]))
    for ours, theirs in zip(*predictions, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_levels_are_shifted_by_tokens_as_the_pipeline_shifts_them(checkpoint: Any) -> None:
    """The line through (256, 0.5) and (8192, 0.9); `shift_terminal` stretches what is sampled alone."""
    for height, width in ((1024, 1024), (1328, 1328), (928, 1664)):
        tokens = height * width // 256
        size = torch.Size([16, 1, height // 8, width // 8])
        assert checkpoint.denoiser.compute_shift_mu(size) == pytest.approx(0.5 + (tokens - 256) * 0.4 / 7936)
    assert checkpoint.denoiser.objective.shift is None


def test_without_weights_its_positions_have_values(tiny: Path, checkpoint: Any) -> None:
    """A plan loads it so; the tables are neither weights nor buffers."""
    with torch.device("meta"):
        expected = checkpoint.denoiser.load_transformer(torch.float32).pos_embed
    real = DiffusionPipeline.from_pretrained(tiny).transformer.pos_embed
    for name in ("pos_freqs", "neg_freqs"):
        assert torch.equal(getattr(expected, name), getattr(real, name))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("QwenImage21Pipeline", "Qwen-Image 2.1 is a different model, which family qwen_image21 trains"),
        ("QwenImageLayeredPipeline", "takes pictures apart into layers"),
        ("QwenImageControlNetPipeline", "family qwen_image trains QwenImagePipeline"),
    ],
)
def test_its_kin_is_refused_by_name(tiny: Path, tmp_path: Path, name: str, words: str) -> None:
    path = changed(tiny, tmp_path / "other", "", _class_name=name)
    with pytest.raises(DitLoraError, match=words) as refused:
        open_at(path)
    assert f"is a {name} checkpoint" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("component", "values", "words"),
    [
        ("transformer", {"guidance_embeds": True}, "guidance_embeds of its transformer's config"),
        (
            "transformer",
            {"use_layer3d_rope": True, "use_additional_t_cond": True},
            "use_additional_t_cond, use_layer3d_rope of its",
        ),
        ("transformer", {"in_channels": 32}, "in_channels must be 64, of 2x2 latents .* got 32"),
        ("scheduler", {"_class_name": "UniPCMultistepScheduler"}, "scheduler UniPC"),
        ("scheduler", {"time_shift_type": "linear"}, "time_shift_type=linear"),
    ],
)
def test_what_contradicts_the_family_is_refused(
    tiny: Path, tmp_path: Path, component: str, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(DitLoraError, match=words):
        open_at(changed(tiny, tmp_path / "other", component, **values))


def test_a_scheduler_without_dynamic_shifting_has_its_own_shift(tiny: Path, tmp_path: Path) -> None:
    path = changed(tiny, tmp_path / "static", "scheduler", use_dynamic_shifting=False, shift=2.5)
    assert open_at(path).denoiser.objective.shift == 2.5


def test_stock_diffusers_reads_what_comfyui_does(tiny: Path, tmp_path: Path) -> None:
    """With alpha in tensors, in every linear layer."""
    targets = (
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"),
        *("to_add_out", "net.0.proj", "net.2", "img_mod.1", "txt_mod.1", "img_in", "txt_in"),
        *("linear_1", "linear_2", "norm_out.linear", "proj_out"),
    )
    adapter = trained("qwen_image", tiny, tmp_path / "run", alpha=7, targets=targets)
    output_dir = export(ExportRequest((adapter.folder,), "comfyui", tmp_path / "out", model=str(adapter.base)))
    (file,) = output_dir.glob("*.safetensors")
    tensors = load_file(file)
    linear = [m for m in open_at(tiny).denoiser.load_transformer(torch.float32).modules() if type(m) is nn.Linear]
    assert len(tensors) == 3 * len(linear) == 3 * (2 * 14 + 6)
    assert all(name.startswith("diffusion_model.") for name in tensors)
    save_file(tensors, tmp_path / "bare.safetensors")  # no header that would say more
    pipeline = adapter.checkpoint.sampler.pipeline(torch.float32, text=False)
    pipeline.load_lora_weights(tmp_path, weight_name="bare.safetensors")
    assert_same(deltas(pipeline.transformer), deltas(adapter.model))
