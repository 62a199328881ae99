"""DiT's own facts, recomputed apart from its code, in fp64 where there is arithmetic."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from torch import nn

from dit_lora.adapters.attach import attach_lora, is_lora_b
from dit_lora.adapters.diffusers_format import save_adapter, save_pipeline
from dit_lora.adapters.load import load_adapter
from dit_lora.config.data import VideoShape
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.data.synthetic.clips import write_class_folders
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.numerics.streams import RandomStreams, make_generator

CPU = torch.device("cpu")
SEED, POSITIONS = 11, [3, 400, 21]


class Recorder(nn.Module):
    """Answers with a fixed prediction and keeps what it was asked."""

    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self.answer = nn.Parameter(answer, requires_grad=False)
        self.asked: dict[str, Any] = {}

    def forward(self, noisy: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor]:
        self.asked = {**kwargs, "noisy": noisy}
        return (self.answer,)


def open_checkpoint(path: Path, scratch: dict[str, Any] | None = None) -> Any:
    model = ModelConfig(family="dit", path=str(path), from_scratch=scratch)
    return get_family("dit").open(model)


def own_draws(shape: tuple[int, ...], stream: str) -> torch.Tensor:
    draws = [torch.randn(shape, generator=make_generator(SEED, stream, p)) for p in POSITIONS]
    return torch.stack(draws).double()


@pytest.fixture
def tiny(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["dit-tiny"]


def a_batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    mean, logvar = (torch.randn(3, 4, 4, 4, generator=g) for _ in range(2))
    labels = torch.tensor([3, 1000, 281])
    return {"latent_mean": mean, "latent_logvar": logvar, "class_labels": labels}


def test_noising_target_and_loss_equal_an_fp64_computation_by_diffusers_scheduler(
    tiny: Path,
) -> None:
    """Posterior draw, latent scale, noise, timestep, noise target: each from its own stream."""
    checkpoint, batch = open_checkpoint(tiny), a_batch()
    model = Recorder(torch.randn(3, 8, 4, 4, generator=torch.Generator().manual_seed(1)))
    output = checkpoint.denoiser.losses(model, batch, RandomStreams(SEED, POSITIONS))

    scheduler = DDIMScheduler.from_pretrained(tiny, subfolder="scheduler")
    std = (0.5 * batch["latent_logvar"].double()).exp()
    sample = batch["latent_mean"].double() + std * own_draws((4, 4, 4), "posterior")
    clean, noise = sample * 0.18215, own_draws((4, 4, 4), "noise")
    timesteps = torch.cat(
        [torch.randint(0, 1000, (1,), generator=make_generator(SEED, "timestep", p)) for p in POSITIONS]
    )
    assert torch.equal(output.timesteps, timesteps)
    assert torch.equal(model.asked["timestep"], timesteps)
    assert torch.equal(model.asked["class_labels"], batch["class_labels"])
    expected = scheduler.add_noise(clean, noise, timesteps)
    torch.testing.assert_close(model.asked["noisy"].double(), expected, rtol=1e-5, atol=1e-5)
    squared = (model.answer[:, :4].double() - noise).square().flatten(1).mean(1)
    bound = checkpoint.denoiser.objective.compute_variational_bound(
        model.answer[:, :4], model.answer[:, 4:], clean.float(), expected.float(), timesteps
    )
    assert (bound > 1e-3).all()
    torch.testing.assert_close(output.losses.double(), squared + bound, rtol=1e-3, atol=0)


def test_every_block_sees_a_samples_own_label_and_torchs_generator_is_left_alone(
    tiny: Path,
) -> None:
    """Diffusers drops a label in each block by itself, from the global generator."""
    transformer = open_checkpoint(tiny).denoiser.load_transformer(torch.float32).train()
    recorded_labels: list[torch.Tensor] = []
    for block in transformer.transformer_blocks:
        table = block.norm1.emb.class_embedder.embedding_table
        assert len(table.weight) == 1001
        table.register_forward_hook(lambda _m, args, _o: recorded_labels.append(args[0]))
    before = torch.get_rng_state()
    labels = torch.arange(64) * 7
    transformer(
        torch.zeros(64, 4, 4, 4),
        timestep=torch.full((64,), 5),
        class_labels=labels,
        return_dict=False,
    )
    assert len(recorded_labels) == 3  # two blocks, and the output layer's use of the first one's
    assert all(torch.equal(row_labels, labels) for row_labels in recorded_labels)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_cache_holds_the_vaes_posterior_of_pixels_from_minus_one_to_one_in_fp32(
    tiny: Path,
) -> None:
    pixels = torch.randint(0, 256, (1, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    encode = open_checkpoint(tiny).encoders.load_video_encoder(torch.bfloat16, CPU)
    encoded = encode(pixels.to(torch.uint8))
    vae = AutoencoderKL.from_pretrained(tiny, subfolder="vae")
    with torch.no_grad():
        posterior = vae.encode(pixels.float() / 127.5 - 1).latent_dist
    assert torch.equal(encoded["latent_mean"], posterior.mean[0])
    assert torch.equal(encoded["latent_logvar"], posterior.logvar[0])


def test_sampling_passes_on_every_setting(tiny: Path) -> None:
    call_kwargs: dict[str, Any] = {}

    class Pipeline:
        def __call__(self, **kwargs: Any) -> Any:
            call_kwargs.update(kwargs)
            images = torch.linspace(0, 1, 2 * 2 * 3).view(1, 2, 2, 3).numpy()
            return type("Output", (), {"images": images})

    checkpoint = open_checkpoint(tiny)
    sampling = Sampling(VideoShape(1, 32, 32), inference_steps=7, guidance_scale=2.5, seed=5)
    image = checkpoint.sampler.generate(Pipeline(), checkpoint.sampler.prompt_kwargs("tabby cat"), sampling)
    assert call_kwargs["class_labels"] == [281]
    assert (call_kwargs["num_inference_steps"], call_kwargs["guidance_scale"]) == (7, 2.5)
    assert call_kwargs["generator"].initial_seed() == 5
    assert image.dtype is torch.uint8
    assert image.shape == (1, 2, 2, 3)
    assert (image.min(), image.max()) == (0, 255)


def test_an_adapter_is_loaded_weighted_unloaded_and_leaves_the_pipelines_name(tiny: Path, tmp_path: Path) -> None:
    """Diffusers' DiT has no LoRA loader of its own."""
    checkpoint = open_checkpoint(tiny)
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    attach_lora(transformer, LoraConfig(rank=4), get_family("dit").lora_targets, seed=0)
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if is_lora_b(name):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=g))
    save_adapter(transformer, checkpoint.info.pipeline_class, tmp_path / "adapter", {})

    pipeline: Any = DiTPipeline.from_pretrained(tiny)
    latents = torch.randn(2, 4, 4, 4, generator=g)

    def output() -> torch.Tensor:
        with torch.no_grad():
            return pipeline.transformer(
                latents, timestep=torch.tensor([5, 900]), class_labels=torch.tensor([3, 281])
            ).sample

    base = output()
    load_adapter(pipeline, tmp_path / "adapter")
    full_output = output()
    pipeline.set_adapters(["default_0"], [0.5])
    half = output()
    pipeline.set_adapters(["default_0"], [0.0])
    torch.testing.assert_close(output(), base, rtol=0, atol=0)
    assert (full_output - base).abs().max() > 1e-3
    assert 0 < (half - base).abs().max() < (full_output - base).abs().max()
    pipeline.unload_lora_weights()
    assert torch.equal(output(), base)
    pipeline.save_pretrained(tmp_path / "saved")
    saved = tmp_path / "saved"
    assert json.loads((saved / "model_index.json").read_text())["_class_name"] == "DiTPipeline"
    config = json.loads((saved / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "DiTTransformer2DModel"


def change_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        (
            "scheduler/scheduler_config.json",
            {"prediction_type": "v_prediction"},
            "predicts noise, but its scheduler says prediction_type=v_prediction",
        ),
        ("scheduler/scheduler_config.json", {"rescale_betas_zero_snr": True}, "ends in pure noise"),
        ("transformer/config.json", {"out_channels": 6}, "out_channels=6"),
        (
            "model_index.json",
            {"_class_name": "LattePipeline"},
            "is a LattePipeline checkpoint; family dit trains DiTPipeline",
        ),
    ],
)
def test_a_checkpoint_that_contradicts_the_family_is_refused(
    tiny: Path, tmp_path: Path, file: str, values: dict[str, Any], words: str
) -> None:
    path = Path(shutil.copytree(tiny, tmp_path / "model"))
    change_json(path / file, **values)
    with pytest.raises(DitLoraError, match=words):
        open_checkpoint(path)


def test_a_vae_config_without_a_scaling_factor_gets_the_default_of_its_class(tiny: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny, tmp_path / "model"))
    config = json.loads((path / "vae" / "config.json").read_text())
    assert config.pop("scaling_factor")
    (path / "vae" / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(path).info.vae_config["scaling_factor"] == 0.18215


def test_the_class_name_of_the_published_files_is_read_and_kept_loadable(tiny: Path, tmp_path: Path) -> None:
    """facebook/DiT-XL-2-256 says Transformer2DModel, with keys that DiTTransformer2DModel has not."""
    path = Path(shutil.copytree(tiny, tmp_path / "model"))
    legacy = {"_class_name": "Transformer2DModel", "num_vector_embeds": None}
    change_json(path / "transformer" / "config.json", **legacy)
    change_json(path / "model_index.json", transformer=["diffusers", "Transformer2DModel"])
    checkpoint = open_checkpoint(path)
    transformer, expected = (
        opened_checkpoint.denoiser.load_transformer(torch.float32)
        for opened_checkpoint in (checkpoint, open_checkpoint(tiny))
    )
    pairs = zip(transformer.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(first_tensor, second_tensor) for first_tensor, second_tensor in pairs)
    saved = save_pipeline(transformer, path, tmp_path / "saved", {}, {"id2label": {"7": "dog"}})
    for source in (path, saved):
        assert isinstance(DiTPipeline.from_pretrained(source).transformer, DiTTransformer2DModel)
    assert DiTPipeline.from_pretrained(saved).labels == {"dog": 7}


def test_a_fresh_dit_starts_as_the_paper_says(tiny: Path) -> None:
    """Blocks are the identity and the output is zero; embedders N(0, 0.02), alike in all blocks."""
    checkpoint = open_checkpoint(tiny, {"num_layers": 3, "num_attention_heads": 4})
    torch.manual_seed(0)
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 4, 64, generator=g)
    labels, t = torch.tensor([3, 1000]), torch.tensor([5, 900])
    assert len(transformer.transformer_blocks) == 3
    for block in transformer.transformer_blocks:
        assert torch.equal(block(hidden, timestep=t, class_labels=labels), hidden)
        table = block.norm1.emb.class_embedder.embedding_table.weight
        assert abs(table.std() - 0.02) < 0.001
        assert torch.equal(table, transformer.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight)
        weight = block.attn1.to_q.weight
        assert abs(weight.std() - (2 / sum(weight.shape)) ** 0.5) < 0.01
        assert not block.attn1.to_q.bias.any()
        assert abs(block.norm1.emb.timestep_embedder.linear_1.weight.std() - 0.02) < 0.001
    latents = torch.randn(2, 4, 4, 4, generator=g)
    assert not transformer(latents, timestep=t, class_labels=labels).sample.any()
    weight = transformer.pos_embed.proj.weight.flatten(1)
    assert abs(weight.std() - (2 / sum(weight.shape)) ** 0.5) < 0.02
    torch.manual_seed(0)
    second_transformer = checkpoint.denoiser.load_transformer(torch.float32)
    pairs = zip(transformer.parameters(), second_transformer.parameters(), strict=True)
    assert all(torch.equal(first_tensor, second_tensor) for first_tensor, second_tensor in pairs)


Values = dict[str, Any]
Change = Callable[[Values], None]


@pytest.fixture
def values(tiny: Path, tmp_path: Path) -> Values:
    """A recipe from scratch on six classes."""
    write_class_folders(tmp_path / "images", images=12, height=32, width=32)
    return {
        "model": {"family": "dit", "path": str(tiny), "from_scratch": {}},
        "data": {"path": str(tmp_path / "images"), "height": 32, "width": 32},
        "optim": {"groups": {"backbone": {"lr": 1e-3}}},
        "train": {"steps": 2, "mode": "full"},
        "run": {"dir": str(tmp_path / "run")},
    }


def trained_checkpoint(values: Values) -> Any:
    recipe = parse_recipe(values, source="test")
    return get_family("dit").open(recipe.model, recipe)


def loss_of(checkpoint: Any) -> torch.Tensor:
    model = Recorder(torch.randn(3, 8, 4, 4, generator=torch.Generator().manual_seed(1)))
    return checkpoint.denoiser.losses(model, a_batch(), RandomStreams(SEED, POSITIONS)).losses


def test_the_bound_is_trained_unless_the_recipe_says_otherwise(values: Values) -> None:
    by_default = loss_of(trained_checkpoint(values))
    values["train"]["vlb"] = True
    assert torch.equal(loss_of(trained_checkpoint(values)), by_default)
    values["train"]["vlb"] = False
    loss_without = loss_of(trained_checkpoint(values))
    assert (loss_without < by_default - 1e-3).all()


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("model", {"from_scratch": {"depth": 2}}, "DiTTransformer2DModel has no depth; it has"),
        ("model", {"from_scratch": {"num_embeds_ada_norm": 5}}, "the data has 6 classes"),
        ("data", {"height": 64}, "data.height must be 32; got 64"),
        ("data", {"frames": 9, "fps": 8}, "data.frames must be 1, for images; got 9"),
        ("data", {"image_dropout": 0.1}, "data.image_dropout: family dit does not use this"),
        ("validation", {"prompts": ["red disc", "red dog"]}, "unknown class 'red dog'; choose from"),
        ("data", {"path": "nowhere"}, "the folder nowhere does not exist"),
    ],
)
def test_a_recipe_that_cannot_train_is_refused(values: Values, section: str, change: Values, words: str) -> None:
    values[section] = {**values.get(section, {}), **change}
    with pytest.raises(DitLoraError, match=words):
        trained_checkpoint(values).denoiser.load_transformer(torch.float32)


def test_the_bound_is_refused_where_no_variance_is_learned(values: Values) -> None:
    values["model"]["from_scratch"] = {"out_channels": 4}
    model = Recorder(torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(1)))
    losses = trained_checkpoint(values).denoiser.losses(model, a_batch(), RandomStreams(SEED, POSITIONS)).losses
    noise = own_draws((4, 4, 4), "noise")
    squared = (model.answer.double() - noise).square().flatten(1).mean(1)
    torch.testing.assert_close(losses.double(), squared, rtol=1e-5, atol=0)
    values["train"]["vlb"] = True
    with pytest.raises(DitLoraError, match="has no learned variance"):
        trained_checkpoint(values)


def test_a_class_folder_without_images_is_refused(values: Values) -> None:
    (Path(values["data"]["path"]) / "mauve_disc").mkdir()
    with pytest.raises(DitLoraError, match="mauve_disc: this class folder holds no video and no image"):
        trained_checkpoint(values)
