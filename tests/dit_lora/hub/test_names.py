"""A name that reads as a folder is asked of nobody; `hub:` before it says that it is the Hub's."""

from pathlib import Path

import datasets.config
import pytest
from fake_hub import FakeHub
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.config.data import DataConfig
from dit_lora.config.recipe import ModelConfig
from dit_lora.config.remedies import get_hub_name, is_likely_local
from dit_lora.data.sources.scan import scan_sources
from dit_lora.environment.hub_files import resolve_result_folder
from dit_lora.errors import DitLoraError
from dit_lora.families.opening import get_checkpoint_folder
from dit_lora.training.tasks.chat.answerer import find_origin

MISTYPED = ("clips/kitten", "runs/kiten", "models/base", "here/kitten", "Data/cats", "me/cats.tar")


@pytest.fixture(autouse=True)
def beside(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with one folder, `here`; datasets asks the fake Hub as well."""
    (tmp_path / "work" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)


def refusals(name: str, tmp_path: Path) -> list[str]:
    """What every verb and section that takes a name says of one."""
    commands = [
        ["audit", name],
        ["sample", name, "--prompt", "x"],
        ["export", name, "--to", "peft", "--out", "out"],
        ["verify", name],
        ["chat", name, "-q", "x"],
        ["push", name, "me/x"],
    ]
    messages = []
    for command in commands:
        result = CliRunner().invoke(app, command)
        assert result.exit_code in (1, 2), (command, result.output)
        messages.append(f"{result.exception}{result.output}")
    tries = (
        lambda: scan_sources(DataConfig(path=name, height=1, width=1)),
        lambda: get_checkpoint_folder(ModelConfig(family="cogvideox", path=name)),
        lambda: resolve_result_folder(name, ("*.safetensors",)),
        lambda: find_origin(Path(name), None),
    )
    for attempt in tries:
        with pytest.raises(DitLoraError) as error:
            attempt()
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("name", MISTYPED)
def test_a_mistyped_folder_is_asked_of_nobody(name: str, hub: FakeHub, tmp_path: Path) -> None:
    assert refusals(name, tmp_path)
    assert hub.requests == []


def test_the_error_says_how_to_mean_the_hub(hub: FakeHub) -> None:
    for command in (["audit", "clips/kitten"], ["sample", "runs/kiten", "--prompt", "x"]):
        result = CliRunner().invoke(app, command)
        assert f"for the repository on the Hub, write hub:{command[1]}" in str(result.exception)
    with pytest.raises(DitLoraError, match="for the repository on the Hub, write hub:models/base"):
        get_checkpoint_folder(ModelConfig(family="cogvideox", path="models/base"))


def test_what_is_called_as_the_hub_has_it_is_asked_there(hub: FakeHub) -> None:
    for name in ("acme/kitten", "hub:acme/kitten", "hub:clips/kitten"):
        repo_name = name.removeprefix("hub:")
        hub.requests.clear()
        with pytest.raises(DitLoraError, match="it cannot be downloaded"):
            get_checkpoint_folder(ModelConfig(family="cogvideox", path=name))
        assert any(repo_name in request for request in hub.requests)
        hub.requests.clear()
        result = CliRunner().invoke(app, ["sample", name, "--prompt", "x"])
        assert "it cannot be downloaded" in str(result.exception)
        assert any(repo_name in request for request in hub.requests)
        hub.requests.clear()
        with pytest.raises(DitLoraError, match="it cannot be read as a dataset"):
            scan_sources(DataConfig(path=name, height=1, width=1))
        assert any(f"datasets/{repo_name}" in request for request in hub.requests)


def test_what_is_here_comes_first(tmp_path: Path, hub: FakeHub) -> None:
    Path("acme/kitten").mkdir(parents=True)
    assert get_hub_name("acme/kitten") is None
    assert get_checkpoint_folder(ModelConfig(family="cogvideox", path="acme/kitten")).is_dir()
    assert hub.requests == []


def test_published_names_are_the_hubs() -> None:
    for name in ("THUDM/CogVideoX-5b", "zai-org/CogVideoX1.5-5B", "facebook/DiT-XL-2-256"):
        assert get_hub_name(name) == name
    for name in ("/a/b", "./b", "~/b", "~a/b", "a", "a/b/c", r"a\b/c", "a/", "tiny/cogvideox-2b"):
        assert is_likely_local(name)
        assert get_hub_name(name) is None
