"""Which file a name means: of this machine, or of a repository on the Hub."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from dit_lora.adapters import find_lora as finding
from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.adapters.find_lora import find_lora, get_public_name
from dit_lora.errors import DitLoraError


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """A repository with two files, and what is asked of the Hub."""
    calls: list[tuple[str, tuple[str, ...]]] = []
    for name in ("one", "two"):
        save_file({}, tmp_path / f"{name}.safetensors")

    def result_folder(target: str, files: tuple[str, ...]) -> Path:
        calls.append((target, files))
        return tmp_path

    monkeypatch.setattr(finding, "resolve_result_folder", result_folder)
    return calls


def test_a_repository_or_one_file_of_it(asked: list, tmp_path: Path) -> None:  # type: ignore[type-arg]
    for name in ("owner/name/two.safetensors", "hub:owner/name/two.safetensors"):
        assert find_lora(name, "lora.init") == tmp_path / "two.safetensors"
        assert asked.pop() == ("hub:owner/name", ("two.safetensors",))
    with pytest.raises(DitLoraError, match=r"has several files; name one of them\n  - one"):
        find_lora("owner/name", "lora.init")
    assert asked.pop() == ("owner/name", ("*.safetensors", "adapter_config.json"))
    save_file({}, tmp_path / ADAPTER_FILE)  # which Diffusers takes of several
    assert find_lora("owner/name", "lora.init") == tmp_path / ADAPTER_FILE


@pytest.mark.usefixtures("asked")
def test_a_mistyped_folder_is_asked_of_nobody() -> None:
    for name in (
        "runs/kitten",
        "./kitten",
        "kitten",
        "runs/kitten/x.safetensors",
        "a/b/c/d.safetensors",
    ):
        with pytest.raises(DitLoraError, match=f"lora.init: {name} does not exist"):
            find_lora(name, "lora.init")


def test_base_weights_beside_it_are_not_left_out_unseen(tmp_path: Path) -> None:
    save_file({}, tmp_path / ADAPTER_FILE)
    assert find_lora(str(tmp_path), "x") == find_lora(str(tmp_path / ADAPTER_FILE), "x")
    save_file({}, tmp_path / BASE_FILE)
    for path in (tmp_path, tmp_path / ADAPTER_FILE):
        with pytest.raises(DitLoraError, match="also has trained base weights"):
            find_lora(str(path), "x")


def test_a_name_for_others_has_no_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert get_public_name(str(tmp_path / "mine" / ".." / "mine")) == "mine"
    assert get_public_name("hub:owner/name") == get_public_name("owner/name") == "owner/name"
