"""Which files of a Hub repository are downloaded, and weights that a checkpoint's files lack."""

import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def test_weights_that_the_files_name_otherwise_are_listed(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Diffusers would go on with weights on the meta device, and fail when they are moved."""
    path = Path(shutil.copytree(tiny_checkpoints["sd3.5-medium"], tmp_path / "renamed"))
    file = path / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name.replace("proj_out", "final_layer.linear"): t for name, t in load_file(file).items()}, file)
    checkpoint = get_family("sd3").open(ModelConfig(family="sd3", path=str(path)))
    with pytest.raises(DitLoraError, match=r"lack weights of SD3Transformer2DModel") as error:
        checkpoint.denoiser.load_transformer(torch.float32)
    assert "  - proj_out.weight\n  - proj_out.bias" in str(error.value)
