"""`dit-lora caption`: by tiny models, whose words are noise; killed, resumed, over processes, to a recipe's length."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bare_media import write_without_captions
from launching import ROOT
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from dit_lora.cli.app import app
from dit_lora.commands import caption as captions
from dit_lora.commands.caption import shorten_caption
from dit_lora.data.sources.caption_changes import add_trigger
from dit_lora.data.sources.caption_table import lock_table
from dit_lora.families.base import TextLimit


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Three clips and two pictures; one clip has a caption, in a row with a column of its own."""
    folder = tmp_path / "clips"
    write_without_captions(folder, clips=3, stills=2)
    first_name = min(path.name for path in folder.glob("*.mp4"))
    (folder / "metadata.jsonl").write_text(f'{{"file_name": "{first_name}",  "text": "mine", "n": 1}}\n')
    return folder


def rows(folder: Path) -> dict[str, str]:
    lines = (folder / "metadata.jsonl").read_text().split("\n")
    return {row["file_name"]: row["text"] for row in map(json.loads, filter(None, lines))}


def caption(folder: Path, model: Path, *more: str) -> Result:
    arguments = ["caption", str(folder), "--model", str(model), "--max-tokens", "6", *more]
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    "variant",
    ["qwen2.5-vl", pytest.param("videochat2-mistral", marks=pytest.mark.thorough)],
)
def test_what_has_no_caption_gets_one_and_nothing_else_changes(
    variant: str, tiny_checkpoints: dict[str, Path], clips: Path
) -> None:
    before = (clips / "metadata.jsonl").read_bytes()
    result = caption(clips, tiny_checkpoints[variant], "--trigger", "sks")
    assert result.exit_code == 0, result.output
    after = (clips / "metadata.jsonl").read_bytes()
    assert after.startswith(before)
    rows_by_name = rows(clips)
    assert len(rows_by_name) == 5
    assert all(text.startswith("sks, ") for text in rows_by_name.values() if text != "mine")
    page = (clips / "captions.html").read_text()
    assert all(name in page for name in rows_by_name)
    assert "wrote 4 captions" in result.output
    second_result = caption(clips, tiny_checkpoints[variant])
    assert "wrote 0 captions" in second_result.output
    assert (clips / "metadata.jsonl").read_bytes() == after


def test_a_file_that_cannot_be_read_is_named_at_the_end_and_stops_no_other(
    tiny_checkpoints: dict[str, Path], clips: Path
) -> None:
    for name in ("broken.mp4", "broken.png"):
        (clips / name).write_bytes(b"no media")
    result = caption(clips, tiny_checkpoints["qwen2.5-vl"])
    assert result.exit_code == 1
    messages = [line for line in result.stdout.split("\n") if line.startswith("no caption for")]
    assert [line.split(": ")[0].removeprefix("no caption for ") for line in messages] == ["broken.mp4", "broken.png"]
    assert len(rows(clips)) == 5
    assert "2 of 7 files still have no caption" in result.output


def test_a_file_name_that_is_not_utf8_ends_nothing(tiny_checkpoints: dict[str, Path], clips: Path) -> None:
    undecodable_names = [
        os.fsdecode(b"caf\xe9.mp4"),
        os.fsdecode(b"\xff.png"),
        os.fsdecode(b"broken\xe9.png"),
    ]
    min(clips.glob("*.mp4")).rename(clips / undecodable_names[0])
    min(clips.rglob("*.png")).rename(clips / undecodable_names[1])
    (clips / undecodable_names[2]).write_bytes(b"no media")
    result = caption(clips, tiny_checkpoints["qwen2.5-vl"])
    assert result.exit_code == 1, result.output
    assert "no caption for broken\\udce9.png: " in result.stdout
    assert "wrote 5 captions" in result.stdout
    assert {*undecodable_names[:2]} < {*rows(clips)}
    assert "caf\\udce9.mp4" in (clips / "captions.html").read_text()


def test_an_output_that_is_not_finite_is_no_caption(
    tiny_checkpoints: dict[str, Path], clips: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_checkpoints["qwen2.5-vl"], tmp_path / "model"))
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("norm.weight") and "visual" not in key)
    save_file(tensors | {name: torch.full_like(tensors[name], torch.nan)}, file, {"format": "pt"})
    result = caption(clips, model)
    assert result.exit_code == 1
    assert result.output.count("the model's output is not finite") == 4
    assert rows(clips) == {min(rows(clips)): "mine"}


def test_a_caption_that_is_written_meanwhile_is_kept(
    tiny_checkpoints: dict[str, Path], clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a browser, or by hand, while the model is at work."""
    edited: dict[str, str] = {}

    def describe(inner: Any, answerer: Any, file: Path, *args: Any) -> str:
        if not edited:
            edited.update({min(rows(clips)): "better", file.relative_to(clips).as_posix(): "by hand"})
            with lock_table(clips) as table:
                table.write_captions(edited)
        return str(inner(answerer, file, *args))

    monkeypatch.setattr(captions, "generate_file_caption", partial(describe, captions.generate_file_caption))
    result = caption(clips, tiny_checkpoints["qwen2.5-vl"])
    assert result.exit_code == 0, result.output
    rows_by_name = rows(clips)
    assert len(rows_by_name) == 5
    assert {name: rows_by_name[name] for name in edited} == edited


def command(folder: Path, model: Path) -> list[str]:
    arguments = ["caption", str(folder), "--model", str(model), "--max-tokens", "200"]
    return ["-m", "dit_lora", *arguments]


@pytest.mark.thorough
def test_a_killed_start_goes_on_where_it_was(tiny_checkpoints: dict[str, Path], clips: Path) -> None:
    model = tiny_checkpoints["qwen2.5-vl"]
    part = clips / ".captions" / "part_0.jsonl"
    process = subprocess.Popen([sys.executable, *command(clips, model)], env=os.environ)
    deadline = time.monotonic() + 600
    while not (part.exists() and part.read_bytes().count(b"\n") >= 1):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    records = [json.loads(line) for line in part.read_text().splitlines()]
    with part.open("a") as file:
        file.write('{"file": "')
    result = caption(clips, model)
    assert f"{len(records)} of them from an earlier start" in result.output
    rows_by_name = rows(clips)
    assert len(rows_by_name) == 5
    assert all(rows_by_name[record["file"]] == record["caption"] for record in records)


@pytest.mark.thorough
def test_processes_share_a_folder(tiny_checkpoints: dict[str, Path], clips: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = [sys.executable, *launch, *command(clips, tiny_checkpoints["qwen2.5-vl"])]
    process = subprocess.run(arguments, env=os.environ, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("wrote 4 captions") == 1
    assert len(rows(clips)) == 5


def test_a_trigger_is_put_before_what_does_not_have_it() -> None:
    assert add_trigger("a dog", "sks") == "sks, a dog"
    assert add_trigger("a sks dog", "sks") == "a sks dog"
    assert add_trigger("a sksdog", "sks") == "sks, a sksdog"
    assert add_trigger("a dog", None) == "a dog"


class Words:
    """A tokenizer of a token a word, and one special one."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text.split())))}

    def num_special_tokens_to_add(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        (8, "One two. Three four! Five six."),
        (7, "One two. Three four! Five six."),
        (6, "One two. Three four!"),
        (3, "One two."),
        (2, "One"),
    ],
)
def test_a_caption_is_cut_at_the_end_of_a_sentence(tokens: int, kept: str) -> None:
    text = "One two. Three four! Five six."
    assert shorten_caption(text, TextLimit(Words(), tokens)) == (kept, kept != text)
    assert shorten_caption(text, None) == (text, False)


def test_a_recipe_bounds_captions_and_what_is_missing_is_said_in_a_line(
    tiny_checkpoints: dict[str, Path], clips: Path, tmp_path: Path
) -> None:
    model, recipe = tiny_checkpoints["qwen2.5-vl"], tmp_path / "recipe.yaml"
    for options, message in (
        ([str(clips), "--port", "1", "--model", "x"], "--port 1 needs --serve"),
        ([str(clips / "none"), "--model", str(model)], "none is not a folder"),
        ([str(clips), "--model", str(clips)], "is not a folder of a run"),
    ):
        result = CliRunner().invoke(app, ["caption", *options])
        assert result.exit_code != 0
        assert message in str(result.exception)
    for name, variant in (("cogvideox", "cogvideox-2b"), ("dit", "dit-tiny")):
        text = (ROOT / "recipes" / "smoke" / f"{name}.yaml").read_text()
        recipe.write_text(text.replace(f"tiny/{variant}", str(tiny_checkpoints[variant])))
        caption_result = caption(clips, model, "--recipe", str(recipe))
        # DiT's pictures have classes.
        assert (caption_result.exit_code == 0) == (name == "cogvideox"), caption_result.output
    assert "trains on classes" in str(caption_result.exception)
    # Also where all files have a caption.
    assert "is not a folder of a run" in str(caption(clips, clips).exception)
