"""What is fetched of a repository that a recipe names."""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from dit_lora.config.recipe import ModelConfig
from dit_lora.environment import hub_files
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES, get_family


@pytest.mark.parametrize("name", CHAT_FAMILIES)
def test_weights_in_a_repositorys_root_are_fetched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Diffusers' lie in folders of components, and a root has other programs' beside them."""
    requests: list[str] = []

    def downloaded(repository: str, files: Sequence[str], *_: object) -> Path:
        requests.extend(files)
        raise DitLoraError("not here")

    monkeypatch.setattr(hub_files, "_download_files", downloaded)
    with pytest.raises(DitLoraError, match="not here"):
        get_family(name).open(ModelConfig(family=name, path="me/chat"))
    for file in ("model.safetensors", "model-00002-of-00005.safetensors", "config.json"):
        assert any(fnmatch(file, pattern) for pattern in requests), (file, requests)
