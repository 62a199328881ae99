"""Which clips a recipe holds out for its validation loss."""

from pathlib import Path
from typing import Any

import pytest

from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.sources.clips import DataScan
from dit_lora.data.sources.held_out import scan_recipe
from dit_lora.errors import DitLoraError


def write_clips(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.mp4").write_bytes(b"video")
        (folder / f"{name}.txt").write_text(f"clip {name}")
    return folder


def recipe_of(tmp_path: Path, sources: dict[str, Any], validation: dict[str, Any]) -> Recipe:
    values = {
        "model": {"family": "cogvideox", "path": "model"},
        "data": {"frames": 9, "height": 32, "width": 48, "fps": 8, **sources},
        "train": {"steps": 1},
        "validation": validation,
        "run": {"dir": str(tmp_path / "runs" / "run")},
    }
    return parse_recipe(values, "recipe")


def scan(tmp_path: Path, data: dict[str, Any], held_out: float | str | None) -> DataScan:
    return scan_recipe(recipe_of(tmp_path, data, {"data": held_out}))


def held_out_ids(scanned: DataScan) -> list[str]:
    return [clip.id for clip in scanned.clips if clip.is_held_out]


NAMES = [f"{number:02d}" for number in range(40)]


def test_a_share_is_chosen_by_name_whatever_other_files_there_are(tmp_path: Path) -> None:
    folder = write_clips(tmp_path / "clips", *NAMES)
    scanned = scan(tmp_path, {"path": str(folder)}, 0.2)
    chosen = held_out_ids(scanned)
    assert 2 < len(chosen) < 16
    assert f"validation.data: {len(chosen)} of 40 clips are not trained on: {chosen[0]}" in scanned.notes[-1]
    assert held_out_ids(scan(tmp_path, {"path": str(folder)}, None)) == []
    assert set(chosen) < set(held_out_ids(scan(tmp_path, {"path": str(folder)}, 0.5)))
    write_clips(folder, "0", "x", "y", "z")
    with_more = held_out_ids(scan(tmp_path, {"path": str(folder)}, 0.2))
    assert [name for name in with_more if name[:-4] in NAMES] == chosen


@pytest.mark.parametrize(("share", "count", "rest"), [(1e-6, 0, 1), (0.999999, 6, 5)])
def test_a_share_of_no_clip_or_of_all_is_refused_with_one_that_works(
    tmp_path: Path, share: float, count: int, rest: int
) -> None:
    folder = write_clips(tmp_path / "clips", *NAMES[:6])
    with pytest.raises(DitLoraError, match=rf"holds out {count} of 6 samples.* holds out {rest}, or") as error:
        scan(tmp_path, {"path": str(folder)}, share)
    message = str(error.value)
    assert "\n" not in message
    working = float(message.partition("names; ")[2].split()[0])
    assert len(held_out_ids(scan(tmp_path, {"path": str(folder)}, working))) == rest


def test_a_share_of_a_single_clip_is_refused(tmp_path: Path) -> None:
    folder = write_clips(tmp_path / "clips", "a")
    with pytest.raises(DitLoraError, match=r"^validation\.data=0\.5 needs two samples or more.*the data has 1$"):
        scan(tmp_path, {"path": str(folder)}, 0.5)


def test_pictures_that_the_base_generates_are_never_held_out(tmp_path: Path) -> None:
    own, prior = write_clips(tmp_path / "own", *NAMES[:8]), write_clips(tmp_path / "prior", *NAMES)
    sources = [{"path": str(own)}, {"path": str(prior), "caption": "a dog", "generate": 40}]
    chosen = held_out_ids(scan(tmp_path, {"sources": sources}, 0.6))
    assert chosen
    assert all(name.startswith("own/") for name in chosen)


def test_a_folder_is_read_as_the_data_is_and_its_clips_have_names_of_their_own(tmp_path: Path) -> None:
    trained, other = write_clips(tmp_path / "trained", "a", "b"), write_clips(tmp_path / "other", "a", "c")
    (other / "d.mp4").write_bytes(b"video")
    scanned = scan(tmp_path, {"path": str(trained)}, str(other))
    assert [(clip.id, clip.caption, clip.is_held_out) for clip in scanned.clips] == [
        ("a.mp4", "clip a", False),
        ("b.mp4", "clip b", False),
        ("validation.data/a.mp4", "clip a", True),
        ("validation.data/c.mp4", "clip c", True),
    ]
    assert [(problem.file, problem.code) for problem in scanned.problems] == [
        ("validation.data/d.mp4", "caption_missing")
    ]
    with pytest.raises(DitLoraError, match=r"^validation\.data: the folder .*gone does not exist") as error:
        scan(tmp_path, {"path": str(trained)}, str(tmp_path / "gone"))
    assert "data.path" not in str(error.value)


@pytest.mark.parametrize("share", [0, 1, 1.5, -0.1])
def test_a_number_that_is_no_share_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(DitLoraError, match=r"validation\.data: give a folder, or a share"):
        scan(tmp_path, {"path": "clips"}, share)


def test_a_loss_without_noise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match=r"validation\.data needs draws of noise: validation\.eval_draws is 0"):
        recipe_of(tmp_path, {"path": "clips"}, {"data": 0.5, "eval_draws": 0})
