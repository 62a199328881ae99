"""A file that changed since it was verified has another digest."""

from pathlib import Path

import pytest

from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.verify.verified_files import (
    VERIFICATION_FILE,
    compute_digests,
    find_changed_files,
    list_result_files,
    require_file_unchanged,
    require_result_unchanged,
    write_verification,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("lora.safetensors", "adapter_config.json", "README.md"):
        (adapter / name).write_text(name)
    digests = compute_digests(tmp_path, list_result_files(adapter, ""))
    assert [*digests] == ["adapter/adapter_config.json", "adapter/lora.safetensors"]
    write_verification(tmp_path, {"passed": True, "files": digests})
    return tmp_path


def test_files_as_they_were_pass(run: Path) -> None:
    (run / "adapter" / "README.md").write_text("another")
    require_result_unchanged(run, "push")
    require_file_unchanged(run / "adapter" / "lora.safetensors", "lora.init")


@pytest.mark.parametrize("name", ["lora.safetensors", "adapter_config.json"])
def test_a_changed_or_missing_file_is_refused_in_one_line(run: Path, name: str) -> None:
    (run / "adapter" / name).write_text("changed")
    with pytest.raises(CheckFailedError, match=f"lora.init: adapter/{name} in") as error:
        require_file_unchanged(run / "adapter" / "lora.safetensors", "lora.init")
    assert f"run dit-lora verify {run} again" in str(error.value)
    assert "\n" not in str(error.value)
    (run / "adapter" / name).unlink()
    assert find_changed_files(run) == [f"adapter/{name}"]


def test_what_has_no_digests_passes(run: Path, tmp_path: Path) -> None:
    write_verification(run, {"passed": True})
    (run / "adapter" / "lora.safetensors").write_text("changed")
    require_result_unchanged(run, "push")
    (run / VERIFICATION_FILE).unlink()
    require_result_unchanged(run, "push")
    require_file_unchanged(tmp_path / "elsewhere.safetensors", "lora.init")


@pytest.mark.parametrize("text", ["[]", '{"files": 3}', '{"files": null}'])
def test_a_record_of_another_form_is_one_line(run: Path, text: str) -> None:
    (run / VERIFICATION_FILE).write_text(text)
    with pytest.raises(DitLoraError, match="is damaged"):
        find_changed_files(run)
