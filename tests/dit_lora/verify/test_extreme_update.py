"""A run that blew up without a value that is not finite is not certified, unless it was meant."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner
from verified import SMOKES, quick

from dit_lora.cli.app import app
from dit_lora.errors import DitLoraError
from dit_lora.verify.verified_files import VERIFICATION_FILE

Main = Callable[[list[str]], None]


def test_an_extreme_update_passes_where_it_is_meant(
    lora_main: Main, tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path: Path
) -> None:
    """A learning rate of 10: weights that no limit on values shows. By the recipe, and by the command."""

    def trained(name: str, *more: str) -> None:
        args = quick(
            shape_clips,
            tmp_path,
            f"model.path={tiny_checkpoints['cogvideox-2b']}",
            "optim.groups.adapter.lr=10",
            *more,
        )
        overrides = (f"data.cache={tmp_path / 'cache'}", f"run.dir={tmp_path / name}")
        lora_main([str(SMOKES / "cogvideox.yaml"), *args, *overrides])

    with pytest.raises(DitLoraError) as error:
        trained("refused")
    assert error.value.exit_code == 1
    assert "effect: extreme, an update of more than 10 times" in str(error.value)
    trained("meant", "guard.allow_extreme_update=true")
    assert json.loads((tmp_path / "meant" / VERIFICATION_FILE).read_text())["passed"]
    for options, code in (([], 1), (["--allow-extreme-update"], 0)):
        result = CliRunner().invoke(app, ["verify", str(tmp_path / "refused"), *options])
        assert result.exit_code == code, result.output
