"""Chat models of Transformers, tiny and random, with a batch padded on the right as training gives it.

Shapes: B batch, L tokens (padded), A answer tokens (padded), F frames.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dit_lora.numerics.objectives import IGNORE_INDEX

IMAGE, VIDEO = 62, 63
FRAMES, SIDE = 2, 8
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LENGTHS, ANSWERS = (14, 11, 17), (5, 3, 6)
"""Tokens of each sample, and how many of them, at the end, are its answer."""


@dataclass
class Sample:
    """One conversation, not padded: the stock model's arguments, B = 1, and labels (1, L)."""

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor


def mistral(**changes: Any) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**{**TEXT, "head_dim": 8, **changes}))


def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlavaNextVideoConfig, MistralConfig
    from transformers import LlavaNextVideoForConditionalGeneration as Model

    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=2,
        projection_dim=16,
    )
    config = LlavaNextVideoConfig(
        vision_config=vision,
        text_config=MistralConfig(**TEXT, head_dim=8),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grid_pinpoints=[[SIDE, SIDE]],
    )
    torch.manual_seed(0)
    return Model(config)


def qwen() -> nn.Module:
    from transformers import Qwen2_5_VLConfig
    from transformers import Qwen2_5_VLForConditionalGeneration as Model

    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": SIDE,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=60,
        vision_end_token_id=61,
    )
    torch.manual_seed(0)
    return Model(config)


def videochat2() -> nn.Module:
    from transformers import MistralConfig

    from dit_lora.models.videochat2.configuration import VideoChat2Config
    from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration as Model

    vision = {
        "image_size": SIDE,
        "patch_size": 4,
        "hidden_size": 16,
        "num_hidden_layers": 3,  # of which two are built
        "num_attention_heads": 2,
        "mlp_ratio": 2,
        "num_frames": FRAMES,
        "pretrained_frames": FRAMES,
    }
    qformer = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 30,
    }
    config = VideoChat2Config(
        vision_config=vision,
        qformer_config=qformer,
        text_config=MistralConfig(**TEXT, head_dim=8),
        num_query_tokens=2,
        num_extra_query_tokens=2,
        media_token_id=TEXT["vocab_size"],
        tile_size=SIDE,
    )
    torch.manual_seed(0)
    return Model(config)


MODELS = {"mistral": mistral, "llava": llava, "qwen": qwen, "videochat2": videochat2}
_MEDIA = {
    "mistral": 0,
    "llava": FRAMES * (SIDE // 2 // 2) ** 2,
    "qwen": (SIDE // 2 // 2) ** 2,
    "videochat2": 4,
}
"""Tokens of a video: Llava pools 2 x 2 patches of a frame, Qwen merges them of two, VideoChat2 has queries."""


def samples(name: str) -> list[Sample]:
    """One conversation of each length, about a video of its own."""
    random = torch.Generator().manual_seed(1)
    conversations = []
    for length, answers in zip(LENGTHS, ANSWERS, strict=True):
        ids = torch.randint(3, 60, (1, length), generator=random)
        ids[:, 1 : 1 + _MEDIA[name]] = 64 if name == "videochat2" else VIDEO
        labels = ids.masked_fill(torch.arange(length) < length - answers, IGNORE_INDEX)
        conversations.append(Sample({"input_ids": ids, **_video(name, ids, random)}, labels))
    return conversations


def _video(name: str, ids: torch.Tensor, random: torch.Generator) -> dict[str, torch.Tensor]:
    if name == "llava":
        pixels = torch.randn(1, FRAMES, 3, SIDE, SIDE, generator=random)
        return {"pixel_values_videos": pixels}
    if name == "qwen":
        grid = (FRAMES // 2, SIDE // 2, SIDE // 2)
        patches = torch.randn(grid[0] * grid[1] * grid[2], 3 * 2 * 2 * 2, generator=random)
        types = torch.where(ids == VIDEO, 2, 0)
        return {
            "pixel_values_videos": patches,
            "video_grid_thw": torch.tensor([grid]),
            "mm_token_type_ids": types,
        }
    if name == "videochat2":
        instruction = torch.randint(1, 30, (1, 5), generator=random)
        instruction_mask = torch.arange(5)[None] < instruction[0, 0] % 4 + 2
        return {
            "pixel_values": torch.randn(1, FRAMES, 3, SIDE, SIDE, generator=random),
            "instruction_ids": instruction,
            "instruction_mask": instruction_mask.long(),
        }
    return {}


def batch(found: list[Sample]) -> dict[str, torch.Tensor]:
    """The samples together, padded on the right, without a mask and with the answers beside them."""
    inputs = {name: _padded([sample.inputs[name] for sample in found], 0) for name in found[0].inputs}
    max_answer = max(ANSWERS)
    answer_positions = [(sample.labels[0] != IGNORE_INDEX).nonzero()[:, 0] for sample in found]
    labels = [sample.labels[:, at] for sample, at in zip(found, answer_positions, strict=True)]
    positions = [nn.functional.pad(at - 1, (0, max_answer - len(at)))[None] for at in answer_positions]
    return inputs | {
        "answer_positions": torch.cat(positions),
        "answer_labels": _padded(labels, IGNORE_INDEX),
    }


def _padded(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
    """Tokens padded to the longest of them; what has the same size in each sample, as it is."""
    longest = max(tensor.shape[1] for tensor in tensors)
    return torch.cat(
        [nn.functional.pad(t, (0, longest - t.shape[1]), value=value) if t.ndim == 2 else t for t in tensors]
    )


def mask(found: list[Sample]) -> torch.Tensor:
    """Ones where there is a token, int64 (B, L)."""
    lengths = torch.tensor([sample.inputs["input_ids"].shape[1] for sample in found])
    return (torch.arange(int(lengths.max())) < lengths[:, None]).long()
