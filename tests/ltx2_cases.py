"""What the tests of LTX-2 share: changed checkpoints, recipes, and batches with sound."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from family_cases.ltx2 import NATIVE
from family_cases.subject import CPU, pixels_of

from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.families import get_family
from dit_lora.families.ltx2.sound import build_audio_encoder

CAPTIONS = ("clip 0", "a longer caption of another clip", "many words, " * 90)
FPS = 8.0


def opened(path: Path, **model: Any) -> Any:
    return get_family("ltx2").open(ModelConfig(family="ltx2", path=str(path), **model))


def changed(tiny: Path, out: Path, component: str, **values: Any) -> Path:
    """A copy of a checkpoint with other values in one config; of the index without a component."""
    shutil.copytree(tiny, out)
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    file = out / component / name if component else out / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return out


def for_recipe(path: Path, **sections: Any) -> Any:
    """Open the checkpoint as a recipe trains it, with these values over a plain one's."""
    model = {"family": "ltx2", "path": str(path), **sections.pop("model", {})}
    data = {"path": ".", "frames": NATIVE.frames, "height": 64, "width": 96, "fps": FPS}
    recipe = Recipe.model_validate(
        {
            "model": model,
            "data": {**data, **sections.pop("data", {})},
            "train": {"steps": 1, **sections.pop("train", {})},
            "run": {"dir": "unwritten"},
            **sections,
        }
    )
    return get_family(recipe.model.family).open(recipe.model, recipe)


def batch_of(checkpoint: Any, *, sound: bool = False) -> dict[str, torch.Tensor]:
    """Three samples that differ in pixels, caption and sound."""
    generator = torch.Generator().manual_seed(0)
    encode_video = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_audio = build_audio_encoder(checkpoint.path, CPU)
    rows = []
    for caption in CAPTIONS:
        row = encode_video(pixels_of(NATIVE, generator))
        row |= {name: tensor[0] for name, tensor in encode_text([caption]).items()}
        if sound:
            samples = round(NATIVE.frames / FPS * 16000)
            row |= encode_audio(0.3 * torch.randn(2, samples, generator=generator), 16000)
        rows.append(row)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
