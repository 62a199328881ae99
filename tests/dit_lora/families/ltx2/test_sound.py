"""LTX-2 with sound: the encoder, the joint loss, its adapters, and one call of the stock pipeline."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from family_cases.ltx2 import NATIVE
from family_cases.subject import CPU
from ltx2_cases import CAPTIONS, FPS, batch_of, for_recipe, opened

from dit_lora.adapters.attach import attach_lora, is_lora_b
from dit_lora.adapters.diffusers_format import save_adapter
from dit_lora.commands.sample import SampleRequest, write_samples
from dit_lora.config.recipe import LoraConfig
from dit_lora.data.media.video import read_frames, write_sample
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.families.ltx2.sound import build_audio_encoder, compute_log_mel, count_audio_tokens
from dit_lora.numerics.streams import RandomStreams, draw_normal_noise

RATE = 16000
# Of the published audio VAE.
PUBLISHED = {"sample_rate": RATE, "mel_hop_length": 160, "mel_bins": 64, "in_channels": 2}
TASKS = pytest.mark.parametrize(
    ("variant", "task"),
    [
        pytest.param("ltx-2", "t2v", marks=pytest.mark.thorough),
        ("ltx-2.3", "i2v"),
        ("ltx-2.3", "ic_lora"),
    ],
)


def slaney(hertz: float) -> float:
    """Slaney's scale: linear up to 1 kHz, logarithmic above."""
    if hertz < 1000:
        return 3 * hertz / 200
    return 15 + 27 * float(np.log(hertz / 1000) / np.log(6.4))


def test_a_column_of_the_spectrogram_computed_by_hand() -> None:
    """In fp64 by NumPy: magnitudes of 1,024 points, triangles between Slaney's centres of unit area, the logarithm."""
    generator = torch.Generator().manual_seed(0)
    waveform = 0.3 * torch.randn(2, 4000, generator=generator)
    mel = compute_log_mel(waveform, PUBLISHED)
    assert mel.shape == (2, 4000 // 160 + 1, 64)
    column, channel = 9, 1
    piece = waveform[channel].double().numpy()[column * 160 - 512 : column * 160 + 512]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1024) / 1024)
    spectrum = np.abs(np.fft.rfft(piece * window))
    hertz = np.linspace(0, 8000, 513)
    grid = np.linspace(0, 8000, 800_001)
    mel_points = np.interp(np.linspace(0, slaney(8000), 66), [slaney(frequency) for frequency in grid], grid)
    expected = []
    for low, centre, high in zip(mel_points, mel_points[1:], mel_points[2:], strict=False):
        triangle = np.minimum((hertz - low) / (centre - low), (high - hertz) / (high - centre))
        expected.append((np.clip(triangle, 0, None) * 2 / (high - low) * spectrum).sum())
    target = torch.tensor(np.log(np.maximum(expected, 1e-5)))
    torch.testing.assert_close(mel[channel, column].double(), target, rtol=1e-4, atol=1e-4)


def test_silence_is_the_least_value() -> None:
    assert compute_log_mel(torch.zeros(2, 1000), PUBLISHED).unique().item() == pytest.approx(np.log(1e-5))


def test_tokens_are_as_many_as_the_pipeline_gives_the_video(
    tiny_checkpoints: dict[str, Path],
) -> None:
    assert count_audio_tokens(PUBLISHED, 121 / 24) == 126
    checkpoint = opened(tiny_checkpoints["ltx-2"])
    encode = build_audio_encoder(checkpoint.path, CPU)
    for frames in (9, 17, 25):
        seconds = frames / FPS
        waveform = torch.rand(2, round(seconds * RATE), generator=torch.Generator().manual_seed(1))
        mean = encode(waveform * 2 - 1, RATE)["audio_latent_mean"]
        assert mean.dtype is torch.float32
        assert mean.shape == (round(seconds * 25), 16)
        pipeline = checkpoint.sampler.pipeline(torch.float32)
        sounds = pipeline.audio_vae
        assert count_audio_tokens(sounds.config, seconds) == len(mean)
        # Normalised as the pipeline undoes it, which then decodes a spectrogram.
        undone = pipeline._denormalize_audio_latents(mean[None], sounds.latents_mean, sounds.latents_std)
        unpacked = pipeline._unpack_audio_latents(undone, len(mean), num_mel_bins=4)
        with torch.no_grad():
            mel = compute_log_mel(waveform * 2 - 1, sounds.config)[None]
            expected = sounds.encode(mel).latent_dist.mode()[:, :, : len(mean)]
        torch.testing.assert_close(unpacked, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("waveform", "rate", "words"),
    [
        (torch.zeros(1, 9000), RATE, r"got \(1, 9000\) in float32 at 16000"),
        (torch.zeros(9000), RATE, r"got \(9000,\)"),
        (torch.zeros(2, 9000), 44100, "at 44100; resample it"),
        (torch.zeros(2, 9000, dtype=torch.int16), RATE, "in int16"),
        (torch.zeros(2, 512), RATE, "more than 512 samples; got 512"),
    ],
)
def test_other_waveforms_are_refused(
    tiny_checkpoints: dict[str, Path], waveform: torch.Tensor, rate: int, words: str
) -> None:
    encode = build_audio_encoder(opened(tiny_checkpoints["ltx-2"]).path, CPU)
    with pytest.raises(DitLoraError, match=words):
        encode(waveform, rate)


def with_sound(path: Path, task: str) -> Any:
    return for_recipe(path, model={"task": task}, data={"sound": True})


def adapted(checkpoint: Any) -> torch.nn.Module:
    model = checkpoint.denoiser.load_transformer(torch.float32)
    targets = checkpoint.info.lora_targets(get_family("ltx2").lora_targets)
    attach_lora(model, LoraConfig(rank=2, alpha=3), targets, seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_lora_b(name):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@TASKS
def test_a_samples_loss_is_its_own_and_reaches_every_adapter(
    tiny_checkpoints: dict[str, Path], variant: str, task: str
) -> None:
    checkpoint = with_sound(tiny_checkpoints[variant], task)
    model, batch = adapted(checkpoint), batch_of(checkpoint, sound=True)
    if task == "ic_lora":
        batch["reference_0"] = batch["latent_mean"].roll(1, 0)
    losses = checkpoint.denoiser.losses(model, batch, RandomStreams(0, [4, 5, 6]))
    assert losses.losses.dtype is torch.float32
    single_batch = {name: tensor[1:2] for name, tensor in batch.items()}
    second_losses = checkpoint.denoiser.losses(model, single_batch, RandomStreams(0, [5])).losses
    torch.testing.assert_close(losses.losses[1:2], second_losses, rtol=1e-5, atol=0)
    losses.losses.sum().backward()
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 6 * 4
    still = [n for n in trained if not model.get_parameter(n).grad.abs().max() > 0]
    assert not still


@TASKS
def test_one_call_is_the_stock_pipelines_with_sound(
    tiny_checkpoints: dict[str, Path], variant: str, task: str, tmp_path: Path
) -> None:
    """Both velocities, bitwise, at the guidance that makes one call a step.

    Where tokens are conditioned, the pipeline's own call gives them the other modality's noise level in the attention
    between video and sound; the call that ours must equal has their own timesteps there.
    """
    from family_cases.subject import pixels_of
    from PIL import Image

    checkpoint = with_sound(tiny_checkpoints[variant], task)
    pixels = pixels_of(NATIVE, torch.Generator().manual_seed(3))
    Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(tmp_path / "first.png")
    pictures = {"image": tmp_path / "first.png"} if task == "i2v" else {}
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    calls: list[tuple[dict[str, Any], Any]] = []
    recording = pipeline.transformer.register_forward_hook(
        lambda _model, _args, kwargs, output: calls.append((kwargs, output)), with_kwargs=True
    )
    references: tuple[Path, ...] = ()
    if task == "ic_lora":
        references = (write_sample(tmp_path / "before", pixels.flip(0).permute(0, 2, 3, 1), FPS),)
    sampling = Sampling(NATIVE, 3, 1.0, seed=0, fps=FPS, references=references, **pictures)
    checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs(CAPTIONS[1]), sampling)
    recording.remove()
    encode = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    row = encode(pixels)
    if references:
        encoded_references = [
            read_frames(reference, frames=NATIVE.frames, fps=FPS, height=NATIVE.height, width=NATIVE.width)
            for reference in references
        ]
        row |= encode.encode_references(encoded_references, NATIVE)
    batch = {name: tensor[None] for name, tensor in row.items()}
    batch |= checkpoint.encoders.load_text_encoder(torch.float32, CPU)([CAPTIONS[1]])
    model = checkpoint.denoiser.load_transformer(torch.float32).eval()
    assert len(calls) == 3
    for encoded_references, expected in calls:
        noised = {
            **batch,
            "audio_noisy": encoded_references["audio_hidden_states"],
            "audio_timestep": encoded_references["sigma"],
        }
        video_tokens = encoded_references["hidden_states"][:, : math.prod(row["latent_mean"].shape[1:])]
        with torch.no_grad():
            velocities = checkpoint.denoiser.predict_velocities(
                model, video_tokens, encoded_references["sigma"], noised, {}
            )
        assert not encoded_references["isolate_modalities"]
        if task != "t2v":
            assert not torch.equal(velocities[0], expected[0][:, : video_tokens.shape[1]])
            with own_timesteps(pipeline.transformer, encoded_references), torch.no_grad():
                expected = pipeline.transformer(**encoded_references)
        assert (encoded_references["hidden_states"].shape[1] > video_tokens.shape[1]) == (task == "ic_lora")
        assert torch.equal(velocities[0], expected[0][:, : video_tokens.shape[1]])
        assert torch.equal(velocities[1], expected[1])


@contextmanager
def own_timesteps(model: Any, call: dict[str, Any]) -> Iterator[None]:
    video, sound = model.av_cross_attn_video_scale_shift, model.av_cross_attn_audio_scale_shift
    own_sound = call.get("audio_timestep")
    own_sound = call["timestep"] if own_sound is None else own_sound
    handles = [
        video.register_forward_pre_hook(lambda _module, _args: (call["timestep"].flatten(),)),
        sound.register_forward_pre_hook(lambda _module, _args: (own_sound.flatten(),)),
    ]
    yield
    for handle in handles:
        handle.remove()


def test_sound_has_noise_and_a_level_of_its_own(tiny_checkpoints: dict[str, Path]) -> None:
    checkpoint = with_sound(tiny_checkpoints["ltx-2.3"], "t2v")
    model, batch = checkpoint.denoiser.load_transformer(torch.float32), batch_of(checkpoint, sound=True)
    random_inputs = checkpoint.denoiser.get_random_input_samplers(
        {name: tensor.to("meta") for name, tensor in batch.items()}
    )
    rows = RandomStreams(0, [1, 2, 3]).draw_random_tensors(random_inputs, CPU)
    assert set(rows) == {"noise", "timestep", "audio_noise", "audio_timestep"}
    assert not torch.equal(rows["timestep"], rows["audio_timestep"])
    # By its own number of tokens, 53, where the video has 18.
    assert batch["audio_latent_mean"].shape[1:] == (53, 16)
    gaussian = draw_normal_noise((), RandomStreams(0, [1, 2, 3])("audio_timestep"))
    shift = math.exp(0.95 + (53 - 1024) * (2.05 - 0.95) / (4096 - 1024))
    expected = checkpoint.denoiser.objective.compute_sigmas(gaussian, shift)
    torch.testing.assert_close(rows["audio_timestep"], expected, rtol=1e-6, atol=0)
    few = replace(checkpoint.denoiser, objective=replace(checkpoint.denoiser.objective, shift=1e-3))
    low = few.losses(model, batch, RandomStreams(0, [1, 2, 3]))
    assert low.timesteps.max() < 600


def test_samples_without_their_sound_are_refused_by_name(
    tiny_checkpoints: dict[str, Path],
) -> None:
    checkpoint = with_sound(tiny_checkpoints["ltx-2.3"], "t2v")
    with pytest.raises(DitLoraError, match="cached without their sound"):
        checkpoint.denoiser.get_random_input_samplers(batch_of(checkpoint))
    # Their text is the same: what was cached for video alone does for both.
    silent = opened(tiny_checkpoints["ltx-2.3"])
    assert silent.encoders.text_cache_key() == checkpoint.encoders.text_cache_key()


def test_a_header_says_that_sound_was_trained(tiny_checkpoints: dict[str, Path]) -> None:
    path = tiny_checkpoints["ltx-2.3"]
    checkpoint = with_sound(path, "t2v")
    assert checkpoint.info.training_metadata() == {"sound": True}
    assert opened(path).info.training_metadata() == {}
    assert opened(path).copy_with_training_metadata(checkpoint.info.training_metadata()).info.has_sound
    assert not opened(path).copy_with_training_metadata({}).info.has_sound


def test_samples_have_the_sound_that_was_trained(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The pipeline's own, bit by bit, beside the same video; without sound there is none."""
    path, sampling = tiny_checkpoints["ltx-2.3"], Sampling(NATIVE, 2, 3.0, seed=5, fps=FPS)
    checkpoint = with_sound(path, "t2v")
    pipeline, stock = checkpoint.sampler.pipeline(torch.float32), checkpoint.sampler.pipeline(torch.float32)
    for pipe in (pipeline, stock):
        pipe.set_progress_bar_config(disable=True)
    prompt_kwargs = checkpoint.sampler.prompt_kwargs(CAPTIONS[1])
    video, sound = checkpoint.sampler.generate_with_sound(pipeline, prompt_kwargs, sampling)
    expected = stock(
        **prompt_kwargs,
        **checkpoint.sampler.shape_kwargs(NATIVE),
        num_inference_steps=2,
        guidance_scale=3.0,
        generator=torch.Generator("cpu").manual_seed(5),
        output_type="np",
    )
    assert torch.equal(sound.waveform, expected.audio[0])
    assert sound.waveform.std() > 0
    assert sound.rate == stock.vocoder.config.output_sampling_rate
    assert torch.equal(video, checkpoint.sampler.generate(pipeline, prompt_kwargs, sampling))
    samples, none = opened(path).sampler.generate_with_sound(pipeline, prompt_kwargs, sampling)
    assert none is None
    assert torch.equal(video, samples)


@pytest.mark.parametrize("sound", [True, False])
def test_the_command_writes_the_sound_of_an_adapter_that_has_some(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, sound: bool
) -> None:
    path = tiny_checkpoints["ltx-2.3"]
    checkpoint = with_sound(path, "t2v") if sound else for_recipe(path)
    model = checkpoint.denoiser.load_transformer(torch.float32)
    targets = checkpoint.info.lora_targets(get_family("ltx2").lora_targets)
    attach_lora(model, LoraConfig(rank=2), targets, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_lora_b(name):
                parameter.fill_(0.01)
    video = {"frames": NATIVE.frames, "height": NATIVE.height, "width": NATIVE.width, "fps": FPS}
    metadata = {
        "family": "ltx2",
        "base_model": path.name,
        "transformer_digest": "",
        "video": video,
        **checkpoint.info.training_metadata(),
    }
    save_adapter(model, checkpoint.info.pipeline_class, tmp_path, metadata)
    request = SampleRequest(tmp_path, ("a",), model=str(path), inference_steps=2, guidance_scale=1.0)
    (file,) = write_samples(request)
    with av.open(file) as container:
        tracks = container.streams.audio
        assert len(tracks) == sound
        if sound:
            seconds = float(tracks[0].duration * tracks[0].time_base)
            assert seconds == pytest.approx(NATIVE.frames / FPS, abs=0.1)
