"""Prior preservation: the folder is filled with the model's own samples, and a killed run goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image

from dit_lora.config.load import parse_recipe
from dit_lora.data.media.video import read_header
from dit_lora.data.sources.scan import read_clips
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.families.sana.checkpoint import SanaSampler
from dit_lora.training.session.session import start_run_session
from dit_lora.training.tasks.diffusion import prior
from dit_lora.training.tasks.diffusion.prior import generate_prior

Fill = Callable[..., list[Path]]


@pytest.fixture
def fill(recipe_values: dict[str, Any], tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Fill:
    """Fill the folder `prior` with images of 32x32, and give its files in order."""

    def run(count: int, variant: str = "sana-600m", **changes: Any) -> list[Path]:
        family = {"sana-600m": "sana", "video-dit-text": "video_dit"}.get(variant, "cogvideox")
        folder, values = tmp_path / "prior", recipe_values
        source = {"path": str(folder), "caption": "a dog", "generate": count, "loss_weight": 0.5}
        size = {"frames": 1, "height": 32, "width": 32}
        values["model"] = {"family": family, "path": str(tiny_checkpoints[variant])}
        values["data"] = {"sources": [source], "workers": 0, **size}
        for key, value in changes.items():
            section, name = key.split("__")
            values[section][name] = value
        recipe = parse_recipe(values, "test")
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
        with start_run_session(recipe) as session:
            generate_prior(session, get_family(family).open(recipe.model).sampler)
        return sorted(folder.rglob("*"))

    return run


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the model, noise of the seed that it is given."""

    def generate(self: SanaSampler, pipeline: Any, conditions: Any, how: Sampling) -> torch.Tensor:
        generator = torch.Generator().manual_seed(how.seed)
        return torch.randint(256, (1, 32, 32, 3), generator=generator).to(torch.uint8)

    monkeypatch.setattr(SanaSampler, "pipeline", lambda *_: MagicMock())
    monkeypatch.setattr(SanaSampler, "generate", generate)


def contents(paths: list[Path]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths}


def test_the_folder_is_filled_and_can_be_trained_on(
    fill: Fill, recipe_values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each sample has its own seed; the folder's clips have the source's caption and weight."""
    generated = fill(3)  # the tiny model's own
    assert [path.name for path in generated] == [f"prior_00000{n}.png" for n in range(3)]
    assert len(set(contents(generated).values())) == 3
    assert all(Image.open(path).size == (32, 32) for path in generated)
    assert "has 0 of 3 samples; sampling 'a dog'" in capsys.readouterr().err
    clips = read_clips(parse_recipe(recipe_values, "test").data)
    assert [(c.id, c.caption, c.loss_weight) for c in clips] == [
        (f"prior/prior_00000{n}.png", "a dog", 0.5) for n in range(3)
    ]


def test_a_killed_run_goes_on_with_the_next_and_makes_the_same(
    fill: Fill, noise: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Partly written media do not count; existing media do; a full folder loads no model."""
    expected = contents(fill(3))
    for path in (tmp_path / "prior").iterdir():
        path.unlink()
    write, written = prior.write_sample, []

    def killed(path: Path, *rest: Any) -> Path:
        if len(written) == 2:
            path.with_name(f".{path.name}.1.partial").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path)
        return write(path, *rest)

    monkeypatch.setattr(prior, "write_sample", killed)
    with pytest.raises(KeyboardInterrupt):
        fill(3)
    stamps = {path: path.stat().st_mtime_ns for path in written_files(tmp_path)}
    assert len(stamps) == 2
    monkeypatch.setattr(prior, "write_sample", write)
    fill(3)
    assert contents(written_files(tmp_path)) == expected
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    with monkeypatch.context() as full:
        full.setattr(prior, "_PriorSampler", lambda *_: None)
        fill(3)
        fill(2)
    (tmp_path / "prior" / "prior_000000.png").rename(tmp_path / "prior" / "mine.png")
    fill(4)
    assert contents(written_files(tmp_path))["prior_000000.png"] == expected["prior_000000.png"]
    assert len(written_files(tmp_path)) == 4


def written_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "prior").glob("*.png"))


def test_another_seed_gives_other_samples(fill: Fill, noise: None, tmp_path: Path) -> None:
    first_contents = contents(fill(1))
    (tmp_path / "prior" / "prior_000000.png").unlink()
    assert contents(fill(1, train__seed=7)) != first_contents


def test_clips_are_videos(fill: Fill) -> None:
    size = {"data__frames": 5, "data__height": 32, "data__width": 48, "data__fps": 8}
    (generated,) = fill(1, "cogvideox-2b", **size)
    assert generated.name == "prior_000000.mp4"
    header = read_header(generated)
    assert (header.height, header.width, header.fps) == (32, 48, 8)


def test_a_sample_of_one_colour_and_a_model_from_scratch_are_refused(
    fill: Fill, recipe_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NaN in a picture is black, and would teach the model black."""
    black = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    monkeypatch.setattr(SanaSampler, "generate", lambda *_: black)
    with pytest.raises(DitLoraError, match="'a dog' is one flat colour, as NaN gives") as error:
        fill(1)
    assert error.value.collective
    assert not written_files(tmp_path)
    monkeypatch.undo()
    del recipe_values["lora"]
    recipe_values["optim"] = {"groups": {"backbone": {"lr": 1e-4}}}
    with pytest.raises(DitLoraError, match="generate needs a trained model"):
        fill(1, model__from_scratch={}, train__mode="full")


def test_a_folder_that_cannot_be_written_is_named(fill: Fill, tmp_path: Path) -> None:
    (tmp_path / "prior").write_text("a file")
    with pytest.raises(DitLoraError, match=r"data\.sources\[0\]\.path: .*prior is not a folder"):
        fill(1)
