"""References and masks before they form a batch: encoded as the pipeline does, keyed by content, refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image

from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.synthetic.pairs import write_edit_pairs
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.latents import LOSS_MASK
from dit_lora.training.session.session import start_run_session
from dit_lora.training.tasks.diffusion.precompute import DiffusionTrainingData, precompute

Encode = Callable[..., DiffusionTrainingData]
CPU = torch.device("cpu")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    write_edit_pairs(tmp_path / "pairs", pairs=3, height=64, width=80)
    return tmp_path / "pairs"


@pytest.fixture
def encode(recipe_values: dict[str, Any], tiny_checkpoints: dict[str, Path], pairs: Path, tmp_path: Path) -> Encode:
    """Fill one shared cache with the pairs, by FLUX.2 or the family that is named."""

    def run(family: str = "flux2", variant: str = "flux2-klein", **data: Any) -> DiffusionTrainingData:
        values = json.loads(json.dumps(recipe_values))
        values["model"] = {"family": family, "path": str(tiny_checkpoints[variant])}
        values["data"] |= {"path": str(pairs), "frames": 1, "height": 64, "width": 64}
        values["data"] |= {"fps": None, "cache": str(tmp_path / "cache"), **data}
        recipe = parse_recipe(values, "test")
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
        with start_run_session(recipe) as session:
            return precompute(session, get_family(family).open(recipe.model, recipe))

    return run


def sample(encoded: DiffusionTrainingData, index: int, draw: int = 3) -> dict[str, torch.Tensor]:
    batch = encoded.training_set.read_sample(encoded.training_set.entries[index], draw)
    assert not batch.faults
    return dict(batch.tensors)


def keys(encoded: DiffusionTrainingData) -> list[str]:
    return [entry.video_key for entry in encoded.training_set.entries]


def test_a_reference_is_encoded_at_its_own_size(
    encode: Encode, pairs: Path, tiny_checkpoints: dict[str, Path]
) -> None:
    encoded = encode()
    picture = Image.open(pairs / "before" / "001.png").convert("RGB")
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    frames = pixels.view(1, picture.height, picture.width, 3).permute(0, 3, 1, 2)
    model = ModelConfig(family="flux2", path=str(tiny_checkpoints["flux2-klein"]))
    encoder: Any = get_family("flux2").open(model).encoders.load_video_encoder(torch.float32, CPU)
    entry = encoded.training_set.entries[1]
    assert entry.shape is not None
    expected = encoder.encode_references([frames], entry.shape)["reference_0"]
    assert tuple(expected.shape[1:]) == (8, 10)
    assert torch.equal(sample(encoded, 1)["reference_0"][0], expected)
    assert not torch.equal(sample(encoded, 0)["reference_0"], sample(encoded, 1)["reference_0"])


def test_another_reference_under_the_same_name_is_another_entry(encode: Encode, pairs: Path) -> None:
    before = keys(encode())
    shutil.copy(pairs / "after" / "002.png", pairs / "before" / "000.png")
    changed = [key != other_key for key, other_key in zip(before, keys(encode()), strict=True)]
    assert changed == [True, False, False]


def test_references_have_an_order(encode: Encode, pairs: Path) -> None:
    table = pairs / "metadata.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]

    def write(names: list[str]) -> None:
        table.write_text("".join(json.dumps({**row, "references": names}) + "\n" for row in rows))

    write(["before/000.png", "before/001.png"])
    first_set = encode()
    write(["before/001.png", "before/000.png"])
    second_set = encode()
    assert not set(keys(first_set)) & set(keys(second_set))
    first_sample, second = sample(first_set, 0), sample(second_set, 0)
    assert torch.equal(first_sample["reference_0"], second["reference_1"])
    assert torch.equal(first_sample["reference_1"], second["reference_0"])
    assert not torch.equal(first_sample["reference_0"], first_sample["reference_1"])


def test_without_a_cache_a_sample_is_the_same_bit_for_bit(encode: Encode) -> None:
    cached, live = encode(mask_column="mask"), encode(mask_column="mask", precompute=False)
    for index in range(3):
        expected, actual = sample(cached, index), sample(live, index)
        assert expected.keys() == actual.keys() >= {"reference_0", LOSS_MASK}
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    spec = live.training_set.video_specs[live.training_set.entries[0].shape]
    assert {name: entry[0] for name, entry in spec.items()} == {
        name: tensor.shape[1:] for name, tensor in expected.items() if name in spec
    }


def test_a_mirrored_sample_has_mirrored_references_and_mask(encode: Encode) -> None:
    encoded = encode(flip=True, mask_column="mask")
    entry = encoded.training_set.entries[0]
    draws = {encoded.training_set.entries[0].choose_video_key(draw): draw for draw in range(40)}
    assert len(draws) == 2
    plain, mirrored = (encoded.training_set.read_sample(entry, draw).tensors for draw in draws.values())
    assert torch.equal(plain[LOSS_MASK], mirrored[LOSS_MASK].flip(-1))
    assert not torch.equal(plain[LOSS_MASK], mirrored[LOSS_MASK])
    assert not torch.equal(plain["reference_0"], mirrored["reference_0"])


def test_a_mask_is_cropped_with_its_sample_and_is_part_of_the_key(encode: Encode, pairs: Path) -> None:
    mask = Image.new("L", (80, 64))
    mask.paste(255, (8, 0, 40, 64))  # the crop to 64 x 64 begins at column 8
    mask.save(pairs / "mask" / "000.png")
    encoded = encode(mask_column="mask")
    expected = torch.zeros(8, 8)
    expected[:, :4] = 1
    assert torch.equal(sample(encoded, 0)[LOSS_MASK][0], expected)
    assert not set(keys(encoded)) & set(keys(encode()))


def test_a_source_without_masks_is_learned_whole_beside_one_with(encode: Encode, pairs: Path) -> None:
    sources: list[dict[str, Any]] = [
        {"path": str(pairs), "mask_column": "mask"},
        {"path": str(pairs / "after")},
    ]
    sources[0]["reference_columns"] = []
    encoded = encode("sana", "sana-600m", path=None, sources=sources)
    is_unmasked = [bool((sample(encoded, index)[LOSS_MASK] == 1).all()) for index in range(6)]
    assert sorted(is_unmasked) == [False] * 3 + [True] * 3


def test_what_does_not_fit_is_refused_in_one_line_each(encode: Encode, pairs: Path) -> None:
    with pytest.raises(DitLoraError, match=r"takes no references, and 3 of 3 samples have some"):
        encode("sana", "sana-600m")
    with pytest.raises(DitLoraError, match="makes a picture from references, and no sample has"):
        encode("flux", "flux-kontext", path=str(pairs / "after"))
    folders = [str(pairs / "before")] * 2
    with pytest.raises(DitLoraError, match="it has 2 references, and this model takes 1"):
        encode("flux", "flux-kontext", path=str(pairs / "after"), reference_folders=folders)
    Image.new("RGB", (40, 200)).save(pairs / "before" / "001.png")
    with pytest.raises(DitLoraError, match=r"before/001.png: it is 40 x 200, and each side must"):
        encode()
    with pytest.raises(DitLoraError, match=r"data.reference_columns, .*: it takes no references"):
        encode("sana", "sana-600m", reference_columns=["references"])
    with pytest.raises(DitLoraError, match=r"data.reference_resolution: it takes none; remove it"):
        encode("sana", "sana-600m", path=str(pairs / "after"), reference_resolution=64)


def test_a_mask_of_another_shape_or_of_nothing_is_named(encode: Encode, pairs: Path) -> None:
    Image.new("L", (64, 64), 255).save(pairs / "mask" / "000.png")
    Image.new("L", (80, 64)).save(pairs / "mask" / "002.png")
    with pytest.raises(DitLoraError) as refused:
        encode(mask_column="mask")
    assert "its mask is 64 x 64 and the picture 80 x 64" in str(refused.value)
    shutil.copy(pairs / "mask" / "001.png", pairs / "mask" / "000.png")
    with pytest.raises(DitLoraError, match=r"its mask is black, so nothing of the sample"):
        encode(mask_column="mask")
