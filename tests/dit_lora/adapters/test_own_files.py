"""Of a checkpoint's folder its own files are taken: nothing else that lies there, and nothing that a link leads to."""

import json
from pathlib import Path

import pytest

from dit_lora.adapters.own_files import copy_checkpoint_files, list_checkpoint_files
from dit_lora.errors import DitLoraError

OWN = [
    "model_index.json",
    "scheduler/scheduler_config.json",
    "tokenizer/spiece.model",
    "tokenizer/tokenizer_config.json",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
]
OTHERS = [
    ".env",
    ".git/config",
    "notes.txt",
    "id_rsa",
    "clips/me.mp4",
    "old_vae/config.json",
    "safety_checker/config.json",
    "tokenizer/evil.py",
    "tokenizer/.cache/config.json",
    "vae/passwords.txt",
    "vae/diffusion_pytorch_model.bin",
    "digests.json",
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "private" / "base"
    for name in (*OWN, *OTHERS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    index = {
        "_class_name": "SomePipeline",
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "tokenizer": ["transformers", "T5Tokenizer"],
        "safety_checker": [None, None],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "../base/clips": ["diffusers", "AutoencoderKL"],
        "id2label": {"0": "cat"},
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_a_pipeline_is_its_index_and_its_components(checkpoint: Path, tmp_path: Path) -> None:
    assert list_checkpoint_files(checkpoint) == OWN
    copy_checkpoint_files(checkpoint, tmp_path / "out", lambda name: not name.startswith("vae/"))
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path / "out").as_posix() for path in files} == set(OWN[:4])
    assert (tmp_path / "out" / OWN[2]).read_text() == OWN[2]


def test_a_model_is_what_stock_loaders_read_of_it(checkpoint: Path) -> None:
    (checkpoint / "model_index.json").unlink()
    (checkpoint / "config.json").write_text("{}")
    files = list_checkpoint_files(checkpoint)
    assert "config.json" in files
    assert "tokenizer/tokenizer_config.json" in files
    assert not set(files) & {"notes.txt", "id_rsa", "clips/me.mp4", "tokenizer/evil.py", ".env"}


@pytest.mark.parametrize("link", ["vae/notes_config.json", "vae"])
def test_a_link_to_outside_is_refused_by_its_name(checkpoint: Path, link: str) -> None:
    """As git checks them out of a repository that somebody else has written."""
    secret = checkpoint.parent / "vae"
    secret.mkdir()
    (secret / "config.json").write_text("secret")
    if link == "vae":
        (checkpoint / "vae").rename(checkpoint / "moved")
        (checkpoint / "vae").symlink_to(secret)
    else:
        (checkpoint / link).symlink_to(secret / "config.json")
    with pytest.raises(DitLoraError, match="links to files outside of it are not followed") as error:
        list_checkpoint_files(checkpoint)
    assert f"- {link}" in str(error.value)


def test_links_within_are_followed_and_so_are_those_of_the_hubs_cache(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "vae/config.json").rename(checkpoint / "shared")
    (checkpoint / "vae/config.json").symlink_to("../shared")
    assert list_checkpoint_files(checkpoint) == OWN
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    for number, name in enumerate(OWN):
        (blobs / str(number)).write_bytes((checkpoint / name).read_bytes())
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blobs / str(number))
    assert list_checkpoint_files(snapshot) == OWN
    copy_checkpoint_files(snapshot, tmp_path / "out", lambda _: True)
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_an_index_that_cannot_be_read_is_one_line(checkpoint: Path) -> None:
    for text in ("[1]", "torn", "3"):
        (checkpoint / "model_index.json").write_text(text)
        with pytest.raises(DitLoraError, match=r"model_index\.json is (not valid JSON|damaged)"):
            list_checkpoint_files(checkpoint)
