"""The contract, for every family and tiny variant: what training relies on, and agreement with the stock pipeline."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import ARCHITECTURES, CASES
from family_cases.case import Case
from family_cases.subject import (
    CPU,
    Subject,
    adapted,
    encoded_batch,
    encoded_text,
    open_subject,
    pixels_of,
    stock_pipeline,
)
from PIL import Image

from dit_lora.adapters.attach import is_lora_a, is_lora_b
from dit_lora.adapters.diffusers_format import ADAPTER_FILE, save_adapter
from dit_lora.adapters.load import load_adapter
from dit_lora.config.data import VideoShape
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.references import read_reference
from dit_lora.data.media.video import write_sample
from dit_lora.errors import DitLoraError
from dit_lora.families import DIFFUSION_FAMILIES, get_family
from dit_lora.families.base import Checkpoint, Sampling
from dit_lora.numerics.streams import RandomInputs, RandomStreams
from dit_lora.training.tasks.diffusion.cache_plan import DecodedSample

OF_OWN_NETWORK = {case.variant for case in CASES if case.name in ARCHITECTURES | {"cogvideox-5b-i2v", "ltx-video-i2v"}}
"""Variants whose batches no other variant's network, or pipeline, takes in the same way."""
FPS = 24.0
"""Frames a second of references that are clips: pipelines take these where they are told none."""


def test_every_variant_of_every_family_is_under_the_contract() -> None:
    variants = {(name, v) for name in DIFFUSION_FAMILIES for v in get_family(name).tiny_variants}
    assert {(case.family, case.variant) for case in CASES} == variants


def guidance_of(case: Case, checkpoint: Checkpoint) -> float:
    return checkpoint.sampler.guidance_threshold if case.guidance is None else case.guidance


def record_calls(module: torch.nn.Module) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Arguments by name and output of every call, as the module sees them."""
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    names = list(inspect.signature(module.forward).parameters)

    def keep(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        # Copies: Kandinsky 5's pipeline writes the next latents into the same tensor.
        copies = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
        }
        calls.append((copies, output[0]))

    module.register_forward_hook(keep, with_kwargs=True)
    return calls


def test_losses_are_per_sample_fp32_and_finite(subject: Subject) -> None:
    transformer = subject.checkpoint.denoiser.load_transformer(torch.float32)
    batch = encoded_batch(subject)
    output = subject.checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [0, 1, 2]))
    assert output.losses.shape == output.timesteps.shape == (3,)
    assert output.losses.dtype is torch.float32
    assert torch.isfinite(output.losses).all()
    assert output.timesteps.min() >= 0
    assert output.timesteps.max() < subject.checkpoint.denoiser.num_train_timesteps


def test_a_samples_loss_is_its_own(pipeline_subject: Subject) -> None:
    """Alone or in a batch, and whatever its neighbours are."""
    transformer = pipeline_subject.checkpoint.denoiser.load_transformer(torch.float32)
    batch = encoded_batch(pipeline_subject)
    losses = pipeline_subject.checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [4, 5, 6])).losses
    single_batch = {name: tensor[1:2] for name, tensor in batch.items()}
    second_losses = pipeline_subject.checkpoint.denoiser.losses(
        transformer, single_batch, RandomStreams(0, [5])
    ).losses
    torch.testing.assert_close(losses[1:2], second_losses, rtol=1e-5, atol=0)
    assert len(set(losses.tolist())) == 3


class NothingToDraw(RandomStreams):
    """Streams all of whose draws were made ahead."""

    def __call__(self, stream: str) -> list[torch.Generator]:
        raise AssertionError(f"{stream} was not drawn ahead")


def test_what_is_drawn_ahead_is_all_that_is_drawn_and_changes_no_bit(pipeline_subject: Subject) -> None:
    """The draws are known from shapes alone; those of other samples are not taken for these."""
    checkpoint, batch = pipeline_subject.checkpoint, encoded_batch(pipeline_subject)
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    shapes = {name: tensor.to("meta") for name, tensor in batch.items()}
    tensors = RandomStreams(0, [4, 5, 6]).draw_random_tensors(
        checkpoint.denoiser.get_random_input_samplers(shapes), CPU
    )
    ahead = RandomInputs(0, (4, 5, 6), tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}

    def losses(streams: RandomStreams) -> torch.Tensor:
        return checkpoint.denoiser.losses(transformer, batch, streams).losses

    now = losses(RandomStreams(0, [4, 5, 6]))
    assert torch.equal(losses(NothingToDraw(0, [4, 5, 6], ahead)), now)
    assert all(torch.equal(tensors[name], expected_tensor) for name, expected_tensor in before.items())
    for seed, draws in ((0, [4, 6, 5]), (1, [4, 5, 6])):
        other_losses = losses(RandomStreams(seed, draws))
        assert torch.equal(losses(RandomStreams(seed, draws, ahead)), other_losses)
        assert not torch.equal(other_losses, now)
    # Each is used: another value of it gives another loss.
    for name, drawn_tensor in tensors.items():
        changed = (
            ~drawn_tensor
            if drawn_tensor.dtype is torch.bool
            else drawn_tensor.flip(0)
            if drawn_tensor.ndim > 1
            else drawn_tensor[[2, 0, 1]]
        )
        if not torch.equal(changed, drawn_tensor):
            changed_inputs = replace(ahead, tensors={**tensors, name: changed})
            assert not torch.equal(losses(RandomStreams(0, [4, 5, 6], changed_inputs)), now), name


def test_a_gradient_reaches_every_adapter_and_nothing_frozen(model_subject: Subject) -> None:
    transformer = adapted(model_subject)
    batch = encoded_batch(model_subject)
    model_subject.checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [0, 1, 2])).losses.mean().backward()
    for name, parameter in transformer.named_parameters():
        if is_lora_a(name) or is_lora_b(name):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_one_prediction_is_one_denoising_call_of_the_stock_pipeline(subject: Subject, tmp_path: Path) -> None:
    """Positions, text length, layout and first image agree: same inputs, bitwise the same output."""
    case, checkpoint = subject.case, subject.checkpoint
    transformer = checkpoint.denoiser.load_transformer(case.call_dtype).eval()
    encode_text = checkpoint.encoders.load_text_encoder(case.call_dtype, CPU)
    encode_video = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    pipeline = checkpoint.sampler.pipeline(case.call_dtype)
    pipeline.set_progress_bar_config(disable=True)
    recorded = record_calls(getattr(pipeline, case.part))
    for shape in case.shapes:
        image_kwargs, sample = pictures_of(case, shape, tmp_path)
        recorded.clear()
        sampling = Sampling(shape, 3, guidance_of(case, checkpoint), seed=0, **image_kwargs)
        checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs(case.captions[1]), sampling)
        caption, references = case.captions[1], sample.references
        row = sample.encode_sample(encode_video, shape) | encoded_text(
            subject, encode_text, caption, references, shape
        )
        batch = case.as_sampled({name: tensor[None] for name, tensor in row.items()}, sampling.seed)
        calls = [call for call in recorded if case.compared(call[0])]
        assert calls
        for call, expected in calls:
            with torch.no_grad():
                prediction = checkpoint.denoiser.predict(transformer, case.noisy(call), case.timesteps(call), batch)
            # Behind the noisy tokens are those of references, of which nothing is asked.
            output = expected[:, : prediction.shape[1]] if case.references else expected
            assert torch.equal(prediction, case.predicted(image_part(case, output, prediction)))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=() if variant in OF_OWN_NETWORK else pytest.mark.thorough)
        for variant in sorted({case.variant for case in CASES if case.takes_several_prompts and not case.references})
    ],
)
def test_a_batch_of_unequal_captions_is_one_call_of_the_stock_pipeline(
    tiny_checkpoints: dict[str, Path], variant: str, tmp_path: Path
) -> None:
    """Two captions of other lengths with different noise, bitwise: no neighbour, pad or mask comes between."""
    for case in (item for item in CASES if item.variant == variant and not item.references):
        subject = open_subject(case, tiny_checkpoints[variant])
        checkpoint = subject.checkpoint
        encode = checkpoint.encoders.load_text_encoder(case.call_dtype, CPU)
        captions = [encode([case.captions[index]]) for index in (0, 2)]
        text = {name: torch.cat([caption[name] for caption in captions]) for name in captions[0]}
        images, sample = pictures_of(case, case.native, tmp_path)
        pipeline = checkpoint.sampler.pipeline(case.call_dtype, text=False)
        pipeline.set_progress_bar_config(disable=True)
        calls = record_calls(getattr(pipeline, case.part))
        sampling = Sampling(case.native, 3, guidance_of(case, checkpoint), seed=0, **images)
        empty = encode(["", ""]) if sampling.guidance_scale > checkpoint.sampler.guidance_threshold else None
        checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs(text, empty), sampling)
        row = checkpoint.encoders.load_video_encoder(torch.float32, CPU)(sample.video)
        both = {name: torch.stack([tensor, tensor]) for name, tensor in row.items()}
        batch = case.as_sampled({**both, **text}, sampling.seed)
        transformer = checkpoint.denoiser.load_transformer(case.call_dtype).eval()
        calls = [call for call in calls if case.compared(call[0])]
        assert calls
        for call, expected in calls:
            noisy = case.noisy(call)
            assert len(noisy) == 2
            assert not torch.equal(noisy[0], noisy[1])
            with torch.no_grad():
                prediction = checkpoint.denoiser.predict(transformer, noisy, case.timesteps(call), batch)
            assert torch.equal(prediction, case.predicted(image_part(case, expected, prediction)))


def image_part(case: Case, output: Any, prediction: torch.Tensor) -> Any:
    """The network's output without that for text tokens before the image's."""
    return output[:, -prediction.shape[1] :] if case.has_text_before_image else output


def pictures_of(case: Case, shape: VideoShape, folder: Path) -> tuple[dict[str, Any], DecodedSample]:
    """Write the images that a video starts from, or its references. Returns them by name, and the sample they belong
    to.
    """
    generator = torch.Generator().manual_seed(3)
    pixels = pixels_of(shape, generator)
    images = {name: folder / f"{shape.height}_{name}.png" for name in case.pictures}
    for name, file in images.items():
        picture = pixels[-1 if name == "last_image" else 0]
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file)
    files = tuple(
        write_sample(
            folder / f"{shape.height}_{index}",
            pixels_of(reference, generator).permute(0, 2, 3, 1),
            FPS,
        )
        for index, reference in enumerate(case.references)
    )
    clip = shape if any(reference.frames > 1 for reference in case.references) else None
    references = tuple(read_reference(MediaFile(file), clip, FPS) for file in files)
    return {**images, "references": files}, DecodedSample(pixels, references=references)


def test_guidance_of_0_calls_the_model_on_one_sample(pipeline_subject: Subject, tmp_path: Path) -> None:
    """Distilled checkpoints are sampled so; a prompt's tensors are given, as validation does."""
    case, checkpoint = pipeline_subject.case, pipeline_subject.checkpoint
    images, sample = pictures_of(case, case.native, tmp_path)
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    text, empty = (
        {
            name: tensor[None]
            for name, tensor in encoded_text(pipeline_subject, encode, caption, sample.references, case.native).items()
        }
        for caption in (case.captions[1], "")
    )
    pipeline = checkpoint.sampler.pipeline(torch.float32, text=False)
    pipeline.set_progress_bar_config(disable=True)
    calls = record_calls(getattr(pipeline, case.part))
    sampling = Sampling(case.native, inference_steps=2, guidance_scale=0.0, seed=0, **images)
    video = checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs(text, empty), sampling)
    assert calls
    assert all(len(case.noisy(call)) == 1 for call, _ in calls)
    assert len(video.unique()) > 1


def test_latents_are_scaled_as_the_pipeline_unscales_them(vae_subject: Subject) -> None:
    """What training calls clean, decoded by the pipeline, is what the VAE alone decodes."""
    batch = {name: tensor[:1] for name, tensor in encoded_batch(vae_subject).items()}
    if "latent_logvar" in batch:  # DC-AE has no posterior
        batch["latent_logvar"] = torch.full_like(batch["latent_logvar"], -60.0)  # no noise
    recorded = {}
    original = vae_subject.checkpoint.denoiser.objective.add_noise

    class Spy(type(vae_subject.checkpoint.denoiser.objective)):  # type: ignore[misc]
        def add_noise(self, clean: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            recorded["clean"] = clean
            return original(clean, *rest)

    spy = Spy(**vars(vae_subject.checkpoint.denoiser.objective))
    denoiser = replace(vae_subject.checkpoint.denoiser, objective=spy)
    denoiser.losses(denoiser.load_transformer(torch.float32), batch, RandomStreams(0, [0]))
    pipeline = stock_pipeline(vae_subject)
    with torch.no_grad():
        pipeline.vae.double()  # in fp32 a decoder makes more of the latents' rounding
        decoded = vae_subject.case.decode(pipeline, recorded["clean"].double())
        expected = vae_subject.case.vae_decode(pipeline, batch["latent_mean"].double())
    # A pipeline may make fp32 pixels of it.
    torch.testing.assert_close(decoded, expected, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("alpha", [2, *(pytest.param(alpha, marks=pytest.mark.thorough) for alpha in (4, 16))])
def test_the_saved_adapter_in_the_stock_pipeline_is_the_trained_model(
    pipeline_subject: Subject, tmp_path: Path, alpha: int
) -> None:
    """alpha below, at and above the rank of 4; loaded with no extra argument, output bitwise equal."""
    transformer = adapted(pipeline_subject, alpha=alpha)
    part = pipeline_subject.case.part
    save_adapter(transformer, pipeline_subject.checkpoint.info.pipeline_class, tmp_path, {"part": part})
    pipeline = stock_pipeline(pipeline_subject)
    base = pipeline_subject.checkpoint.denoiser.load_transformer(torch.float32)
    load_adapter(pipeline, tmp_path)
    batch = encoded_batch(pipeline_subject)

    def losses(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return pipeline_subject.checkpoint.denoiser.losses(model.eval(), batch, RandomStreams(0, [4, 5, 6])).losses

    trained, loaded, untrained = map(losses, (transformer, getattr(pipeline, part), base))
    assert torch.equal(trained, loaded)
    assert (trained - untrained).abs().max() > 1e-4
    assert (tmp_path / ADAPTER_FILE).is_file()


def test_bf16_keeps_position_tables_and_stays_close_to_fp32(model_subject: Subject) -> None:
    """Loaded with dtype=, and the loss is fp32 whatever the model computes in."""
    half = model_subject.checkpoint.denoiser.load_transformer(torch.bfloat16)
    full = model_subject.checkpoint.denoiser.load_transformer(torch.float32)
    buffers, stored = dict(full.named_buffers()), half.state_dict()
    for name, buffer in half.named_buffers():
        # A table that was learned is a weight of the checkpoint, in its dtype.
        expected = buffers[name].bfloat16() if name in stored else buffers[name]
        assert buffer.dtype is expected.dtype, name
        assert torch.equal(buffer, expected), name
    batch = encoded_batch(model_subject)
    streams = RandomStreams(0, [0, 1, 2])
    exact = model_subject.checkpoint.denoiser.losses(full, batch, streams).losses
    rounded = {
        name: tensor.bfloat16() if tensor.is_floating_point() and "latent" not in name else tensor
        for name, tensor in batch.items()
    }
    losses = model_subject.checkpoint.denoiser.losses(half, rounded, streams).losses
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses, exact, rtol=0.02, atol=0)


def test_a_shape_that_does_not_fit_is_refused_with_the_nearest(subject: Subject) -> None:
    assert subject.case.refused
    for shape, message in subject.case.refused:
        with pytest.raises(DitLoraError, match=message):
            subject.checkpoint.info.check_shape(shape)
    for shape in subject.case.shapes:
        subject.checkpoint.info.check_shape(shape)


def test_one_seed_gives_the_same_bytes_and_another_gives_others(model_subject: Subject, tmp_path: Path) -> None:
    variant = model_subject.path.name

    def contents(root: Path) -> dict[str, bytes]:
        return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}

    torch.manual_seed(5)
    model_subject.family.build_tiny_checkpoint(variant, tmp_path / "again", 0)
    model_subject.family.build_tiny_checkpoint(variant, tmp_path / "other", 1)
    assert contents(tmp_path / "again") == contents(model_subject.path)
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert contents(tmp_path / "other")[weights] != contents(model_subject.path)[weights]


def test_sides_come_in_the_steps_that_buckets_are_made_of(subject: Subject) -> None:
    checkpoint, native = subject.checkpoint, subject.case.native
    step = checkpoint.info.size_multiple
    assert native.height % step == native.width % step == 0
    checkpoint.info.check_shape(native)
    for sides in ({"height": native.height + step // 2}, {"width": native.width + step // 2}):
        with pytest.raises(DitLoraError):
            checkpoint.info.check_shape(replace(native, **sides))


def test_the_text_limit_is_what_the_encoder_gives(subject: Subject) -> None:
    """As many tokens as the embedding of a caption far too long has, where it has one row a token."""
    limit = subject.checkpoint.encoders.load_text_limit()
    encode = subject.checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    if limit is None:
        (label,) = encode(subject.case.captions[:1]).values()
        assert not label.is_floating_point()
        return
    assert len(limit.tokenizer("a word " * 200).input_ids) > limit.max_tokens
    takes = subject.checkpoint.info.reference_spec
    if takes is not None and takes.is_encoded_with_caption:
        return  # whose pipelines cut none: a test of their own holds the limit
    embedding = next(t for t in encode(["a word " * 200]).values() if t.is_floating_point())
    rows = limit.max_tokens + subject.case.template_tokens
    assert embedding.ndim == 2 or embedding.shape[1] == rows
