"""The published configs of video chat models: sizes, LoRA sizes, and tokens of a picture."""

from typing import Any

import pytest
import torch
from launching import ROOT
from transformers import AutoConfig, AutoModelForImageTextToText

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.recipe import LoraConfig
from dit_lora.families.chat import FAMILY
from dit_lora.families.chat.checkpoint import LAYOUTS

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
# Parameters of the model; tokens of 8 frames of 720p and of one such image, where a frame has this side squared.
PUBLISHED: dict[str, tuple[int, int, int, int]] = {
    "LLaVA-NeXT-Video-7B-hf": (7_063_431_168, 336, 8 * 144, 576 + 28 * 49),
    "LLaVA-NeXT-Video-7B-32K-hf": (7_566_747_648, 336, 8 * 144, 576 + 28 * 49),
    "Qwen2.5-VL-3B-Instruct": (3_754_622_976, 448, 4 * 12 * 21, 12 * 21),
    "Qwen2.5-VL-7B-Instruct": (8_292_166_656, 448, 4 * 12 * 21, 12 * 21),
    "Qwen3-VL-2B-Instruct": (2_127_532_032, 512, 4 * 12 * 21, 12 * 21),
    "SmolVLM2-2.2B-Instruct": (2_246_784_880, 384, 8 * 81, 81),
    "SmolVLM2-500M-Video-Instruct": (507_482_304, 512, 8 * 64, 64),
    "InternVL3-1B-hf": (938_193_024, 448, 8 * 256, 256),
}
# Of LoRA at rank 16 on the language model.
TRAINED = {"LLaVA-NeXT-Video-7B-hf": 39_976_960, "SmolVLM2-500M-Video-Instruct": 8_683_520}


class _Tokenizer:
    """Names every token by its number."""

    def __len__(self) -> int:
        return 10**6

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"[{token}]"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(text[1:-1])]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_as_large_as_published(name: str) -> None:
    parameters, side, of_video, of_image = PUBLISHED[name]
    config: Any = AutoConfig.from_pretrained(CONFIGS / name)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
        assert sum(p.numel() for p in model.parameters()) == parameters
        if name in TRAINED:
            lora = LoraConfig(rank=16)
            adapter_report = attach_lora(
                model, lora, FAMILY.lora_targets, seed=0, submodules=FAMILY.lora_parent_modules
            )
            assert adapter_report.num_adapted == 7 * config.text_config.num_hidden_layers
            assert adapter_report.num_parameters == TRAINED[name]
    # Pictures by the defaults, but for Qwen3-VL's videos, whose file gives frames more room.
    layout = LAYOUTS[config.model_type](config, CONFIGS / name, _Tokenizer())
    names = (config.image_token_id, getattr(config, "video_token_id", None))
    for frames, expected in ((8, of_video), (1, of_image)):
        shape = layout.shape(frames, 720, 1280, (side, side))
        text = layout.build_media_token_text(shape, [float(second) for second in range(frames)])
        assert max(text.count(f"[{layer_name}]") for layer_name in names) == expected
