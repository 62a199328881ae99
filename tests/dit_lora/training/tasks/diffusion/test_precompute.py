"""What an entry's key depends on, and that the entry holds what the recipe asks for."""

import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image

from benchmarks.faults.media.cache import overwrite
from dit_lora.commands.audit_recipe import audit_recipe
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.video import read_frames
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.training.session.session import start_run_session
from dit_lora.training.tasks.diffusion.cache_plan import compute_transformer_digest, make_cache_plan
from dit_lora.training.tasks.diffusion.precompute import DiffusionTrainingData, precompute

Encode = Callable[..., DiffusionTrainingData]


@pytest.fixture
def encode(recipe_values: dict[str, Any], tmp_path: Path) -> Encode:
    """Fill one shared cache with `section.key=value` changed."""

    def run(**changes: Any) -> DiffusionTrainingData:
        values = json.loads(json.dumps(recipe_values))
        values["data"]["cache"] = str(tmp_path / "cache")
        for key, value in changes.items():
            section, name = key.split("__")
            values[section][name] = value
        recipe = parse_recipe(values, "test")
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
        with start_run_session(recipe) as session:
            return precompute(session, get_family("cogvideox").open(recipe.model))

    return run


def keys(encoded: DiffusionTrainingData) -> list[tuple[str, str]]:
    return [(entry.video_key, entry.text_key) for entry in encoded.training_set.entries]


@pytest.mark.parametrize(
    "change", [{"data__frames": 5}, {"data__height": 48}, {"data__width": 32}, {"data__fps": 16.0}]
)
def test_another_shape_or_rate_is_another_clip_entry_and_the_same_caption(
    encode: Encode, change: dict[str, Any]
) -> None:
    before, after = encode(), encode(**change)
    for (video, text), (other_video, other_text) in zip(keys(before), keys(after), strict=True):
        assert video != other_video
        assert text == other_text
    assert before.data_digest != after.data_digest


def test_another_dtype_is_another_entry_of_both(encode: Encode) -> None:
    for key, other_key in zip(keys(encode()), keys(encode(model__dtype="bf16")), strict=True):
        assert key[0] != other_key[0]
        assert key[1] != other_key[1]


def test_another_file_under_the_same_name_is_another_entry(encode: Encode, shape_clips: Path, tmp_path: Path) -> None:
    clips = Path(shutil.copytree(shape_clips, tmp_path / "clips"))
    before = keys(encode(data__path=str(clips)))
    names = sorted(path.name for path in clips.glob("*.mp4"))
    write_shapes(tmp_path / "new", clips=2, frames=9, height=48, width=96, fps=8)
    shutil.copy(next((tmp_path / "new").glob("*.mp4")), clips / names[0])
    after = keys(encode(data__path=str(clips)))
    changed = [key[0] != other_key[0] for key, other_key in zip(before, after, strict=True)]
    assert changed == [True, False, False, False, False]


def test_captions_that_differ_only_in_case_or_end_are_different_entries(
    encode: Encode, tiny_checkpoints: dict[str, Path]
) -> None:
    prompts = ["A cat", "a cat", "a cat runs", "a cat"]
    encoded = encode(validation__prompts=prompts)
    first_key, second, third, fourth = (key for key, _ in encoded.prompt_keys)
    assert len({first_key, second, third}) == 3
    assert second == fourth
    assert encoded.training_set.empty_text_key not in {first_key, second, third}
    assert {negative for _, negative in encoded.prompt_keys} == {encoded.training_set.empty_text_key}
    path = str(tiny_checkpoints["cogvideox-2b"])
    checkpoint = get_family("cogvideox").open(ModelConfig(family="cogvideox", path=path))
    expected = checkpoint.encoders.load_text_encoder(torch.float32, torch.device("cpu"))
    for prompt, (key, _) in zip(prompts, encoded.prompt_keys, strict=True):
        tensors, _ = encoded.training_set.texts.read(key, {})
        assert torch.equal(tensors["prompt_embeds"], expected([prompt])["prompt_embeds"][0])


def test_an_entry_is_the_encoding_of_the_frames_that_the_recipe_asks_for(
    encode: Encode, shape_clips: Path, tiny_checkpoints: dict[str, Path]
) -> None:
    encoded = encode(data__fps=16.0, data__frames=5)
    entry = encoded.training_set.entries[2]
    tensors, fault = encoded.training_set.videos.read(entry.video_key, {})
    assert fault is None
    frames = read_frames(shape_clips / entry.id, frames=5, height=32, width=48, fps=16.0)
    path = str(tiny_checkpoints["cogvideox-2b"])
    vae = get_family("cogvideox").open(ModelConfig(family="cogvideox", path=path))
    expected = vae.encoders.load_video_encoder(torch.float32, torch.device("cpu"))(frames)
    assert torch.equal(tensors["latent_mean"], expected["latent_mean"])


def test_what_is_cached_is_not_encoded_again(encode: Encode, tmp_path: Path) -> None:
    encode()
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.safetensors")}
    victim = next(iter(p for p in stamps if "videos" in p.parts))
    victim.write_bytes(victim.read_bytes()[:60])  # torn: rebuilt alone
    encode()
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.safetensors")}
    assert {p for p in stamps if stamps[p] != after[p]} == {victim}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_bad_entry_that_all_samples_share_is_encoded_anew(
    encode: Encode, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"validation__prompts": ["a cat"], "model__dtype": dtype}
    encoded = encode(**changes)
    texts, shared = (
        encoded.training_set.texts,
        [encoded.training_set.empty_text_key, encoded.prompt_keys[0][0]],
    )
    good = [texts.read(key, {})[0]["prompt_embeds"].clone() for key in shared]
    for entry in list(texts.iter_entries()):
        if entry.key in shared:
            overwrite(entry, "prompt_embeds", 0, torch.tensor([torch.nan]))
    encoded_again = encode(**changes)
    for key, embeds in zip(shared, good, strict=True):
        assert torch.equal(texts.read(key, {})[0]["prompt_embeds"], embeds)
    assert encoded_again.training_set.empty_caption_tensors[1] is None
    printed = capsys.readouterr().err
    assert "encoding caption '' again" in printed
    assert "encoding caption 'a cat' again" in printed


def test_a_mirror_image_is_an_entry_of_its_own_beside_the_image(
    encode: Encode, shape_clips: Path, tiny_checkpoints: dict[str, Path]
) -> None:
    plain, flipped = encode(data__frames=1), encode(data__frames=1, data__flip=True)
    assert keys(plain) == keys(flipped)
    assert all(entry.mirror_key is None for entry in plain.training_set.entries)
    assert plain.data_digest != flipped.data_digest
    entry = flipped.training_set.entries[3]
    assert entry.mirror_key is not None
    mirror, fault = flipped.training_set.videos.read(entry.mirror_key, {})
    assert fault is None
    frames = read_frames(shape_clips / entry.id, frames=1, height=32, width=48, fps=8).flip(3)
    path = str(tiny_checkpoints["cogvideox-2b"])
    vae = get_family("cogvideox").open(ModelConfig(family="cogvideox", path=path))
    expected = vae.encoders.load_video_encoder(torch.float32, torch.device("cpu"))(frames)
    assert torch.equal(mirror["latent_mean"], expected["latent_mean"])


def test_another_first_image_is_another_entry(
    encode: Encode, shape_clips: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    clips = Path(shutil.copytree(shape_clips, tmp_path / "clips"))
    name = min(path.name for path in clips.glob("*.mp4"))
    row = {"file_name": name, "text": "a disc", "first": "first.png"}
    (clips / "metadata.jsonl").write_text(json.dumps(row) + "\n")

    def key(colour: str) -> str:
        Image.new("RGB", (96, 64), colour).save(clips / "first.png")
        encoded = encode(
            model__path=str(tiny_checkpoints["cogvideox-5b-i2v"]),
            data__path=str(clips),
            data__image_column="first",
            data__height=64,
            data__width=96,
        )
        return encoded.training_set.entries[0].video_key

    assert key("navy") == key("navy") != key("olive")


def test_random_weights_are_told_apart_by_what_they_are_drawn_from(
    recipe_values: dict[str, Any], tmp_path: Path
) -> None:
    """Preflight remembers by this digest; the files of the transformer are not read."""

    class NoFiles:
        path = tmp_path

    def digest(scratch: dict[str, Any], seed: int) -> str:
        recipe_values["model"]["from_scratch"] = scratch
        recipe_values["optim"] = {"groups": {"backbone": {"lr": 1e-4}}}
        recipe_values["train"] |= {"mode": "full", "seed": seed}
        recipe_values.pop("lora", None)
        recipe = parse_recipe(recipe_values, "test")
        info: Any = NoFiles()
        return compute_transformer_digest(info, recipe, Digests(tmp_path / "digests.json"))

    assert digest({}, 1) == digest({}, 1)
    assert len({digest({}, 1), digest({}, 2), digest({"num_layers": 1}, 1)}) == 3


@pytest.mark.parametrize(
    ("component", "videos_change", "texts_change"),
    [
        ("vae", True, False),
        ("text_encoder", False, True),
        ("tokenizer", False, True),
        ("transformer", False, False),
        ("code of decoding", True, False),
    ],
)
def test_what_changed_makes_anew_what_depends_on_it_and_nothing_else(
    recipe_values: dict[str, Any],
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    component: str,
    videos_change: bool,
    texts_change: bool,
) -> None:
    model = Path(shutil.copytree(tiny_checkpoints["cogvideox-2b"], tmp_path / "model"))
    recipe_values["model"]["path"] = str(model)
    recipe_values["data"]["cache"] = str(tmp_path / "cache")
    recipe = parse_recipe(recipe_values, "test")

    def keys_now() -> tuple[set[str], set[str]]:
        checkpoint = get_family("cogvideox").open(recipe.model)
        return make_cache_plan(recipe, checkpoint.encoders, torch.float32, samples_per_step=1, quiet=True).keys

    videos, texts = keys_now()
    if component == "code of decoding":
        monkeypatch.setattr("dit_lora.training.tasks.diffusion.cache_plan.DECODE_VERSION", "another")
    else:
        file = next(f for f in sorted((model / component).iterdir()) if f.suffix == ".json")
        file.write_text(file.read_text() + " ")
    other_videos, other_texts = keys_now()
    assert videos.isdisjoint(other_videos) if videos_change else videos == other_videos
    assert texts.isdisjoint(other_texts) if texts_change else texts == other_texts


def test_how_often_a_sample_comes_and_what_it_weighs_are_part_of_the_data(encode: Encode, shape_clips: Path) -> None:
    """A checkpoint is of one such order and loss."""

    def digest(**changes: float) -> str:
        source = {"path": str(shape_clips), **changes}
        return encode(data__path=None, data__sources=[source]).data_digest

    assert len({digest(), digest(repeats=2), digest(loss_weight=0.5)}) == 3


def test_each_window_of_a_clip_is_an_entry_of_its_own(
    encode: Encode, shape_clips: Path, tiny_checkpoints: dict[str, Path]
) -> None:
    encoded = encode(data__fps=16.0, data__windows="all")
    entries = encoded.training_set.entries
    assert len({entry.video_key for entry in entries}) == len(entries) == 10
    first_entry, second = entries[:2]
    assert second.id == f"{first_entry.id}@0.562s"  # to the millisecond
    path = str(tiny_checkpoints["cogvideox-2b"])
    vae = get_family("cogvideox").open(ModelConfig(family="cogvideox", path=path))
    encoder = vae.encoders.load_video_encoder(torch.float32, torch.device("cpu"))
    size = {"frames": 9, "height": 32, "width": 48, "fps": 16.0}
    for entry, start in ((first_entry, 0.0), (second, 0.5625)):
        tensors, fault = encoded.training_set.videos.read(entry.video_key, {})
        assert fault is None
        frames = read_frames(shape_clips / first_entry.id, start=start, **size)
        assert torch.equal(tensors["latent_mean"], encoder(frames)["latent_mean"])


def test_captions_that_the_audit_rejects_are_refused_whatever_the_cache_holds(
    encode: Encode, recipe_values: dict[str, Any], shape_clips: Path, tmp_path: Path
) -> None:
    """Of one judgement: also where every clip, and the very caption before it was stripped, is cached."""
    folder = Path(shutil.copytree(shape_clips, tmp_path / "clips"))
    lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    encode(data__path=str(folder))
    bad = ("\u200b\ufeff", "\0", "a cat \ud83d", "x" * 200_000)
    for line, caption in zip(lines, bad, strict=False):
        line["text"] = caption
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    bad_files = {line["file_name"] for line, _ in zip(lines, bad, strict=False)}

    values = json.loads(json.dumps(recipe_values))
    values["data"] |= {"path": str(folder), "cache": str(tmp_path / "cache")}
    recipe = parse_recipe(values, "test")
    checkpoint = get_family("cogvideox").open(recipe.model)
    audit = audit_recipe(recipe, checkpoint.encoders, progress=False)
    assert {sample.file for sample in audit.audited_samples if sample.verdict == "reject"} == bad_files

    for precomputed in (True, False):
        with pytest.raises(DitLoraError) as error:
            encode(data__path=str(folder), data__precompute=precomputed)
        named = {line.split(": ")[0].removeprefix("  - ") for line in str(error.value).split("\n")[1:]}
        assert named == bad_files


@pytest.mark.parametrize("stored", [True, False])
def test_a_caption_beyond_the_text_limit_is_one_line(
    encode: Encode,
    shape_clips: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stored: bool,
) -> None:
    """In place of Transformers' and Diffusers' own, who quote what they cut whole."""
    clips = Path(shutil.copytree(shape_clips, tmp_path / "clips"))
    listing = clips / "metadata.jsonl"
    rows = [json.loads(line) for line in listing.read_text().splitlines()]
    rows[1]["text"] = "a red disc moves " * 400
    listing.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    theirs = logging.StreamHandler(io.StringIO())
    libraries = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    for library in libraries:
        library.addHandler(theirs)
    encoded = encode(data__path=str(clips), data__precompute=stored)
    for entry in encoded.training_set.entries:
        encoded.training_set.texts.read(entry.text_key, {})
    for library in libraries:
        library.removeHandler(theirs)
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if line.startswith("captions: ")]
    assert f"1 of {len(rows)} are cut at 226 tokens, such as {rows[1]['file_name']}; see dit-lora audit" in line
    assert not theirs.stream.getvalue()
    if stored:
        encode(data__path=str(clips))
        assert "captions: " not in capsys.readouterr().err  # they are not read again


@pytest.mark.parametrize("stored", [True, False])
def test_a_validation_folder_is_encoded_and_kept_apart_without_copies_of_training_clips(
    encode: Encode,
    recipe_values: dict[str, Any],
    shape_clips: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stored: bool,
) -> None:
    plain, folder = encode(data__precompute=stored), tmp_path / "others"
    new, *_ = write_shapes(folder, clips=1, frames=9, height=48, width=80, fps=8)
    shutil.copy(shape_clips / plain.training_set.entries[1].id, folder / "copy.mp4")
    table = folder / "metadata.jsonl"
    table.write_text(table.read_text() + '{"file_name": "copy.mp4", "text": "a copy"}\n')
    encoded = encode(data__precompute=stored, validation__data=str(folder))
    assert "validation.data: left out validation.data/copy.mp4, because" in capsys.readouterr().err
    assert encoded.validation_set is not None
    (entry,) = encoded.validation_set.entries
    assert entry.id == f"validation.data/{new.name}"
    # The file has the name of a training clip, and is another one.
    assert new.name in {trained.id for trained in encoded.training_set.entries}
    assert encoded.validation_set.read_sample(entry, 0).faults == {}
    assert keys(encoded) == keys(plain)
    assert encoded.data_digest == plain.data_digest

    recipe_values["validation"]["data"] = str(folder)
    recipe = parse_recipe(recipe_values, "test")
    audit = audit_recipe(recipe, get_family("cogvideox").open(recipe.model).encoders, progress=False)
    note = f"validation.data: 2 of 7 clips are not trained on: validation.data/{new.name}, validation.data/copy.mp4"
    assert note in audit.notes
    assert audit.totals["samples"] == 7

    assert encoded.validation_digest
    assert not plain.validation_digest
    table.write_text(table.read_text().replace('"text": "', '"text": "now ', 1))
    changed = encode(data__precompute=stored, validation__data=str(folder))
    assert changed.validation_digest != encoded.validation_digest
    assert changed.data_digest == encoded.data_digest

    table.write_text('{"file_name": "copy.mp4", "text": "a copy"}\n')
    with pytest.raises(DitLoraError, match=r"no sample of validation\.data is left"):
        encode(data__precompute=stored, validation__data=str(folder))
