"""Image-to-video from data to samples: a clip's own first image, and what is refused on the way."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from dit_lora.commands.sample import SampleRequest, write_samples
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.media.video import read_frames
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

Main = Callable[[list[str]], None]


@pytest.fixture
def args(smoke: list[str], tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path: Path) -> list[str]:
    """One step on clips of which each but the first has an image of its own, of another size."""
    data = Path(shutil.copytree(shape_clips, tmp_path / "data"))
    lines = [json.loads(line) for line in (data / "metadata.jsonl").read_text().splitlines()]
    for index, line in enumerate(lines[1:], start=1):
        noise = torch.randint(0, 256, (80, 200, 3), generator=torch.Generator().manual_seed(index))
        line["first"] = f"{index}.png"
        Image.fromarray(noise.to(torch.uint8).numpy()).save(data / line["first"])
    (data / "metadata.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return [
        *smoke,
        f"model.path={tiny_checkpoints['cogvideox-1.5-i2v']}",
        f"data.path={data}",
        f"run.dir={tmp_path / 'run'}",
        "train.steps=1",
        "guard.preflight=false",
    ]


@pytest.mark.usefixtures("nothing_encoded")
def test_a_first_image_of_the_clips_own_is_what_is_encoded(
    lora_main: Main, args: list[str], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """By `data.image_column`; a clip without one gives its first frame."""
    lora_main([*args, "data.image_column=first", "data.image_noise=false"])
    model = ModelConfig(family="cogvideox", path=str(tiny_checkpoints["cogvideox-1.5-i2v"]))
    encode = get_family("cogvideox").open(model).encoders.load_video_encoder(torch.float32, torch.device("cpu"))
    size = {"height": 32, "width": 48}
    num_images = 0
    videos = TensorCache(tmp_path / "cache" / "videos")
    for entry in videos.iter_entries():
        clip, latent_mean = entry.sample, videos.read(entry.key, {})[0]["image_latent_mean"]
        pixels = read_frames(tmp_path / "data" / clip, frames=9, fps=8, **size)
        image_path = tmp_path / "data" / f"{int(clip[:2])}.png"
        image = read_frames(image_path, frames=1, fps=None, **size)[0] if image_path.exists() else None
        assert latent_mean.shape == (1, 4, 1, 4, 6)
        assert torch.equal(latent_mean[0], encode(pixels, image)["image_latent_mean"][0])
        num_images += image_path.exists()
    assert num_images == 4


@pytest.mark.usefixtures("nothing_encoded")
def test_a_validation_image_that_is_not_there_is_refused_before_any_encoding(
    lora_main: Main, args: list[str], tmp_path: Path
) -> None:
    options = ["validation.prompts=[a]", f"validation.images=[{tmp_path / 'lost.png'}]"]
    with pytest.raises(DitLoraError, match=r"validation\.images: no such file\n.*lost\.png"):
        lora_main([*args, *options])
    assert not list(tmp_path.rglob("*.safetensors"))


def test_sampling_an_adapter_of_image_to_video_asks_for_the_image(
    lora_main: Main, args: list[str], tmp_path: Path
) -> None:
    lora_main(args)
    request = SampleRequest(tmp_path / "run", ("a",), inference_steps=1)
    with pytest.raises(DitLoraError, match="give the first image with --image"):
        write_samples(request)
