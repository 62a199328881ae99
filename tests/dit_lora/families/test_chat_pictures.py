"""Sizes, tensors and tokens of pictures, against the stock processors of Transformers."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from video_text_cases import VARIANTS, conversation, frame_times, opened, picture

from dit_lora.data.chat.conversation import Conversation, Turn
from dit_lora.errors import DitLoraError
from dit_lora.families.chat.layouts import spell_number
from dit_lora.families.chat.views import split_patches
from dit_lora.families.chat_base import VisionSettings

# Height and width as stored: even, odd, narrow, wide, smaller than a tile, large.
SIZES = ((90, 151), (201, 60), (57, 300), (31, 33), (720, 1280), (640, 480))


# Frames, stored size, and the size that Qwen3VLVideoProcessor's smart_resize gives at 96 x 96 pixels per frame,
# computed there.
QWEN3 = [
    (4, (90, 151), (64, 96)),
    (4, (201, 60), (160, 32)),
    (4, (20, 300), (32, 352)),
    (4, (33, 1000), (32, 512)),
    (5, (31, 33), (32, 32)),
    (5, (720, 1280), (64, 128)),
    (5, (640, 480), (96, 64)),
]


@pytest.fixture
def draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def random_sizes(count: int, most: int = 1400) -> list[tuple[int, int]]:
    sides = torch.randint(16, most, (count, 2), generator=torch.Generator().manual_seed(1))
    return [(int(height), int(width)) for height, width in sides]


def stock_options(checkpoint: Any) -> dict[str, Any]:
    """What the stock image processor is called with to keep to data.height x data.width."""
    kind, settings, layout = (
        checkpoint.config.model_type,
        checkpoint.vision_settings,
        checkpoint.layout,
    )
    budget = settings.height * settings.width
    if kind == "smolvlm":
        return {
            "size": {"longest_edge": min(layout.max_long_side, settings.height)},
            "return_row_col_info": True,
        }
    if kind == "internvl":
        return {"crop_to_patches": True, "max_patches": budget // layout.side**2}
    if kind.startswith("qwen"):
        return {"size": {"shortest_edge": layout.image_pixel_limits.min_pixels, "longest_edge": budget}}
    return {}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", SIZES)
def test_image_tensors_are_the_stock_processors(
    variant: str, size: tuple[int, int], tiny_checkpoints: dict[str, Path], draws: torch.Generator
) -> None:
    """Of a picture in the size that it is read in; what is scaled again differs by Pillow's two roundings."""
    from PIL import Image

    checkpoint = opened(tiny_checkpoints[variant])
    shape = checkpoint.shape("image", *size)
    assert shape is not None
    pixels = picture(shape.height, shape.width, draws)
    image = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs without torchvision
        try:
            stock: Any = AutoImageProcessor.from_pretrained(checkpoint.path, backend="pil")
        except ImportError:
            pytest.skip("this Transformers makes its image processors with torchvision alone")
    tensors = stock(images=[image], return_tensors="pt", **stock_options(checkpoint))
    talk = conversation("image", "What is it?", "A dog.")
    ids = torch.tensor([checkpoint.tokenize_conversation(talk, shape).ids])
    ours = checkpoint.build_model_inputs({"input_ids": ids, "pixels": pixels[None]})
    assert ours["pixel_values"].shape == tensors["pixel_values"].shape
    apart = (ours["pixel_values"] - tensors["pixel_values"]).abs()
    # Of SmolVLM's whole picture, Pillow's filter is Lanczos and this one bicubic.
    level = 1.01 / 255 / 0.22 * (16 if variant == "smolvlm2" else 2)
    assert apart.max() < level
    assert apart.mean() < level / 20
    for name in ("image_sizes", "image_grid_thw"):
        assert (name in ours) == (name in tensors)
        if name in ours:
            assert ours[name].tolist() == tensors[name].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_are_as_many_tokens_as_features(
    variant: str, tiny_checkpoints: dict[str, Path], draws: torch.Generator
) -> None:
    """The stock model raises where there are not."""
    checkpoint = opened(tiny_checkpoints[variant], frames=5)
    model = checkpoint.load_model(torch.float32)
    for size in SIZES:
        for kind in ("image", "video"):
            shape = checkpoint.shape(kind, *size)
            assert shape is not None
            times = frame_times(shape.frames) if kind == "video" else []
            talk = conversation(kind, "What is it?", "A dog.")  # type: ignore[arg-type]
            batch = {
                "input_ids": torch.tensor([checkpoint.tokenize_conversation(talk, shape, times).ids]),
                "pixels": picture(shape.height, shape.width, draws).expand(1, shape.frames, -1, -1, -1),
                "seconds": torch.tensor([times]),
            }
            with torch.no_grad():
                model(**checkpoint.build_model_inputs(batch))


def test_qwen2_5_sizes_are_smart_resizes(tiny_checkpoints: dict[str, Path]) -> None:
    checkpoint = opened(tiny_checkpoints["qwen2.5-vl"], frames=5)
    for height, width in random_sizes(200):
        expected = qwen2.smart_resize(height, width, 28, min_pixels=28 * 28, max_pixels=84 * 84)
        for kind in ("image", "video"):
            shape = checkpoint.shape(kind, height, width)
            assert shape is not None
            assert (shape.height, shape.width) == expected


@pytest.mark.parametrize(
    ("frames", "size", "expected"),
    QWEN3,
)
def test_qwen3_sizes_are_those_of_all_frames_together(
    frames: int,
    size: tuple[int, int],
    expected: tuple[int, int],
    tiny_checkpoints: dict[str, Path],
) -> None:
    shape = opened(tiny_checkpoints["qwen3-vl"], frames=frames).shape("video", *size)
    assert shape is not None
    assert (shape.frames, shape.height, shape.width) == (frames, *expected)


def test_a_budget_below_the_checkpoints_least_pixels_is_kept(
    tiny_checkpoints: dict[str, Path],
) -> None:
    checkpoint = opened(tiny_checkpoints["qwen2.5-vl"]).copy_with_vision_settings(VisionSettings(4, 28, 28))
    shape = checkpoint.shape("video", 480, 640)
    assert shape is not None
    assert (shape.height, shape.width) == (28, 28)
    huge = checkpoint.copy_with_vision_settings(VisionSettings(4, 2800, 2800)).shape("video", 480, 640)
    assert huge is not None
    assert huge.height * huge.width <= 112 * 112  # the checkpoint's own most


def test_a_picture_that_is_too_narrow_is_refused(tiny_checkpoints: dict[str, Path]) -> None:
    with pytest.raises(DitLoraError, match="8x1604 is too narrow"):
        opened(tiny_checkpoints["qwen3-vl"]).shape("image", 8, 1604)


def test_tiles_are_the_stock_processors_grids(tiny_checkpoints: dict[str, Path]) -> None:
    internvl, smolvlm = (opened(tiny_checkpoints[variant]) for variant in ("internvl", "smolvlm2"))
    wide = smolvlm.copy_with_vision_settings(VisionSettings(4, 128, 128))
    stock = SmolVLMImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 32})
    squares = [(side, side) for side in range(50, 130, 3)]  # one, or four tiles of the same ratio
    for size in random_sizes(200) + squares:
        columns, rows = get_optimal_tiled_canvas(size, (56, 56), 1, 4)
        shape = internvl.shape("image", *size)
        assert shape is not None
        assert (shape.height, shape.width) == (rows * 56, columns * 56)
    for size in random_sizes(100, most=200):
        image = stock.resize(np.zeros((3, *size), np.uint8), stock.size)
        expected = stock.resize_for_vision_encoder(image, 32).shape[-2:]
        shape = wide.shape("image", *size)
        assert shape is not None
        assert (shape.height, shape.width) == expected


def test_llava_images_are_as_large_as_their_canvas_allows(
    tiny_checkpoints: dict[str, Path],
) -> None:
    checkpoint = opened(tiny_checkpoints["llava-next-video"])
    sides = checkpoint.config.image_grid_pinpoints
    for size in random_sizes(200):
        canvas = select_best_resolution(size, sides)
        image = np.broadcast_to(np.uint8(0), (3, *size))
        shape = checkpoint.shape("image", *size)
        assert shape is not None
        patched_size = get_patch_output_size(image, canvas, "channels_first")
        assert (shape.height, shape.width) == tuple(patched_size)


def test_patches_hold_neighbours_one_after_the_other(draws: torch.Generator) -> None:
    """Against a loop; the third frame comes twice."""
    frames = torch.rand(2, 3, 3, 8, 12, generator=draws)
    patched = split_patches(frames, side=2, merge=2, frames_per_patch=2)
    rows = [
        frames[:, [min(2 * pair, 2), min(2 * pair + 1, 2)], :, y : y + 2, x : x + 2].transpose(1, 2).flatten(1)
        for pair in range(2)
        for top in range(0, 8, 4)
        for column in range(0, 12, 4)
        for y in (top, top + 2)
        for x in (column, column + 2)
    ]
    assert torch.equal(patched, torch.stack(rows, dim=1))


@pytest.mark.parametrize("variant", ["llava-next-video", "smolvlm2", "internvl"])
def test_frames_are_normalised_and_nothing_else(
    variant: str, tiny_checkpoints: dict[str, Path], draws: torch.Generator
) -> None:
    checkpoint = opened(tiny_checkpoints[variant])
    values = json.loads((checkpoint.path / "video_preprocessor_config.json").read_text())
    shape = checkpoint.shape("video", 480, 640)
    assert shape is not None
    size = (2, shape.frames, 3, shape.height, shape.width)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=draws)
    mean, std = (
        torch.tensor(values[name], dtype=torch.float64)[:, None, None] for name in ("image_mean", "image_std")
    )
    expected = (pixels.double() / 255 - mean) / std
    model_inputs = checkpoint.build_model_inputs({"input_ids": torch.zeros(2, 1, dtype=torch.int64), "pixels": pixels})
    name = "pixel_values_videos" if variant == "llava-next-video" else "pixel_values"
    tensor = model_inputs[name].reshape(expected.shape)
    torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=2e-6)


def test_frame_counts_are_spelled_as_num2words_does() -> None:
    spelled = {
        0: "zero",
        8: "eight",
        13: "thirteen",
        20: "twenty",
        64: "sixty-four",
        100: "one hundred",
        128: "one hundred and twenty-eight",
        999: "nine hundred and ninety-nine",
    }
    assert {number: spell_number(number) for number in spelled} == spelled


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("frames", [4, 5])
def test_video_tensors_and_tokens_are_the_stock_processors(
    variant: str, frames: int, tiny_checkpoints: dict[str, Path], draws: torch.Generator
) -> None:
    pytest.importorskip("torchvision", reason="Transformers' video processors need it")
    pytest.importorskip("num2words", reason="SmolVLM's processor needs it")
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    checkpoint = opened(tiny_checkpoints[variant], frames=frames)
    processor: Any = AutoProcessor.from_pretrained(checkpoint.path)
    shape = checkpoint.shape("video", 90, 151)
    assert shape is not None
    size = (frames, 3, shape.height, shape.width)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=draws)
    indices = [3 + 41 * frame for frame in range(frames)]
    seconds = [index / 25 for index in indices]
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What is it?"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    facts = VideoMetadata(total_num_frames=41 * frames, fps=25.0, duration=seconds[-1], frames_indices=list(indices))
    processed = processor(
        text=text,
        videos=[pixels],
        video_metadata=[facts],
        do_sample_frames=False,
        return_tensors="pt",
    )
    talk = Conversation("one", "video", None, (Turn("What is it?", ""),))
    prompt = checkpoint.tokenize_conversation(talk, shape, seconds, include_answer=False)
    ours = checkpoint.build_model_inputs(
        {
            "input_ids": torch.tensor([prompt.ids]),
            "pixels": pixels[None],
            "seconds": torch.tensor([seconds]),
        }
    )
    masks = {"attention_mask", "pixel_attention_mask"}  # all ones
    assert set(ours) == set(processed) - masks
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.double(), torch.as_tensor(processed[name]).double(), rtol=0, atol=1e-6)
