"""Kandinsky 5.0's own facts: the template's length, positions by size, distilled and sparse checkpoints, its sizes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases.subject import CPU, changed, two_samples
from launching import ROOT
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe, parse_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import captions, get_family
from dit_lora.families.kandinsky5 import checkpoint as checkpoint_module
from dit_lora.families.opening import build_empty_pipeline

CONFIGS = ROOT / "tests" / "fixtures" / "configs" / "Kandinsky-5.0-T2V-Lite-pretrain-5s-Diffusers"
FAMILY = get_family("kandinsky5")


def opened(path: Path) -> Any:
    return FAMILY.open(ModelConfig(family="kandinsky5", path=str(path)))


@pytest.fixture
def tiny(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["kandinsky-5-t2v"]


def test_a_caption_keeps_its_own_tokens_and_the_closing_one(tiny: Path) -> None:
    """The tiny tokenizer splits the template's beginning into as many tokens as the pipeline drops, like Qwen's."""
    checkpoint = opened(tiny)
    stock = build_empty_pipeline(checkpoint.info.pipeline_class)
    processor = checkpoint.info.pipeline_components()["tokenizer"]
    beginning, ending = stock.prompt_template.split("{}")
    assert ending == "<|im_end|>"
    assert len(processor(text=[beginning])["input_ids"][0]) == stock.prompt_template_encode_start_idx
    encoded = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(["a disc", "", "a word " * 200])
    assert encoded["prompt_mask"].sum(1).tolist() == [len("a disc") + 1, 1, checkpoint.info.text_tokens]
    assert not encoded["prompt_embeds"][~encoded["prompt_mask"]].any()


def test_a_run_says_that_ftfy_is_missing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a caption may be changed by it; and what is cached without it is not taken where it is there."""
    encoders, messages, keys = opened(tiny).encoders, [], []
    for is_installed in (False, True):
        for module in (captions, checkpoint_module):
            monkeypatch.setattr(module, "is_ftfy_available", lambda is_available=is_installed: is_available)
        messages.append(
            [encoders.list_caption_warnings([caption]) for caption in ("a cat & a dog", "a cat &amp; a dog")]
        )
        keys.append(encoders.text_cache_key())
    plain, cleaned = messages[0]
    assert (plain, messages[1]) == ([], [[], []])
    assert cleaned[0].endswith("as Kandinsky 5.0's pipeline does")
    assert keys[0] != keys[1]


def test_samples_of_a_text_and_of_its_tensors_are_the_same(tiny: Path) -> None:
    from_text, from_tensors, batches = two_samples(opened(tiny), VideoShape(5, 64, 96))
    assert from_text.shape == (5, 64, 96, 3)
    assert torch.equal(from_text, from_tensors)
    assert batches == [1, 1, 1, 1]  # guidance is a second call


def test_in_fp32_too_a_step_of_the_pipeline_is_one_prediction_whatever_the_samples_neighbour(tiny: Path) -> None:
    """Bit for bit, though attention rounds queries and keys to bf16."""
    checkpoint = opened(tiny)
    text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(["a red disc", "a longer caption, of a square"])
    pipeline = checkpoint.sampler.pipeline(torch.float32, text=False)
    pipeline.set_progress_bar_config(disable=True)
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    # The pipeline writes its next latents into the tensor of this call.
    pipeline.transformer.register_forward_hook(
        lambda _m, _args, kwargs, output: calls.append(
            (kwargs["hidden_states"][..., :4].clone(), kwargs["timestep"], output[0])
        ),
        with_kwargs=True,
    )
    arguments = checkpoint.sampler.prompt_kwargs({name: tensor[:1] for name, tensor in text.items()})
    shape = checkpoint.sampler.shape_kwargs(VideoShape(5, 64, 96))
    pipeline(**arguments, **shape, num_inference_steps=2, guidance_scale=1.0, output_type="latent")
    assert len(calls) == 2
    transformer = checkpoint.denoiser.load_transformer(torch.float32).eval()
    for latents, timestep, output in calls:
        noisy = latents.movedim(-1, 1).expand(2, -1, -1, -1, -1)
        with torch.no_grad():
            prediction = checkpoint.denoiser.predict(transformer, noisy, timestep.expand(2), text)
        assert torch.equal(prediction[:1], output.movedim(-1, 1))
        assert not torch.equal(prediction[:1], prediction[1:])


class Recorder(torch.nn.Module):
    """Stands in for the transformer, and keeps the arguments of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def forward(self, **arguments: Any) -> torch.Tensor:
        self.calls.append(arguments)
        return arguments["hidden_states"][..., :4]


@pytest.mark.parametrize("has_condition", [True, False])
@pytest.mark.parametrize(("height", "width", "scale"), [(512, 768, 2), (480, 864, 3.16), (448, 768, 3.16)])
def test_positions_scale_with_the_size_and_text_to_video_has_no_condition(
    tiny: Path, tmp_path: Path, height: int, width: int, scale: float, has_condition: bool
) -> None:
    checkpoint = opened(changed(tiny, tmp_path / "it", "transformer/config.json", visual_cond=has_condition))
    noisy = torch.randn(2, 4, 3, height // 8, width // 8).bfloat16()
    mask = torch.arange(6) < torch.tensor([[2], [5]])
    text = {
        "prompt_embeds": torch.randn(2, 6, 48).bfloat16(),
        "prompt_mask": mask,
        "prompt_embeds_clip": torch.randn(2, 16),
    }
    recorder = Recorder()
    prediction = checkpoint.denoiser.predict(recorder, noisy.float(), torch.tensor([987.6, 2.0]), text)
    assert torch.equal(prediction, noisy)
    # Rounded like the pipeline's.
    assert [call["timestep"].tolist() for call in recorder.calls] == [[988.0], [2.0]]
    assert [call["scale_factor"] for call in recorder.calls] == [(1, scale, scale)] * 2
    for call, length in zip(recorder.calls, (2, 5), strict=True):
        assert [len(axis) for axis in call["visual_rope_pos"]] == [3, height // 16, width // 16]
        assert len(call["text_rope_pos"]) == call["encoder_hidden_states"].shape[1] == length
        condition = call["hidden_states"][..., 4:]
        assert condition.shape[-1] == 5 * has_condition
        assert not condition.any()


def test_the_table_of_timesteps_moves_with_the_model_and_is_not_saved(tiny: Path) -> None:
    transformer = opened(tiny).denoiser.load_transformer(torch.bfloat16)
    assert dict(transformer.named_buffers())["time_embeddings.freqs"].dtype is torch.float32
    assert not any(name.endswith("freqs") for name in transformer.state_dict())
    with torch.no_grad():
        embedded = transformer.to("meta").time_embeddings(torch.ones(2, device="meta"))
    assert (embedded.device.type, embedded.dtype) == ("meta", torch.float32)


@pytest.mark.parametrize(
    ("name", "warned"),
    [("T2V-Lite-nocfg-5s", "nocfg"), ("T2V-Lite-distilled16steps-5s", "distilled"), ("T2V-Lite-sft-5s", None)],
)
def test_a_run_on_a_distilled_model_starts_with_a_warning(
    tiny: Path, tmp_path: Path, recipe_values: dict[str, Any], name: str, warned: str | None
) -> None:
    path = Path(shutil.copytree(tiny, tmp_path / f"Kandinsky-5.0-{name}-Diffusers"))
    data = {"path": ".", "frames": 9, "height": 64, "width": 96, "fps": 8}
    values = {"data": data, "model": {"family": "kandinsky5", "path": str(path)}}
    recipe = parse_recipe({**recipe_values, **values}, "test")
    notes = FAMILY.open(recipe.model, recipe).info.recipe_notes(recipe)
    assert [f"distilled by its name ({warned};" in note for note in notes] == [True] * (warned is not None)
    train = {**recipe_values["train"], "target": "guided"}
    guided = parse_recipe({**recipe_values, **values, "train": train}, "test")
    assert not FAMILY.open(guided.model, guided).info.recipe_notes(guided)


def test_sparse_attention_and_parts_that_do_not_fit_are_refused(tiny: Path, tmp_path: Path) -> None:
    config = "transformer/config.json"
    with pytest.raises(DitLoraError, match=r"sparse attention \(attention_type: nabla\)"):
        opened(changed(tiny, tmp_path / "sparse", config, attention_type="nabla"))
    with pytest.raises(
        DitLoraError, match=r"in_visual_dim .* must be 4; got 16\n.*patch_size .* \(1, 2, 2\); got \(1"
    ):
        opened(changed(tiny, tmp_path / "misfit", config, in_visual_dim=16, patch_size=[1, 4, 4]))


def counted(config: dict[str, Any]) -> int:
    """Weights of every layer, by hand."""
    width, time, hidden, text = (config[name] for name in ("model_dim", "time_dim", "ff_dim", "in_text_dim"))
    head, patch = sum(config["axes_dims"]), 4 * config["out_visual_dim"]
    attention, feed_forward = 4 * (width * width + width) + 2 * head, 2 * width * hidden

    def modulation(count: int) -> int:
        return (time + 1) * count * width

    text_block = modulation(6) + attention + feed_forward
    visual_block = modulation(9) + 2 * attention + feed_forward
    embeddings = (width + 1) * time + (time + 1) * time + (text + 3) * width + (config["in_text_dim2"] + 3) * time
    ends = (4 * (2 * config["in_visual_dim"] + 1) + 1) * width + modulation(2) + (width + 1) * patch
    return config["num_text_blocks"] * text_block + config["num_visual_blocks"] * visual_block + embeddings + ends


def test_sizes_are_the_published_ones_and_its_recipe_fits(tmp_path: Path) -> None:
    """Published as two billion parameters; its authors' training config counts 2.1 with the LoRA."""
    recipe = load_recipe(ROOT / "recipes" / "kandinsky5" / "lite_t2v_5s.yaml")
    assert Path(recipe.model.path).name == CONFIGS.name
    path = Path(shutil.copytree(CONFIGS, tmp_path / CONFIGS.name))
    for file in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, file.with_name("model.safetensors"))
    checkpoint = opened(path).apply_recipe(recipe)
    config = checkpoint.info.transformer_config
    with torch.device("meta"):
        transformer = checkpoint.denoiser.transformer_class.from_config(config).requires_grad_(False)
        num_parameters = sum(p.numel() for p in transformer.parameters())
        report = attach_lora(transformer, recipe.lora, FAMILY.lora_targets, seed=0)
    assert num_parameters == counted(config)
    assert round(num_parameters / 1e9, 1) == 2.0
    assert round((num_parameters + report.num_parameters) / 1e9, 1) == 2.1
    # A text block has four adapted layers of attention and two of the feed-forward; a visual block has four more.
    assert report.num_adapted == 2 * 6 + 32 * 10
    assert checkpoint.info.size_multiple == 16
    assert checkpoint.denoiser.objective.shift == 5.0
