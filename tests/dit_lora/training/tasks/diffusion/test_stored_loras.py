"""Where a recipe names a folder with the files of two experts, each expert's run takes its own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dit_lora.training.tasks.diffusion.stored_loras import _find_expert_file

PARTS = {"transformer": "high_noise", "transformer_2": "low_noise"}


def facts(part: str, parts: dict[str, str] | None = None) -> Any:
    return SimpleNamespace(part=part, expert_names=PARTS if parts is None else parts)


@pytest.mark.parametrize("told", [True, False])
def test_an_experts_own_file_is_found_by_header_or_by_name(tmp_path: Path, told: bool) -> None:
    for part, name in PARTS.items():
        header = {"dit_lora": f'{{"part": "{part}"}}'} if told else None
        save_file({"x": torch.ones(1)}, tmp_path / f"mine_{name}.safetensors", metadata=header)
    for part, name in PARTS.items():
        stored = _find_expert_file(facts(part), str(tmp_path))
        assert stored == tmp_path / f"mine_{name}.safetensors"
    assert _find_expert_file(facts("transformer", {}), str(tmp_path)) is None
    assert _find_expert_file(facts("transformer"), str(stored)) is None  # a file is what it is
    (tmp_path / "mine_low_noise.safetensors").unlink()
    assert _find_expert_file(facts("transformer_2"), str(tmp_path)) is None
