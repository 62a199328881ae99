"""`dit-lora audit` and `dit-lora cache`, on a folder and on a recipe."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import poison
from typer.testing import CliRunner

from benchmarks.faults.media.encode import encode, moving
from dit_lora.cli.app import app
from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.errors import DitLoraError


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def test_a_torn_shard_of_a_cache_is_named_once(tmp_path: Path) -> None:
    shard = tmp_path / "texts" / f"{0:032}.safetensors"
    shard.parent.mkdir()
    shard.write_bytes(b"torn")
    output = invoke("cache", "verify", tmp_path, code=1)
    assert f"  unreadable: the header of {shard} is incomplete; its entries are lost" in output.splitlines()


@pytest.fixture
def recipe(recipe_values: dict[str, Any], tmp_path: Path) -> Path:
    """A recipe's file, whose data has a cut clip and one listed that is not there."""
    data = Path(shutil.copytree(recipe_values["data"]["path"], tmp_path / "data"))
    content = sorted(data.glob("*.mp4"))[0].read_bytes()
    (data / "cut.mp4").write_bytes(content[: len(content) // 2])
    with (data / "metadata.jsonl").open("a") as table:
        table.write(json.dumps({"file_name": "cut.mp4", "text": "a cut one"}) + "\n")
        table.write(json.dumps({"file_name": "gone.mp4", "text": "a lost one"}) + "\n")
    recipe_values["data"] |= {"path": str(data), "cache": str(tmp_path / "cache")}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_values))
    return path


def verdicts(path: Path) -> dict[str, str]:
    return {sample["file"]: sample["verdict"] for sample in json.loads(path.read_text())["samples"]}


def test_a_folder_alone_is_audited_and_every_file_asked_for_is_written(recipe: Path, tmp_path: Path) -> None:
    output_paths = {name: tmp_path / f"audit.{name}" for name in ("json", "html", "fix-list")}
    options = [part for name, path in output_paths.items() for part in (f"--{name}", path)]
    output = invoke("audit", tmp_path / "data", *options, code=1)
    verdict_by_file = verdicts(output_paths["json"])
    assert {file for file, verdict in verdict_by_file.items() if verdict == "reject"} == {
        "cut.mp4",
        "gone.mp4",
    }
    assert len(verdict_by_file) == 7
    assert output.splitlines()[-1] == "7 samples: 5 ok, 0 warn, 2 reject"
    assert "missing: no such file" in output
    assert "gone.mp4" in output_paths["html"].read_text()
    rows = [line.split("\t") for line in output_paths["fix-list"].read_text().splitlines()]
    assert [row[:2] for row in rows[1:]] == [["reject", "cut.mp4"], ["reject", "gone.mp4"]]


def test_an_audit_of_a_folder_says_what_is_one_frame_and_obeys_no_name(tmp_path: Path) -> None:
    """A video of one frame is a warning without a recipe, which may ask for more; names are shown escaped."""
    folder = tmp_path / "clips"
    folder.mkdir()
    encode(folder / "one.mp4", moving("one", 1))
    encode(folder / "nine.mp4", moving("nine", 9))
    hostile_name = "\x1b]0;owned\x07\u202e\n3 samples: 3 ok.mp4"
    (folder / hostile_name).write_bytes(b"")
    for path in list(folder.iterdir()):
        path.with_suffix(".txt").write_text(f"what {path.stem[:4]!a} shows")
    report = tmp_path / "audit.json"
    stdout = invoke("audit", folder, "--json", report, code=1)
    escaped_name = "\\x1b]0;owned\\x07\\u202e\\n3 samples: 3 ok.mp4"
    assert stdout.splitlines() == [
        f"reject  {escaped_name}: empty_file: the file has no bytes",
        "warn    too_short: 1",
        "note    sound: 0 of 2 clips have sound",
        "3 samples: 1 ok, 1 warn, 1 reject",
    ]
    assert verdicts(report) == {"one.mp4": "warn", "nine.mp4": "ok", hostile_name: "reject"}
    assert report.read_text().endswith("}\n")


def test_a_recipes_audit_looks_at_encodings_and_training_heeds_it(
    recipe: Path, tmp_path: Path, lora_main: Any
) -> None:
    """What the audit rejected is refused before anything is decoded again."""
    report = tmp_path / "audit.json"
    invoke("audit", recipe, "--encode", "--json", report, code=1)
    report_values = json.loads(report.read_text())
    assert report_values["totals"]["reject"] == 2
    assert {"latent_mean", "latent_logvar", "prompt_embeds"} <= report_values["encoded"].keys()
    assert all(sample["facts"]["caption_tokens"] for sample in report_values["samples"] if sample["facts"])
    with pytest.raises(DitLoraError, match=r"cut\.mp4: .*truncated"):
        lora_main([str(recipe)])


def test_a_damaged_cache_entry_is_named_by_the_audit(recipe: Path, tmp_path: Path) -> None:
    invoke("cache", "build", recipe, "data.rejects=skip")
    sample = sorted(path.name for path in (tmp_path / "data").glob("*.mp4"))[1]
    poison(tmp_path / "cache", sample)
    report = tmp_path / "audit.json"
    invoke("audit", recipe, "--encode", "--json", report, code=1)
    (damaged_sample,) = [s for s in json.loads(report.read_text())["samples"] if s["file"] == sample]
    assert {"cache_damaged", "latent_non_finite"} <= set(damaged_sample["codes"])


def test_a_cache_is_built_checked_counted_and_pruned(recipe: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(DitLoraError, match=r"(?s)gone\.mp4.*cut\.mp4"):
        invoke("cache", "build", recipe)
    invoke("cache", "build", recipe, "data.rejects=skip")
    invoke("cache", "build", recipe, "data.rejects=skip", "data.fps=16")
    cache_stats = json.loads(invoke("cache", "stats", cache, "--json"))
    assert cache_stats["videos"]["entries"] == 10
    assert invoke("cache", "verify", recipe).count("problems 0") == 3

    sample = sorted(path.name for path in (tmp_path / "data").glob("*.mp4"))[0]
    poison(cache, sample)
    output = invoke("cache", "verify", cache, "--json", code=1)
    (problem,) = json.loads(output)["videos"]["problems"]
    assert (problem["kind"], problem["sample"]) == ("non_finite", sample)
    invoke("cache", "verify", cache, "--set-aside")
    assert len(TensorCache(cache / "videos")) == 9
    invoke("cache", "build", recipe, "data.rejects=skip")
    invoke("cache", "build", recipe, "data.rejects=skip", "data.fps=16")
    assert len(TensorCache(cache / "videos")) == 10

    skipping = tmp_path / "skipping.yaml"
    values = yaml.safe_load(recipe.read_text())
    values["data"]["rejects"] = "skip"
    skipping.write_text(yaml.safe_dump(values))
    prune_result = json.loads(invoke("cache", "prune", cache, "--keep", skipping, "--json"))
    assert prune_result["videos"]["unwanted"] == 5
    cached = TensorCache(cache / "videos")
    assert {entry.facts["fps"] for entry in cached.iter_entries()} == {8}
    assert len(cached) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit", "clips", "data.frames=9"], "data.frames: needs a recipe"),
        (["audit", "clips", "--encode"], "--encode needs a recipe"),
        (["audit", "nowhere"], "the folder nowhere does not exist"),
        (["cache", "build", "folder"], "needs a recipe"),
        (["cache", "stats", "folder"], "is not a cache"),
        (["cache", "verify", "folder", "data.frames=9"], "key.path=value needs a recipe"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments: list[str], words: str) -> None:
    with pytest.raises(DitLoraError, match=words) as error:
        invoke(*arguments)
    assert "\n" not in str(error.value)


def test_what_only_the_audit_sees_is_refused_by_training_from_then_on(
    recipe_values: dict[str, Any], tmp_path: Path
) -> None:
    """Damage behind the frames that a recipe takes."""
    data = tmp_path / "data"
    write_shapes(data, clips=3, frames=33, height=64, width=96, fps=8)
    path = sorted(data.glob("*.mp4"))[1]
    broken = bytearray(path.read_bytes())
    start, end = broken.index(b"mdat"), broken.index(b"moov") - 8
    late = start + (end - start) * 9 // 10
    broken[late:end] = bytes(end - late)
    path.write_bytes(broken)
    recipe_values["data"] |= {"path": str(data), "cache": str(tmp_path / "cache")}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_values))
    invoke("cache", "build", recipe)
    invoke("audit", recipe, code=1)
    with pytest.raises(DitLoraError, match=rf"{path.name}: (corrupt|truncated)"):
        invoke("cache", "build", recipe)
    invoke("cache", "build", recipe, "data.rejects=skip")
