"""A run full of tokens and paths is pushed without any of them; so are its card and its report."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_hub import FakeHub
from safetensors import safe_open
from seeded_secrets import DRAWN, PATHS, REVISION, TOKENS, found_in

from dit_lora.config.load import load_recipe
from dit_lora.errors import DitLoraError
from dit_lora.hub.push import prepare_publication, push
from dit_lora.report.run.page import write_report

REPO = "me/kitten-lora"
SEEDS = [*TOKENS.values(), *PATHS.values()]
SMOKE = Path(__file__).parents[3] / "recipes" / "smoke" / "cogvideox.yaml"
AS_A_NAME = [TOKENS[kind] for kind in ("GitHub", "OpenAI of a project", "AWS id", "Google")]


@pytest.fixture(scope="module")
def seeded(
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    lora_main: Callable[[list[str]], None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run whose base, data, captions, prompt and own folder are called as tokens are."""
    folder = tmp_path_factory.mktemp("seeded") / "erika" / TOKENS["Hugging Face"]
    base, data = folder / f"base-{AS_A_NAME[0]}", folder / AS_A_NAME[1]
    shutil.copytree(tiny_checkpoints["cogvideox-2b"], base)
    data.mkdir()
    for clip, name in zip(sorted(shape_clips.rglob("*.mp4")), AS_A_NAME, strict=False):
        shutil.copy(clip, data / f"{name}.mp4")
        (data / f"{name}.txt").write_text(f"a disc by {name} in {PATHS['POSIX']}")
    lora_main(
        [
            str(SMOKE),
            f"model.path={base}",
            f"data.path={data}",
            "data.height=32",
            "data.width=48",
            f"validation.prompts={json.dumps([AS_A_NAME[2]])}",
            "validation.inference_steps=1",
            "validation.eval_draws=1",
            "train.steps=2",
            f"run.dir={folder / AS_A_NAME[3]}",
        ]
    )
    return folder / AS_A_NAME[3]


def told(run: Path) -> None:
    """Put every seed wherever a run writes words: its files are what push, card and report read."""
    seeds_text = " and ".join(SEEDS)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["revision"] = REVISION
    config["data"]["path"] = PATHS["POSIX"]
    config["data"]["caption"] = seeds_text
    config["guard"]["quarantine"] = PATHS["another's home"]
    config["validation"]["prompts"] = [seeds_text, *SEEDS]
    config["optim"]["name"] = TOKENS["GitLab"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for name in ("environment", "facts", "verification", "status", "data"):
        file = run / f"{name}.json"
        values: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        values["words"], values["error"] = SEEDS, seeds_text
        if name == "facts":
            values["data"] |= {"caption_prefix": seeds_text, "datasets": [TOKENS["npm"]]}
        if name == "environment":
            values |= {seed: seed for seed in SEEDS} | {"python": TOKENS["Slack"]}
        if name == "verification":
            values["checks"]["scale"]["words"] = seeds_text
        if name == "data":
            values["rejected"] = dict.fromkeys(SEEDS, seeds_text)
        file.write_text(json.dumps(values))
    verdict = {"cause": "data", "words": seeds_text, "module": SEEDS[0], "evidence": SEEDS}
    event = {
        "step": 1,
        "kind": seeds_text,
        "action": SEEDS[3],
        "sample_ids": SEEDS,
        "verdict": verdict,
    }
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    left_out = {
        "sample_id": seeds_text,
        "from_epoch": 0,
        "to_epoch": None,
        "cause": seeds_text,
        "reason": seeds_text,
    }
    (run / "quarantine.jsonl").write_text(json.dumps(left_out) + "\n")
    (run / "adapter" / ".env").write_text(seeds_text)
    (run / "adapter" / "notes.json").write_text(json.dumps(seeds_text))


def test_nothing_of_any_seed_is_pushed_or_reported(
    seeded: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = shutil.copytree(seeded, tmp_path / seeded.name)
    before = run / "report.html"
    assert found_in(before.read_bytes()) == []
    monkeypatch.setenv("SOME_API_KEY", DRAWN[-1])
    told(run)
    assert found_in((run / "config.yaml").read_bytes())
    push(run, REPO, private=True, say=lambda _: None)
    files = hub.repos[REPO].files
    assert {"README.md", "config.yaml", "verification.json"} < set(files)
    assert not {name for name in files if "notes" in name or ".env" in name}
    for name in files:
        assert found_in(f"{name}\n".encode() + hub.read(REPO, name)) == [], name
    assert all(found_in(title.encode()) == [] for title in hub.repos[REPO].titles)
    assert found_in(write_report(run).read_bytes()) == []


def test_the_adapters_header_and_a_pinned_revision_are_whole(seeded: Path, tmp_path: Path) -> None:
    run = shutil.copytree(seeded, tmp_path / seeded.name)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["revision"] = REVISION
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    config_bytes = prepare_publication(run, REPO).files["config.yaml"]
    assert isinstance(config_bytes, bytes)
    (tmp_path / "config.yaml").write_bytes(config_bytes)
    assert load_recipe(tmp_path / "config.yaml").model.revision == REVISION
    with safe_open(run / "adapter" / "pytorch_lora_weights.safetensors", framework="pt") as file:
        metadata = json.loads(file.metadata()["dit_lora"])
    assert (metadata["base_model"], metadata["steps"]) == ("base-[token]", 2)


def test_of_a_whole_pipeline_its_own_files_are_pushed(run_dir: Path, tiny_checkpoints: dict[str, Path]) -> None:
    """And what a link leads to is not, be it a file, a folder or a sample."""
    model = shutil.copytree(tiny_checkpoints["cogvideox-2b"], run_dir / "model")
    metadata = {"family": "cogvideox", "version": "0", "dtype": "torch.float32", "mode": "full"}
    (model / "dit_lora.json").write_text(json.dumps(metadata))
    prepared_files = set(prepare_publication(run_dir, REPO).files)
    (model / "notes.txt").write_text("mine")
    (model / "vae" / "passwords.txt").write_text("mine")
    (model / "old").mkdir()
    (model / "old" / "config.json").write_text("{}")
    config = model / "vae" / "config.json"
    vae_config = {**json.loads(config.read_text()), "_name_or_path": "/home/erika/vae"}
    config.write_text(json.dumps(vae_config))
    publication = prepare_publication(run_dir, REPO)
    assert set(publication.files) == prepared_files
    content = publication.files["vae/config.json"]
    assert isinstance(content, bytes)
    assert "erika" not in content.decode()
    sample = next(run_dir.rglob("prompt_00.mp4"))
    outside = run_dir.parent / "outside"
    for link in (model / "vae" / "more_config.json", sample):
        outside.write_text("{}")
        link.unlink(missing_ok=True)
        link.symlink_to(outside)
        with pytest.raises(DitLoraError, match="links to files outside of it are not followed"):
            prepare_publication(run_dir, REPO)
        link.unlink()


def test_a_pushed_modular_pipeline_is_loaded_from_its_repository(
    run_dir: Path, tiny_checkpoints: dict[str, Path]
) -> None:
    """Its index would bring the base's weights in place of the trained ones."""
    model = shutil.copytree(tiny_checkpoints["anima"], run_dir / "model")
    metadata = {"family": "anima", "version": "0", "dtype": "torch.float32", "mode": "full"}
    (model / "dit_lora.json").write_text(json.dumps(metadata))
    content = prepare_publication(run_dir, REPO).files["modular_model_index.json"]
    assert isinstance(content, bytes)
    entries = [entry for entry in json.loads(content).values() if isinstance(entry, list)]
    assert {entry[2]["pretrained_model_name_or_path"] for entry in entries} == {REPO}
    assert len(entries) == 7
