"""The contract, over every family and tiny variant: what training relies on, and what the stock pipeline must agree to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dit_lora.adapters.attach import attach_lora, is_lora_a, is_lora_b
from dit_lora.adapters.store import ADAPTER_FILE, save_adapter
from dit_lora.config import LoraConfig, ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import FAMILIES, get_family
from dit_lora.families.base import Checkpoint, Family, VideoShape
from dit_lora.numerics.streams import Streams

CPU = torch.device("cpu")
VARIANTS = [(name, variant) for name in FAMILIES for variant in get_family(name).tiny_variants]
NATIVE = VideoShape(9, 64, 96)
OFF_NATIVE = VideoShape(13, 96, 48)


class Subject(NamedTuple):
    family: Family
    checkpoint: Checkpoint
    path: Path


@pytest.fixture(params=VARIANTS, ids=[variant for _, variant in VARIANTS])
def subject(request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path]) -> Subject:
    name, variant = request.param
    path = tiny_checkpoints[variant]
    family = get_family(name)
    return Subject(family, family.open(ModelConfig(family=name, path=str(path))), path)


def encoded_batch(
    checkpoint: Checkpoint, shape: VideoShape, size: int = 3
) -> dict[str, torch.Tensor]:
    """A batch whose rows differ in video and caption."""
    generator = torch.Generator().manual_seed(0)
    encode_video = checkpoint.load_video_encoder(torch.float32, CPU)
    encode_text = checkpoint.load_text_encoder(torch.float32, CPU)
    rows = []
    for k in range(size):
        pixels = torch.randint(
            0, 256, (shape.frames, 3, shape.height, shape.width), generator=generator
        ).to(torch.uint8)
        rows.append({**encode_video(pixels), "prompt_embeds": encode_text([f"clip {k}"])[0]})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def adapted(subject: Subject, *, alpha: int = 7, trained: bool = True) -> torch.nn.Module:
    transformer = subject.checkpoint.load_transformer(torch.float32)
    attach_lora(transformer, LoraConfig(rank=4, alpha=alpha), subject.family.lora_targets, seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if trained and is_lora_b(name):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return transformer


def record_calls(module: torch.nn.Module) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Arguments and output of every call, as the module sees them."""
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []

    def keep(_module: torch.nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls.append((kwargs, output[0]))

    module.register_forward_hook(keep, with_kwargs=True)
    return calls


def test_losses_are_per_sample_fp32_and_finite(subject: Subject) -> None:
    transformer = subject.checkpoint.load_transformer(torch.float32)
    batch = encoded_batch(subject.checkpoint, NATIVE)
    output = subject.checkpoint.losses(transformer, batch, Streams(0, [0, 1, 2]))
    assert output.losses.shape == output.timesteps.shape == (3,)
    assert output.losses.dtype is torch.float32
    assert torch.isfinite(output.losses).all()
    assert output.timesteps.min() >= 0
    assert output.timesteps.max() < subject.checkpoint.train_timesteps


def test_a_samples_loss_is_its_own(subject: Subject) -> None:
    """Alone or in a batch, and whatever its neighbours are."""
    transformer = subject.checkpoint.load_transformer(torch.float32)
    batch = encoded_batch(subject.checkpoint, NATIVE)
    losses = subject.checkpoint.losses(transformer, batch, Streams(0, [4, 5, 6])).losses
    alone = {name: tensor[1:2] for name, tensor in batch.items()}
    again = subject.checkpoint.losses(transformer, alone, Streams(0, [5])).losses
    torch.testing.assert_close(losses[1:2], again, rtol=1e-5, atol=0)
    assert len(set(losses.tolist())) == 3


def test_a_gradient_reaches_every_adapter_and_nothing_frozen(subject: Subject) -> None:
    transformer = adapted(subject)
    batch = encoded_batch(subject.checkpoint, NATIVE)
    subject.checkpoint.losses(transformer, batch, Streams(0, [0, 1, 2])).losses.mean().backward()
    for name, parameter in transformer.named_parameters():
        if is_lora_a(name) or is_lora_b(name):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize("shape", [NATIVE, OFF_NATIVE], ids=["native", "off-native"])
def test_one_prediction_is_one_denoising_call_of_the_stock_pipeline(
    subject: Subject, shape: VideoShape
) -> None:
    """Positions, text length and layout agree: same inputs, bitwise the same output."""
    pipeline = subject.family.pipeline_class.from_pretrained(subject.path)
    pipeline.set_progress_bar_config(disable=True)
    calls = record_calls(pipeline.transformer)
    pipeline(
        "a horse",
        num_frames=shape.frames,
        height=shape.height,
        width=shape.width,
        num_inference_steps=2,
        guidance_scale=1.0,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    )
    ours = subject.checkpoint.load_text_encoder(torch.float32, CPU)(["a horse"])
    transformer = subject.checkpoint.load_transformer(torch.float32)
    for kwargs, expected in calls:
        assert torch.equal(kwargs["encoder_hidden_states"], ours)
        with torch.no_grad():
            prediction = subject.checkpoint.predict(
                transformer, kwargs["hidden_states"], kwargs["timestep"], ours
            )
        assert torch.equal(prediction, expected)


def test_latents_are_scaled_as_the_pipeline_unscales_them(subject: Subject) -> None:
    """What training calls clean, decoded by the pipeline, is what the VAE alone decodes."""
    batch = encoded_batch(subject.checkpoint, NATIVE, size=1)
    batch["latent_logvar"] = torch.full_like(batch["latent_logvar"], -60.0)  # no posterior noise
    seen = {}
    original = subject.checkpoint.objective.add_noise

    class Spy(type(subject.checkpoint.objective)):  # type: ignore[misc]
        def add_noise(self, clean: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            seen["clean"] = clean
            return original(clean, *rest)

    spy = Spy(**vars(subject.checkpoint.objective))
    checkpoint = type(subject.checkpoint)(**{**vars(subject.checkpoint), "objective": spy})
    checkpoint.losses(checkpoint.load_transformer(torch.float32), batch, Streams(0, [0]))
    pipeline = subject.family.pipeline_class.from_pretrained(subject.path)
    with torch.no_grad():
        decoded = pipeline.decode_latents(seen["clean"])
        expected = pipeline.vae.decode(batch["latent_mean"]).sample
    torch.testing.assert_close(decoded, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alpha", [2, 4, 16])
def test_the_saved_adapter_in_the_stock_pipeline_is_the_trained_model(
    subject: Subject, tmp_path: Path, alpha: int
) -> None:
    """alpha below, at and above the rank of 4; loaded with no extra argument, output bitwise equal."""
    transformer = adapted(subject, alpha=alpha)
    save_adapter(transformer, subject.family.pipeline_class, tmp_path, {})
    pipeline = subject.family.pipeline_class.from_pretrained(subject.path)
    base = subject.checkpoint.load_transformer(torch.float32)
    pipeline.load_lora_weights(tmp_path)
    batch = encoded_batch(subject.checkpoint, NATIVE)
    noisy = torch.randn(3, 3, 4, 8, 12, generator=torch.Generator().manual_seed(4))
    predict: Callable[[torch.nn.Module], torch.Tensor] = lambda model: subject.checkpoint.predict(  # noqa: E731
        model, noisy, torch.tensor([1, 500, 999]), batch["prompt_embeds"]
    )
    with torch.no_grad():
        trained, loaded, untrained = map(predict, (transformer, pipeline.transformer, base))
    assert torch.equal(trained, loaded)
    assert (trained - untrained).abs().max() > 1e-3
    assert (tmp_path / ADAPTER_FILE).is_file()


def test_bf16_keeps_position_tables_and_stays_close_to_fp32(subject: Subject) -> None:
    """Loaded with dtype=, and the loss is fp32 whatever the model computes in."""
    half = subject.checkpoint.load_transformer(torch.bfloat16)
    full = subject.checkpoint.load_transformer(torch.float32)
    buffers = dict(full.named_buffers())
    for name, buffer in half.named_buffers():
        assert buffer.dtype is buffers[name].dtype, name
        assert torch.equal(buffer, buffers[name]), name
    batch = encoded_batch(subject.checkpoint, NATIVE)
    streams = Streams(0, [0, 1, 2])
    exact = subject.checkpoint.losses(full, batch, streams).losses
    rounded = {**batch, "prompt_embeds": batch["prompt_embeds"].bfloat16()}
    losses = subject.checkpoint.losses(half, rounded, streams).losses
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses, exact, rtol=0.02, atol=0)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (VideoShape(9, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
        (VideoShape(9, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
        (VideoShape(10, 64, 96), r"frames must be 4n \+ 1; got 10, nearest 9 and 13"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_the_nearest(
    subject: Subject, shape: VideoShape, words: str
) -> None:
    with pytest.raises(DitLoraError, match=words):
        subject.checkpoint.check_shape(shape)


def test_one_seed_gives_the_same_bytes_and_another_gives_others(
    subject: Subject, tmp_path: Path
) -> None:
    variant = subject.path.name

    def contents(root: Path) -> dict[str, bytes]:
        return {
            str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
        }

    torch.manual_seed(5)
    subject.family.build_tiny(variant, tmp_path / "again", 0)
    subject.family.build_tiny(variant, tmp_path / "other", 1)
    assert contents(tmp_path / "again") == contents(subject.path)
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert contents(tmp_path / "other")[weights] != contents(subject.path)[weights]
