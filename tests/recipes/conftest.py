"""A run that meets one bad clip."""

import shutil
from pathlib import Path

import pytest
from runs import poison

BAD = 3  # of the five clips; first met in step 3 of two samples each


@pytest.fixture
def bad_clip(shape_clips: Path) -> str:
    return sorted(path.name for path in shape_clips.glob("*.mp4"))[BAD]


@pytest.fixture
def without(shape_clips: Path, tmp_path: Path, bad_clip: str) -> str:
    """The override that trains on a folder which never had the bad clip."""
    folder = Path(shutil.copytree(shape_clips, tmp_path / "without"))
    for path in folder.glob(f"{Path(bad_clip).stem}.*"):
        path.unlink()
    table = folder / "metadata.jsonl"
    clean_lines = [line for line in table.read_text().splitlines(True) if bad_clip not in line]
    table.write_text("".join(clean_lines))
    return f"data.path={folder}"


@pytest.fixture
def args(smoke: list[str]) -> list[str]:
    """Quick, and with everything that draws: dropout, caption dropout, two micro-steps."""
    return [
        *smoke,
        "train.steps=9",
        "train.seed=12",
        "train.batch_size=1",
        "train.accumulate=2",
        "lora.dropout=0.1",
        "guard.snapshot_every=2",
        "guard.preflight=false",
    ]


@pytest.fixture
def poisoned(args: list[str], tmp_path: Path, bad_clip: str) -> list[str]:
    """The arguments, with one NaN in one clip's cached latent."""
    poison(tmp_path / "cache", bad_clip)
    return args
