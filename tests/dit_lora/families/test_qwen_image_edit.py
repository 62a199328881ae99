"""Qwen-Image-Edit: captions with images, the empty caption with its sample's images, token limits and guidance."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from family_cases.qwen_image import small_references
from family_cases.subject import CPU, pixels_of
from launching import ROOT
from PIL import Image

from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe, parse_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.references import read_reference
from dit_lora.data.media.video import ClipError
from dit_lora.data.synthetic.pairs import write_edit_pairs
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.families.qwen_image.picture_text import (
    count_image_tokens,
    load_image_processor,
    max_image_tokens,
)
from dit_lora.planning.search import open_estimator
from dit_lora.training.session.session import start_run_session
from dit_lora.training.tasks.diffusion.precompute import DiffusionTrainingData, precompute

VARIANTS = ("qwen-image-edit", "qwen-image-edit-plus")
SHAPE = VideoShape(1, 64, 96)
Run = Callable[..., DiffusionTrainingData]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_references(monkeypatch)


def open_at(path: Path) -> Any:
    return get_family("qwen_image").open(ModelConfig(family="qwen_image", path=str(path)))


def recipe_of(values: dict[str, Any], model: Path, **data: Any) -> Any:
    changed = json.loads(json.dumps(values))
    changed["model"] = {"family": "qwen_image", "path": str(model)}
    changed["data"] = {"path": ".", "height": 64, "width": 64, "frames": 1} | data
    changed["validation"] = {}
    return parse_recipe(changed, "test")


@pytest.fixture
def cached(recipe_values: dict[str, Any], tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Run:
    """Encode two pairs, whose captions are the same, or have them encoded as they come."""
    write_edit_pairs(tmp_path / "pairs", pairs=2, height=64, width=64)

    def run(variant: str, **data: Any) -> DiffusionTrainingData:
        data_folders = {"path": str(tmp_path / "pairs"), "cache": str(tmp_path / "cache")}
        recipe = recipe_of(recipe_values, tiny_checkpoints[variant], **data_folders, **data)
        AcceleratorState._reset_state(reset_partial_state=True)
        with start_run_session(recipe) as session:
            checkpoint = get_family("qwen_image").open(recipe.model, recipe)
            return precompute(session, checkpoint)

    return run


@pytest.mark.parametrize("variant", VARIANTS)
def test_guidance_is_away_from_the_empty_prompt_with_the_same_pictures(
    tiny_checkpoints: dict[str, Path], variant: str, tmp_path: Path
) -> None:
    """A prompt as words, which the pipeline encodes with its pictures, and as validation has it: the same bits."""
    checkpoint = open_at(tiny_checkpoints[variant])
    files = (tmp_path / "0.png", tmp_path / "1.png")[: checkpoint.info.max_references]
    for file, size in zip(files, ((57, 80), (96, 64)), strict=False):
        pixels = pixels_of(VideoShape(1, *size), torch.Generator().manual_seed(size[0]))
        Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(file)
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    references = [read_reference(MediaFile(file), None, None) for file in files]
    prompt, empty, other_prompt = (
        encode.encode_with_references(caption, pictures, SHAPE)
        for caption, pictures in (
            ("a cat", references),
            ("", references),
            ("", [255 - p for p in references]),
        )
    )
    sampling = Sampling(SHAPE, inference_steps=2, guidance_scale=4.0, seed=3, references=files)
    full_pipeline = checkpoint.sampler.pipeline(torch.float32)
    textless_pipeline = checkpoint.sampler.pipeline(torch.float32, full_pipeline.transformer, text=False)
    assert textless_pipeline.processor is None
    for pipeline in (full_pipeline, textless_pipeline):
        pipeline.set_progress_bar_config(disable=True)
    video_of_text = checkpoint.sampler.generate(full_pipeline, checkpoint.sampler.prompt_kwargs("a cat"), sampling)
    assert torch.equal(
        checkpoint.sampler.generate(textless_pipeline, checkpoint.sampler.prompt_kwargs(prompt, empty), sampling),
        video_of_text,
    )
    other_video = checkpoint.sampler.generate(
        textless_pipeline, checkpoint.sampler.prompt_kwargs(prompt, other_prompt), sampling
    )
    assert not torch.equal(other_video, video_of_text)


@pytest.mark.parametrize("variant", [VARIANTS[0], pytest.param(VARIANTS[1], marks=pytest.mark.thorough)])
def test_a_dropped_caption_is_the_empty_one_with_the_samples_own_picture(
    cached: Run, tiny_checkpoints: dict[str, Path], variant: str, tmp_path: Path
) -> None:
    """From cache, and encoded as they come: the same tensors in the same batches."""
    cached_clips = cached(variant, caption_dropout=0.5).training_set
    live = cached(variant, caption_dropout=0.5, precompute=False).training_set
    encode = open_at(tiny_checkpoints[variant]).encoders.load_text_encoder(torch.float32, CPU)
    for entry in cached_clips.entries:
        before = tmp_path / "pairs" / "before" / Path(entry.id).name
        reference = read_reference(MediaFile(before), None, None)
        assert entry.empty_text_key not in (None, entry.text_key)
        for key, caption in ((entry.empty_text_key, ""), (entry.text_key, None)):
            text = caption if caption is not None else before_text(before)
            expected = encode.encode_with_references(text, [reference], SHAPE)
            for clips in (cached_clips, live):
                tensors, fault = clips.texts.read(key, clips.texts.read_first_entry_spec([key]))
                assert fault is None
                assert set(tensors) == set(expected)
                assert all(torch.equal(tensors[n], expected[n][0]) for n in tensors)
    assert len({entry.empty_text_key for entry in cached_clips.entries}) == 2
    assert [entry.empty_text_key for entry in live.entries] == [entry.empty_text_key for entry in cached_clips.entries]
    assert all(entry.empty_text_key is None for entry in cached(variant).training_set.entries)


def test_a_caption_that_does_not_fit_is_told_by_its_samples_name(cached: Run, tmp_path: Path) -> None:
    """Before the first step, or as it comes without a cache: its place is kept, and what is wrong is said."""
    lines = (tmp_path / "pairs" / "metadata.jsonl").read_text().splitlines()
    row = {**json.loads(lines[1]), "text": "Q" * 600}
    (tmp_path / "pairs" / "metadata.jsonl").write_text(f"{lines[0]}\n{json.dumps(row)}\n")
    message = r"its caption has \d+ tokens with its pictures, and there is room for 528"
    with pytest.raises(DitLoraError, match=rf"(?s)after/001\.png.*{message}"):
        cached(VARIANTS[0])
    clips = cached(VARIANTS[0], precompute=False).training_set
    good, long = (clips.texts.read(entry.text_key, clips.text_spec) for entry in clips.entries)
    assert good[1] is None
    assert re.search(message, str(long[1]))
    assert long[0]["prompt_embeds"].isnan().all()
    assert {n: t.shape for n, t in long[0].items()} == {n: t.shape for n, t in good[0].items()}


def test_a_plan_counts_what_encoders_make(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """References at the pipeline's size and captions at their full length, without running an encoder."""
    path = ROOT / "recipes" / "smoke" / "qwen_image_edit.yaml"
    base = tiny_checkpoints[VARIANTS[1]]
    subject = open_estimator(load_recipe(path, [f"model.path={base}", "data.path=/nowhere"]), is_gpu=False)
    (shape,) = subject.shapes
    references = [pixels_of(VideoShape(1, 64, 64), torch.Generator().manual_seed(0))]
    pictures: Any = open_at(base).encoders.load_video_encoder(torch.float32, CPU)
    texts = open_at(base).encoders.load_text_encoder(torch.float32, CPU).encode_with_references("", references, shape)
    encoding = {**pictures(references[0]), **pictures.encode_references(references, shape)}
    encoding |= {name: tensor[0] for name, tensor in texts.items()}
    assert subject.get_spec(shape) == {n: (t.shape, t.dtype) for n, t in encoding.items()}
    assert subject.caption_encoder is not None


def before_text(before: Path) -> str:
    return (before.parent.parent / "after" / before.with_suffix(".txt").name).read_text().strip()


def test_mirrored_samples_are_refused_in_one_line(
    recipe_values: dict[str, Any], tiny_checkpoints: dict[str, Path]
) -> None:
    for variant in VARIANTS:
        recipe = recipe_of(recipe_values, tiny_checkpoints[variant], flip=True)
        with pytest.raises(DitLoraError) as refused:
            open_at(tiny_checkpoints[variant]).apply_recipe(recipe)
        _, line = str(refused.value).splitlines()
        assert "data.flip: captions are encoded with the references, and a mirrored one would" in line


def test_a_side_of_references_is_refused_since_the_pipeline_scales_them(
    recipe_values: dict[str, Any], tiny_checkpoints: dict[str, Path]
) -> None:
    path = tiny_checkpoints["qwen-image-edit"]
    recipe = recipe_of(recipe_values, path, reference_resolution=512)
    with pytest.raises(DitLoraError, match="reference_resolution: its pipeline scales them by its"):
        open_at(path).apply_recipe(recipe)


@pytest.mark.parametrize("variant", VARIANTS)
def test_captions_have_the_room_that_is_said_and_are_never_cut(
    tiny_checkpoints: dict[str, Path], variant: str
) -> None:
    """Beside as many pictures as there may be; one token more is refused, as the pipeline would encode it whole."""
    checkpoint = open_at(tiny_checkpoints[variant])
    number = checkpoint.info.max_references
    references = [pixels_of(VideoShape(1, 64, 64), torch.Generator().manual_seed(i)) for i in range(number)]
    encode, limit = checkpoint.encoders.load_text_encoder(torch.float32, CPU), checkpoint.encoders.load_text_limit()
    room, _ = checkpoint.encoders.text_spec(torch.float32)["prompt_embeds"]
    # The tiny processor scales pictures to 16 tokens at most, and to fewer what the text encoder of Plus is shown.
    side = 128 if number == 1 else 64
    spare = room[0] - checkpoint.info.text_tokens
    spare -= number * count_image_tokens(load_image_processor(checkpoint.path), side, side)
    fits = encode.encode_with_references("Q" * (limit.max_tokens + spare), references, SHAPE)
    assert fits["prompt_embeds"].shape[1:] == room
    assert fits["prompt_mask"].all()
    count = rf"its caption has {room[0] + 1} tokens with its pictures, and there is room for {room[0]}"
    with pytest.raises(ClipError, match=count):
        encode.encode_with_references("Q" * (limit.max_tokens + spare + 1), references, SHAPE)
    with pytest.raises(DitLoraError, match="encodes a caption with its references"):
        encode(["a cat"])


def test_references_are_refused_by_number_and_by_sides(tiny_checkpoints: dict[str, Path]) -> None:
    single, three = (open_at(tiny_checkpoints[variant]).info.reference_spec for variant in VARIANTS)
    assert single.reference_count_error(2) == "it has 2 references, and this model takes 1"
    assert three.reference_count_error(0) == "it has 0 references, and this model takes 1 to 3"
    assert three.reference_count_error(3) is None
    assert single.unsupported_reason(80, 640) is None
    assert single.unsupported_reason(640, 79) == "it is 79 x 640, and one side may be 8 times the other"


@pytest.mark.parametrize("area", [1024 * 1024, 384 * 384])
def test_no_picture_has_more_tokens_than_there_is_room_for(
    tiny_checkpoints: dict[str, Path], area: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures of any ratio up to 8 are scaled by the pipeline's own function; some picture fills the room."""
    monkeypatch.undo()
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    pictures = load_image_processor(tiny_checkpoints["qwen-image-edit"])
    pictures.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
    counts = []
    for step in range(-2000, 2001):
        width, height = calculate_dimensions(area, 8 ** (step / 2000))
        counts.append(count_image_tokens(pictures, height, width))
    assert max(counts) == max_image_tokens(pictures, area)
    assert count_image_tokens(pictures, 1024, 1024) == 37 * 37
