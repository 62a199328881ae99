"""A family of another package, registered by an entry point, in a process that has its folder on the path."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from family_cases.case import captioned_images
from launching import ROOT, SCRIPT, launch_environment
from safetensors import safe_open
from safetensors.torch import load_file

from dit_lora import families

PACKAGE = ROOT / "tests" / "toy_package"


def run(*args: str, code: int = 0) -> str:
    """Standard output and standard error of Python with these arguments and the package on its path."""
    path = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, *args],
        env={**launch_environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


TRAIN_SAMPLE_EXPORT = """
import importlib.util, sys
from pathlib import Path
from dit_lora.commands.sample import SampleRequest, write_samples
from dit_lora.export.export import ExportRequest, export
from dit_lora.families import get_family

script, folder, *args = sys.argv[1:]
folder = Path(folder)
get_family("toy").build_tiny_checkpoint("toy-image", folder / "tiny", 0)
spec = importlib.util.spec_from_file_location("lora_recipe", script)
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)
recipe.main([*args, f"model.path={folder / 'tiny'}", f"run.dir={folder / 'run'}"])
write_samples(SampleRequest(folder / "run", ("a red disc",), inference_steps=2, output_folder=folder / "samples"))
export(ExportRequest((folder / "run",), "peft", folder / "peft"))
"""


@pytest.mark.slow
def test_it_trains_samples_and_exports(tmp_path: Path) -> None:
    captioned_images(tmp_path / "data")
    values = ["model.family=toy", f"data.path={tmp_path / 'data'}", f"data.cache={tmp_path / 'cache'}"]
    values += ["train.steps=2", "validation.inference_steps=2"]
    recipe = ROOT / "recipes" / "smoke" / "sd3.yaml"
    run("-c", TRAIN_SAMPLE_EXPORT, str(SCRIPT), str(tmp_path), str(recipe), *values)
    adapter = tmp_path / "run" / "adapter" / "pytorch_lora_weights.safetensors"
    assert {name.split(".")[-3] for name in load_file(adapter)} == {"to_q", "to_k", "to_v", "add_q_proj"}
    with safe_open(adapter, framework="pt") as opened:
        metadata = json.loads(opened.metadata()["dit_lora"])
    assert (metadata["family"], metadata["toy"]) == ("toy", True)
    assert list((tmp_path / "samples").glob("*.png"))
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["r"] == 4


def test_whatever_a_package_raises_when_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "family_without_settings.py").write_text("import os\nos.environ['NO_SUCH_SETTING']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(families, "_OTHER_FAMILIES", {"lost": "family_without_settings"})
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, "lost": "family_without_settings"})
    assert "lost" not in families.get_families()
    assert "warning: cannot load family lost from family_without_settings (KeyError" in capsys.readouterr().err


def test_a_broken_package_is_one_line_and_ends_nothing() -> None:
    code = (
        "from dit_lora.families import get_families, get_family; "
        "print(sorted(get_families())); get_families(); print(get_family('sd3').checkpoint_module)"
    )
    output = run("-c", code)
    assert "'toy'" in output
    assert "'broken'" not in output
    assert output.count("cannot load family broken from toy_family.missing (ModuleNotFoundError") == 1
    # A name of this package is this package's.
    assert "dit_lora.families.sd3.checkpoint" in output
    alone = run("-c", "from dit_lora.families import get_family; get_family('broken')", code=1)
    assert "DitLoraError: cannot load family broken" in alone
