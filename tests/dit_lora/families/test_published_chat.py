"""The published configs of video chat models: sizes, LoRA sizes, and tokens of a picture."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT
from transformers import AutoConfig, AutoModelForImageTextToText

from dit_lora.adapters.attach import attach_lora
from dit_lora.config import LoraConfig
from dit_lora.data_config import VideoShape
from dit_lora.families.chat import FAMILY, LAYOUTS
from dit_lora.families.chat_layouts import Layout

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
# Parameters of the model; of LoRA at rank 16 on the language model, computed; tokens of 8 frames of 720p at
# data.height x data.width of the fourth, and of one 720p image.
PUBLISHED: dict[str, tuple[int, int, int, int, int]] = {
    "LLaVA-NeXT-Video-7B-hf": (7_063_431_168, 39_976_960, 336, 8 * 144, 2144),
    "LLaVA-NeXT-Video-7B-32K-hf": (7_566_747_648, 41_943_040, 336, 8 * 144, 2144),
    "Qwen2.5-VL-3B-Instruct": (3_754_622_976, 29_933_568, 448, 4 * 12 * 20, 240),
    "Qwen2.5-VL-7B-Instruct": (8_292_166_656, 40_370_176, 448, 4 * 12 * 20, 240),
    "Qwen3-VL-2B-Instruct": (2_127_532_032, 17_432_576, 512, 4 * 12 * 21, 252),
    "SmolVLM2-2.2B-Instruct": (2_246_784_880, 18_087_936, 384, 8 * 81, 81),
    "SmolVLM2-500M-Video-Instruct": (507_482_304, 8_683_520, 512, 8 * 64, 64),
    "InternVL3-1B-hf": (938_193_024, 8_798_208, 448, 8 * 256, 256),
}


class _Tokenizer:
    """Names every token by its number."""

    def __len__(self) -> int:
        return 10**6

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"[{token}]"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(text[1:-1])]


def layout_of(config: Any, tmp_path: Path) -> Layout:
    """With the defaults of what a checkpoint's other files would say."""
    return LAYOUTS[config.model_type](config, tmp_path, _Tokenizer())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_as_large_as_published(name: str, tmp_path: Path) -> None:
    parameters, trained, side, of_video, of_image = PUBLISHED[name]
    config = AutoConfig.from_pretrained(CONFIGS / name)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
        assert sum(p.numel() for p in model.parameters()) == parameters
        said = attach_lora(
            model, LoraConfig(rank=16), FAMILY.lora_targets, seed=0, within=FAMILY.lora_within
        )
    assert said.parameters == trained
    assert said.adapted == 7 * config.text_config.num_hidden_layers
    layout = layout_of(config, tmp_path)
    seconds = [float(second) for second in range(8)]
    for frames, expected in ((8, of_video), (1, of_image)):
        shape = layout.shape(frames, 720, 1280, (side, side))
        assert isinstance(shape, VideoShape)
        text = layout.expansion(shape, seconds)
        names = (config.image_token_id, getattr(config, "video_token_id", None))
        assert max(text.count(f"[{one}]") for one in names) == expected
