"""LTX-2 in context: positions and timesteps of reference tokens, no loss on them, and rejected recipes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from exported import trained
from family_cases.subject import CPU, pixels_of
from ltx2_cases import CAPTIONS, FPS, for_recipe, opened
from PIL import Image
from safetensors import safe_open

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, save_adapter
from dit_lora.config.data import VideoShape
from dit_lora.data.media.video import write_sample
from dit_lora.errors import DitLoraError
from dit_lora.export.export import ExportFormat, ExportRequest, export
from dit_lora.families.base import Sampling
from dit_lora.families.latents import LOSS_MASK
from dit_lora.numerics.streams import RandomStreams
from dit_lora.training.tasks.diffusion.cache_plan import DecodedSample

SHAPE = VideoShape(9, 64, 128)
TOKENS, HALVED = 2 * 2 * 4, 2 * 1 * 2
TASK = {"task": "ic_lora"}


def in_context(path: Path, side: int | None = 48) -> Any:
    """Open it as a recipe trains it; at 48, references are half as high and wide."""
    data = {"frames": 9, "width": 128, "reference_resolution": side}
    return for_recipe(path, model=TASK, data=data)


def batch_of(checkpoint: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    encode_video = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    rows = []
    for caption in CAPTIONS:
        sample = DecodedSample(pixels_of(SHAPE, generator), references=(pixels_of(SHAPE, generator),))
        text = {name: tensor[0] for name, tensor in encode_text([caption]).items()}
        rows.append(sample.encode_sample(encode_video, SHAPE) | text)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize(("side", "factor"), [(None, 1), (48, 2)])
def test_our_loss_is_that_of_diffusers_transformer_on_the_videos_tokens(
    tiny_checkpoints: dict[str, Path], side: int | None, factor: int
) -> None:
    """With places written down here: the reference's lie in the video's own pixels, however small it is."""
    path = tiny_checkpoints["ltx-2.3"]
    checkpoint = in_context(path, side)
    batch, streams = batch_of(checkpoint), RandomStreams(3, [1, 2, 3])
    batch[LOSS_MASK] = torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(4))
    random_inputs = streams.draw_random_tensors(checkpoint.denoiser.get_random_input_samplers(batch), CPU)
    transformer: Any = LTX2VideoTransformer3DModel.from_pretrained(path, subfolder="transformer")
    clean, reference = (batch[name].flatten(2).mT for name in ("latent_mean", "reference_0"))
    assert reference.shape[1] == TOKENS // factor**2
    sigma = random_inputs["timestep"]
    noisy = clean + sigma[:, None, None] * (random_inputs["noise"] - clean)
    positions = []
    for sides, size in (((2, 4), 32), ((2 // factor, 4 // factor), 32 * factor)):
        for time in ((0.0, 1.0), (1.0, 9.0)):
            for row in range(sides[0]):
                for column in range(sides[1]):
                    down, across = ((size * at, size * (at + 1)) for at in (row, column))
                    positions.append([[moment / FPS for moment in time], down, across])
    token_timesteps = torch.cat([(1000 * sigma)[:, None].expand(-1, TOKENS), torch.zeros(reference.shape[:2])], 1)
    with torch.no_grad():
        video, _ = transformer(
            torch.cat([noisy, reference], dim=1), torch.zeros(3, 1, 16), batch["prompt_embeds"],
            batch["audio_prompt_embeds"][:, :1], token_timesteps, 1000 * sigma, sigma=1000 * sigma,
            num_frames=2, height=2, width=4, fps=FPS, audio_num_frames=1,
            video_coords=torch.tensor(positions).transpose(0, 1)[None].expand(3, -1, -1, -1),
            isolate_modalities=True, use_cross_timestep=True, return_dict=False,
        )  # fmt: skip
        ours = checkpoint.denoiser.losses(checkpoint.denoiser.load_transformer(torch.float32), batch, streams).losses
    weights = batch[LOSS_MASK][:, None].expand(-1, 2, -1, -1).flatten(1)
    errors = (video[:, :TOKENS] - (random_inputs["noise"] - clean)).square().mean(-1) * weights
    torch.testing.assert_close(ours, errors.sum(1) / weights.sum(1), rtol=1e-5, atol=0)


def test_no_gradient_comes_from_the_references_tokens(tiny_checkpoints: dict[str, Path]) -> None:
    checkpoint = in_context(tiny_checkpoints["ltx-2.3"])
    model = checkpoint.denoiser.load_transformer(torch.float32).requires_grad_(False)
    outputs: list[torch.Tensor] = []

    def keep(_model: Any, _given: Any, output: Any) -> Any:
        outputs.append(output[0].detach().requires_grad_())
        return outputs[0], output[1]

    model.register_forward_hook(keep)
    checkpoint.denoiser.losses(model, batch_of(checkpoint), RandomStreams(0, [0, 1, 2])).losses.sum().backward()
    (gradient,) = (tensor.grad for tensor in outputs)
    assert gradient is not None
    assert gradient.shape[1] == TOKENS + HALVED
    assert (gradient[:, :TOKENS].abs().sum(-1) > 0).all()
    assert not gradient[:, TOKENS:].any()


def test_the_reference_is_seen(tiny_checkpoints: dict[str, Path]) -> None:
    checkpoint = in_context(tiny_checkpoints["ltx-2.3"])
    model, batch = checkpoint.denoiser.load_transformer(torch.float32), batch_of(checkpoint)
    changed_batch = {**batch, "reference_0": batch["reference_0"].roll(1, 0)}
    with torch.no_grad():
        first_losses, second = (
            checkpoint.denoiser.losses(model, tensors, RandomStreams(0, [0, 1, 2])).losses
            for tensors in (batch, changed_batch)
        )
    assert (first_losses != second).all()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "it has 0 references, and this model takes 1"),
        (("one.mp4", "one.mp4"), "it has 2 references, and this model takes 1"),
        (("one.png",), r"one.png: no clip; the reference of a clip is a clip"),
        (("short.mp4",), "short.mp4: too short"),
    ],
)
def test_what_is_no_one_clip_is_refused_for_samples(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    for name, frames in (("one", 9), ("short", 3)):
        write_sample(tmp_path / name, torch.zeros(frames, 64, 64, 3, dtype=torch.uint8), FPS)
    Image.new("RGB", (64, 64)).save(tmp_path / "one.png")
    sampling = Sampling(SHAPE, 2, 1.0, seed=0, fps=FPS)
    files = tuple(tmp_path / name for name in names)
    checkpoint = opened(tiny_checkpoints["ltx-2.3"], **TASK)
    with pytest.raises(DitLoraError, match=words):
        checkpoint.sampler.reference_kwargs(replace(sampling, references=files))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "of 'a': it has 0 references"),
        ([["a.mp4", "b.mp4"]], "of 'a': it has 2 references"),
        (["a.png"], "of 'a': no clip: a.png"),
    ],
)
def test_a_recipes_prompts_have_a_clip_each(tiny_checkpoints: dict[str, Path], files: list[Any], words: str) -> None:
    validation = {"prompts": ["a"], "references": files}
    with pytest.raises(DitLoraError, match=words):
        for_recipe(tiny_checkpoints["ltx-2.3"], model=TASK, validation=validation)


def test_references_that_would_not_be_whole_tokens_are_refused(
    tiny_checkpoints: dict[str, Path],
) -> None:
    data = {"reference_resolution": 48}
    with pytest.raises(DitLoraError, match="whose sides must then be multiples of 64"):
        for_recipe(tiny_checkpoints["ltx-2.3"], model=TASK, data=data)


@pytest.mark.parametrize(("family", "variant"), [("wan", "wan-2.2-ti2v-5b"), ("ltx_video", "ltx-video")])
def test_other_families_have_no_reference_clips(tiny_checkpoints: dict[str, Path], family: str, variant: str) -> None:
    path = tiny_checkpoints[variant]
    with pytest.raises(DitLoraError, match=f"ic_lora: family {family} does not use ref"):
        for_recipe(path, model={"family": family, "path": str(path), **TASK})


def test_a_result_says_its_pipeline(tiny_checkpoints: dict[str, Path]) -> None:
    checkpoint = in_context(tiny_checkpoints["ltx-2.3"])
    assert checkpoint.info.model_index_changes() == {"_class_name": "LTX2InContextPipeline"}
    assert checkpoint.info.training_metadata()["reference_resolution"] == 48
    assert checkpoint.info.training_metadata()["reference_downscale_factor"] == 2
    assert in_context(tiny_checkpoints["ltx-2.3"], None).info.training_metadata() == {"reference_downscale_factor": 1}
    assert "reference_downscale_factor" not in opened(tiny_checkpoints["ltx-2.3"], **TASK).info.training_metadata()
    assert checkpoint.sampler.shape_kwargs(SHAPE)["reference_downscale_factor"] == 2


@pytest.mark.parametrize("form", ["diffusers", "comfyui"])
def test_other_programs_read_the_downscale_from_the_header(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, form: ExportFormat
) -> None:
    """Lightricks' pipeline and ComfyUI-LTXVideo look for this name, and a number in text."""
    base, checkpoint = tiny_checkpoints["ltx-2.3"], in_context(tiny_checkpoints["ltx-2.3"])
    model = trained("ltx2", base, tmp_path / "plain").model
    metadata = {"family": "ltx2", "task": "ic_lora", **checkpoint.info.training_metadata()}
    save_adapter(model, checkpoint.info.pipeline_class, tmp_path / "run", metadata)
    export(ExportRequest((tmp_path / "run",), form, tmp_path / "out", model=str(base)))
    (file,) = (tmp_path / "out").glob("*.safetensors")
    for adapter_file in (tmp_path / "run" / ADAPTER_FILE, file):
        with safe_open(adapter_file, framework="pt") as opened_file:
            assert opened_file.metadata()["reference_downscale_factor"] == "2"
