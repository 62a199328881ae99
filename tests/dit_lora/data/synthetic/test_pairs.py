"""Made pairs: a target, what it is made from and where they differ, in both layouts."""

from pathlib import Path

import pytest
import torch

from dit_lora.config.data import DataConfig
from dit_lora.data.media.references import read_mask, read_reference
from dit_lora.data.media.video import read_frames
from dit_lora.data.sources.scan import read_clips
from dit_lora.data.synthetic.pairs import write_edit_pairs

SIZE = {"height": 64, "width": 96}


@pytest.fixture(scope="module", params=[1, 5])
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "pairs"
    write_edit_pairs(folder, pairs=12, frames=request.param, fps=8, **SIZE)
    return folder


def test_a_table_and_folders_give_the_same_pairs(pairs: Path) -> None:
    table = read_clips(DataConfig(path=str(pairs), mask_column="mask", **SIZE))
    folders = DataConfig(
        path=str(pairs / "after"),
        reference_folders=(str(pairs / "before"),),
        mask_folder=str(pairs / "mask"),
        **SIZE,
    )
    assert len(table) == 12
    assert len({clip.caption for clip in table}) == 4
    for expected_clip, folder_clip in zip(table, read_clips(folders), strict=True):
        assert expected_clip.id == f"after/{folder_clip.id}"
        assert (
            expected_clip.media,
            expected_clip.caption,
            expected_clip.references,
            expected_clip.mask,
        ) == (
            folder_clip.media,
            folder_clip.caption,
            folder_clip.references,
            folder_clip.mask,
        )


def test_target_and_reference_are_equal_where_the_mask_is_black(pairs: Path) -> None:
    for clip in read_clips(DataConfig(path=str(pairs), mask_column="mask", **SIZE)):
        assert clip.mask is not None
        mask = read_mask(clip.mask.media, alpha=False, **SIZE)
        target = read_frames(clip.media, frames=1, fps=None, **SIZE)
        source = read_reference(clip.references[0], None, None)
        differs = (target[0].int() - source[0].int()).abs().amax(0)
        assert differs[mask == 1].max() > 30
        # H.264 changes levels beside an edge.
        assert (differs[mask == 0] > 30).float().mean() < 0.05
        if clip.media.name.endswith(".png"):
            assert torch.equal(differs > 0, mask == 1)
