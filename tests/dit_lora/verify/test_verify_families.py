"""Adapters of every family verify, on one process and on ranks, with every option on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_runs import common, write_data
from family_cases.qwen_image import small_references
from launching import on_ranks
from topologies import Case, run_all
from typer.testing import CliRunner
from verified import SMOKES, failing, quick

from dit_lora.cli.app import app
from dit_lora.commands.verify import verify_adapter
from dit_lora.families import DIFFUSION_FAMILIES, get_family
from dit_lora.verify.verified_files import VERIFICATION_FILE

pytestmark = pytest.mark.thorough

Main = Callable[[list[str]], None]
DATA = {"sana": ("--frames=1",), "dit": ("--classes",), "video_dit": ("--classes", "--frames=9")}
FURTHER = {
    "flux-schnell": ["train.guidance_scale=null"],
    "wan-2.2-t2v-a14b": ["model.part=transformer_2"],
    "wan-2.2-i2v-a14b": ["model.part=transformer_2"],
}
"""What their recipes need that those of the family's first models do not."""
PAIRS = ("flux-kontext", "qwen-image-edit", "qwen-image-edit-plus")
"""Variants that make pictures from references."""


@pytest.mark.parametrize(
    ("family", "variant"),
    [(name, variant) for name in DIFFUSION_FAMILIES for variant in get_family(name).tiny_variants],
)
def test_every_diffusion_family_verifies_what_it_saves(
    family: str,
    variant: str,
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A base of another seed is detected for every kind of conditioning."""
    small_references(monkeypatch)
    classes = ("--frames=9",) if variant == "video-dit-text" else DATA.get(family, ())
    classes = ("--pairs",) if variant in PAIRS else classes
    result = CliRunner().invoke(app, ["tiny", "shapes", str(tmp_path / "data"), *classes])
    assert result.exit_code == 0, result.output
    recipe = [str(SMOKES / f"{family}.yaml"), f"model.path={tiny_checkpoints[variant]}"]
    args = [argument for argument in quick(tmp_path / "data", tmp_path) if "height" not in argument]
    extra_overrides = FURTHER.get(variant, [])
    lora_main([*recipe, *(argument for argument in args if "width" not in argument), *extra_overrides])
    record = json.loads((tmp_path / "run" / VERIFICATION_FILE).read_text())
    assert record["passed"], record
    assert record["checks"]["output"]["words"].startswith("as trained")
    assert verify_adapter(tmp_path / "run").passed
    if (tmp_path / "run" / "model").exists():
        return
    get_family(family).build_tiny_checkpoint(variant, tmp_path / "other", 1)
    verification = verify_adapter(tmp_path / "run", str(tmp_path / "other"))
    assert failing(verification) == {"output"}
    assert "the base differs" in verification.checks["output"].message


@pytest.mark.parametrize(
    ("smoke", "variant"),
    [
        ("videochat2", "videochat2-phi3"),
        ("videochat2", "videochat2-hd"),
        ("llava_next_video", "llava-next-video"),
        ("qwen", "qwen2.5-vl"),
        ("qwen", "qwen3-vl"),
        ("smolvlm2", "smolvlm2"),
    ],
)
def test_other_chat_models_verify_what_they_save(
    smoke: str, variant: str, lora_main: Main, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    data = write_data(tmp_path / "data")
    args = common(smoke, tiny_checkpoints[variant], data, tmp_path)
    lora_main([*args, f"run.dir={tmp_path / 'run'}", "train.steps=2", "guard.preflight=false"])
    assert json.loads((tmp_path / "run" / VERIFICATION_FILE).read_text())["passed"]
    assert verify_adapter(tmp_path / "run").passed


def test_levers_change_nothing_of_what_is_verified(
    lora_main: Main, tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path: Path
) -> None:
    """A quantised, an offloaded and a bf16 base."""
    levers = {
        "int8": ["model.quantize=int8"],
        "offload": ["train.offload=group", "train.checkpointing=full"],
        "bf16": ["model.dtype=bf16"],
    }
    base = f"model.path={tiny_checkpoints['cogvideox-5b']}"
    for name, lever_overrides in levers.items():
        args = quick(shape_clips, tmp_path, base, *lever_overrides, f"run.dir={tmp_path / name}")
        lora_main([str(SMOKES / "cogvideox.yaml"), *args])
        output_check = json.loads((tmp_path / name / VERIFICATION_FILE).read_text())["checks"]["output"]
        assert output_check["words"].startswith("as trained"), name
        assert verify_adapter(tmp_path / name).passed, name


@pytest.mark.slow
def test_ranks_note_together_and_the_command_compares(
    tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path: Path
) -> None:
    """Sharded weights are not compared when the run ends, and the record says so."""
    base = f"model.path={tiny_checkpoints['cogvideox-5b']}"
    overrides_by_name = {"fsdp2": ["train.ema=0.9"], "context": ["train.context_parallel=2"]}
    cases = []
    for name, overrides in overrides_by_name.items():
        args = quick(shape_clips, tmp_path, base, *overrides, f"run.dir={tmp_path / name}")
        recipe = str(SMOKES / "cogvideox.yaml")
        cases.append(Case("fsdp2" if name == "fsdp2" else "ddp", (recipe, *args)))
    for results in on_ranks(2, run_all, cases):
        assert [(result.exit_code, result.error) for result in results] == [(0, "")] * 2
    for name, expected_message in (
        ("fsdp2", "not compared: the run's weights are"),
        ("context", "as trained"),
    ):
        record = json.loads((tmp_path / name / VERIFICATION_FILE).read_text())
        assert record["checks"]["output"]["words"].startswith(expected_message)
        assert record["passed"]
        verification = verify_adapter(tmp_path / name)
        assert verification.checks["output"].message.startswith("as trained")
        for overrides, recorded_module in zip(verification.modules, record["modules"], strict=True):
            assert overrides.relative_norm == pytest.approx(recorded_module["relative"], rel=1e-5)
