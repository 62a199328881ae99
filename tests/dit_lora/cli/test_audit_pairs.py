"""`dit-lora audit` of pairs: in folders that options name, and by what a recipe's model takes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.data.synthetic.pairs import write_edit_pairs
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

SMOKE = Path(__file__).parents[3] / "recipes" / "smoke"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    write_edit_pairs(tmp_path / "pairs", pairs=4, height=64, width=64)
    return tmp_path / "pairs"


def audit(*arguments: object, code: int = 0) -> dict[str, Any]:
    """The audit's JSON."""
    output_path = Path(str(arguments[0])).parent / "audit.json"
    command = ["audit", *map(str, arguments), "--json", str(output_path)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == code, result.output
    report: dict[str, Any] = json.loads(output_path.read_text())
    return report


def test_a_folder_of_pairs_is_audited_by_itself(pairs: Path) -> None:
    folders = [f"data.reference_folders=[{pairs / 'before'}]", f"data.mask_folder={pairs / 'mask'}"]
    shutil.copy(pairs / "after" / "000.png", pairs / "before" / "000.png")
    (pairs / "before" / "001.png").unlink()
    report = audit(pairs / "after", *folders, code=1)
    codes = {sample["file"]: sample["codes"] for sample in report["samples"]}
    assert codes == {
        "000.png": ["reference_same"],
        "001.png": ["reference_missing"],
        "002.png": [],
        "003.png": [],
    }
    facts = report["samples"][1]["facts"]
    assert 0 < facts["learned"] < 1
    assert facts["likeness"][0] > 0.2


def test_options_of_a_folder_are_checked(pairs: Path) -> None:
    with pytest.raises(DitLoraError, match=r"train\.steps: needs a recipe .* data\.mask_folder"):
        audit(pairs, "train.steps=3")
    with pytest.raises(DitLoraError, match="got more than one of mask_column, mask_folder and alpha_mask"):
        audit(pairs, "data.mask_column=mask", "data.alpha_mask=true")


def test_a_recipe_says_how_many_references_and_how_large(pairs: Path) -> None:
    """Kontext takes one; it is enlarged to the size that the recipe gives references."""
    model = pairs.parent / "tiny"
    get_family("flux").build_tiny_checkpoint("flux-kontext", model, 0)
    lines = [json.loads(line) for line in (pairs / "metadata.jsonl").read_text().splitlines()]
    lines[1]["references"] *= 2
    (pairs / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = [f"model.path={model}", f"data.path={pairs}", f"data.cache={pairs.parent / 'cache'}"]
    changes += ["validation.prompts=[]", "validation.references=[]"]
    recipe = shutil.copy(SMOKE / "flux_kontext.yaml", pairs.parent)
    report = audit(recipe, *changes, code=1)
    codes = {sample["file"]: sample["codes"] for sample in report["samples"]}
    assert codes == {
        "after/000.png": [],
        "after/001.png": ["reference_unfit"],
        "after/002.png": [],
        "after/003.png": [],
    }
    (message,) = report["samples"][1]["reasons"]
    assert message == "reference_unfit: it has 2 references, and this model takes 1"
    report = audit(recipe, *changes, "data.reference_resolution=null", code=1)
    (message,) = report["samples"][0]["reasons"]
    assert message.startswith("reference_upscaled: its reference has 64 x 64 pixels, and is encoded in")
