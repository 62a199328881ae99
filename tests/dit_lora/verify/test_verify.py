"""`dit-lora verify`: a sound result passes, and each thing that can be wrong with one is named by its check."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_runs import common, write_data
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from verified import SMOKES, Change, Tensors, changed, failing, quick

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.cli.app import app
from dit_lora.commands.verify import verify_adapter
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.training.tasks.diffusion import task
from dit_lora.verify.verified_files import VERIFICATION_FILE

Main = Callable[[list[str]], None]
CHAT_FILE = "adapter_model.safetensors"
BLOCK = "transformer.transformer_blocks.1.attn1.to_q"
Q_PROJ = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
NAMES = ["keys", "finite", "effect", "scale", "output"]


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What a run said, by its name."""
    return {}


@pytest.fixture(scope="module")
def run(
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    said: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A finished run of a tiny CogVideoX that keeps averages and trains some of the base."""
    output_folder = tmp_path_factory.mktemp("verify")
    args = quick(
        shape_clips,
        output_folder,
        f"model.path={tiny_checkpoints['cogvideox-2b']}",
        "train.ema=0.9",
        "optim.groups.connector={lr: 1.0e-3}",
    )
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        lora_main([str(SMOKES / "cogvideox.yaml"), *args])
    said["cogvideox"] = output.getvalue()
    return output_folder / "run"


@pytest.fixture(scope="module")
def chat_run(lora_main: Main, tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a tiny VideoChat2, which trains a LoRA and base weights."""
    output_folder = tmp_path_factory.mktemp("verify_chat")
    base = tiny_checkpoints["videochat2-mistral"]
    args = common("videochat2", base, write_data(output_folder / "data"), output_folder)
    lora_main([*args, f"run.dir={output_folder / 'run'}", "train.steps=2", "guard.preflight=false"])
    return output_folder / "run"


def test_a_run_verifies_its_own_result_and_says_so(run: Path, said: dict[str, str]) -> None:
    record = json.loads((run / VERIFICATION_FILE).read_text())
    assert record["passed"], record
    assert list(record["checks"]) == NAMES
    assert record["adapter"] == f"adapter/{ADAPTER_FILE}"
    assert record["base_model"] == "cogvideox-2b"
    assert str(run.parent) not in json.dumps(record)
    modules = record["modules"]
    assert len(modules) == 8
    assert all(0 < module["relative"] < 0.1 for module in modules)
    (line,) = [line for line in said["cogvideox"].splitlines() if line.startswith("verified: ")]
    assert line.startswith("verified: 8 modules, update ")
    assert line.endswith("% of their weights; output as trained")


def test_the_command_finds_what_the_run_found(run: Path) -> None:
    """In a model loaded from the base's files: of the run's folder, the adapter's, and the file."""
    verification = json.loads((run / VERIFICATION_FILE).read_text())
    for target in (run, run / "adapter", run / "adapter" / ADAPTER_FILE):
        result = CliRunner().invoke(app, ["verify", str(target), "--json"])
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        assert record["modules"] == verification["modules"]
        assert record["checks"].keys() == verification["checks"].keys()
    output = CliRunner().invoke(app, ["verify", str(run)]).stdout
    assert max(map(len, output.splitlines())) <= 80
    message_text = " ".join(output.split())
    assert "loads all 16 tensors of 8 modules, and 16 base weights" in message_text
    assert "rank 4, alpha 8, as in the header and metadata; updates are scaled by 2" in message_text
    assert "as trained: " in output
    assert output.endswith("every check passed\n")


def nan(tensors: Tensors, _header: dict[str, str]) -> None:
    tensors[f"{BLOCK}.lora_A.weight"].view(-1)[7] = torch.nan


def renamed(tensors: Tensors, _header: dict[str, str]) -> Tensors:
    return {name.replace("blocks.1.attn1.to_q", "layers.1.q"): t for name, t in tensors.items()}


def other_prefix(tensors: Tensors, _header: dict[str, str]) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def without_layer(tensors: Tensors, _header: dict[str, str]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(BLOCK)}


def without_b(tensors: Tensors, _header: dict[str, str]) -> Tensors:
    del tensors[f"{BLOCK}.lora_B.weight"]
    return tensors


def another(tensors: Tensors, _header: dict[str, str]) -> None:
    tensors["transformer.proj_out.lora_X.weight"] = torch.ones(2)


def zero_b(tensors: Tensors, _header: dict[str, str]) -> None:
    for name, tensor in tensors.items():
        if ".lora_B." in name:
            tensor.zero_()


def one_dead(tensors: Tensors, _header: dict[str, str]) -> None:
    tensors[f"{BLOCK}.lora_B.weight"].zero_()


def one_strong(tensors: Tensors, _header: dict[str, str]) -> None:
    tensors[f"{BLOCK}.lora_B.weight"] *= 1000


def one_extreme(tensors: Tensors, _header: dict[str, str]) -> None:
    tensors[f"{BLOCK}.lora_B.weight"] *= 1e5


def alpha(_tensors: Tensors, header: dict[str, str]) -> None:
    config = json.loads(header["lora_adapter_metadata"]) | {"transformer.lora_alpha": 16}
    header["lora_adapter_metadata"] = json.dumps(config)


def alpha_everywhere(tensors: Tensors, header: dict[str, str]) -> None:
    alpha(tensors, header)
    header["dit_lora"] = json.dumps(json.loads(header["dit_lora"]) | {"alpha": 16})


def no_alpha(_tensors: Tensors, header: dict[str, str]) -> None:
    del header["lora_adapter_metadata"]


def rank(tensors: Tensors, _header: dict[str, str]) -> None:
    tensors[f"{BLOCK}.lora_A.weight"] = tensors[f"{BLOCK}.lora_A.weight"][:2].clone()


def swapped(tensors: Tensors, _header: dict[str, str]) -> None:
    """Two layers of equal size exchanged, which no other check can see."""
    for part in ("lora_A", "lora_B"):
        first_key, second_key = (
            f"{BLOCK}.{part}.weight",
            f"{BLOCK.replace('to_q', 'to_v')}.{part}.weight",
        )
        tensors[first_key], tensors[second_key] = tensors[second_key], tensors[first_key]


DIFFUSION: dict[Change, tuple[set[str], str]] = {
    nan: ({"finite", "output"}, "blocks.1.attn1.to_q.lora_A.weight has 1 NaN among 256 values"),
    renamed: ({"keys", "output"}, "layers.1.q.lora_A.weight: CogVideoXPipeline does not load it"),
    other_prefix: ({"keys", "effect", "output"}, "model.transformer.transformer_blocks.0.attn1"),
    without_layer: ({"keys", "output"}, "1.attn1.to_q: the header's targets match it"),
    without_b: ({"keys", "output"}, "blocks.1.attn1.to_q.lora_B.weight: not in the file"),
    another: ({"keys", "output"}, "proj_out.lora_X.weight"),
    zero_b: ({"effect", "output"}, "the updates of all 8 modules are zero"),
    one_dead: (
        {"output"},
        "dead, their update is zero or lost in rounding:\n  - transformer_blocks.1.attn1.to_q",
    ),
    one_strong: ({"output"}, "very strong: the update is larger than the weight"),
    one_extreme: ({"effect", "output"}, "extreme, an update of more than 10 times the weight"),
    alpha: ({"scale", "output"}, "alpha 16 in the header, but 8 was trained"),
    alpha_everywhere: ({"output"}, "the adapter does not act as trained: the base's output is as"),
    no_alpha: ({"scale", "output"}, "the header does not say rank and alpha: loaders take alpha 4"),
    rank: ({"keys", "effect", "scale", "output"}, "to_q: lora_A has rank 2, lora_B 4"),
    swapped: ({"output"}, "the adapter does not act as trained"),
}


@pytest.mark.parametrize("change", DIFFUSION, ids=lambda change: change.__name__)
def test_what_is_wrong_with_a_diffusion_adapter_is_named(
    change: Change, run: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    failed, expected_message = DIFFUSION[change]
    folder = changed(run / "adapter", tmp_path / "adapter", change)
    verification = verify_adapter(folder, str(tiny_checkpoints["cogvideox-2b"]))
    assert failing(verification) == failed, verification.format_lines()
    assert any(expected_message in check.message for check in verification.checks.values()), (
        verification.format_lines()
    )
    assert not verification.passed


def test_the_command_exits_1_where_a_check_fails(run: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(run / "adapter", tmp_path / "adapter", alpha)
    base = ["--model", str(tiny_checkpoints["cogvideox-2b"])]
    result = CliRunner().invoke(app, ["verify", str(folder), *base])
    assert result.exit_code == 1
    assert "FAIL scale" in result.stdout
    assert "now by" not in result.stdout
    assert result.stdout.endswith("failed: scale, output\n")


def test_another_base_is_named_and_not_the_adapter(run: Path, tmp_path: Path) -> None:
    get_family("cogvideox").build_tiny_checkpoint("cogvideox-2b", tmp_path / "other", 1)
    # What was trained of the base comes with the adapter: the rest differs.
    verification = verify_adapter(run, str(tmp_path / "other"))
    assert failing(verification) == {"output"}
    assert "the base differs: without the adapter its output is" in verification.checks["output"].message
    assert "cogvideox-2b, with --model" in verification.checks["output"].message


def test_base_weights_are_checked_too(run: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    base = str(tiny_checkpoints["cogvideox-2b"])

    def not_finite(tensors: Tensors, _header: dict[str, str]) -> None:
        tensors["proj_out.weight"].view(-1)[0] = torch.inf

    def unknown(tensors: Tensors, _header: dict[str, str]) -> None:
        tensors["proj_in.weight"] = torch.ones(2)

    bad = changed(run / "adapter", tmp_path / "bad", not_finite, BASE_FILE)
    verification = verify_adapter(bad, base)
    assert failing(verification) == {"finite", "output"}
    assert "proj_out.weight has 1 Inf" in verification.checks["finite"].message
    changed_folder = changed(run / "adapter", tmp_path / "other", unknown, BASE_FILE)
    verification = verify_adapter(changed_folder, base)
    assert "proj_in.weight" in verification.checks["keys"].message
    (tmp_path / "other" / BASE_FILE).unlink()  # the base as it was before
    verification = verify_adapter(changed_folder, base)
    assert "the base differs" in verification.checks["output"].message


def test_an_adapter_of_others_passes_and_says_what_it_does_not_say(
    run: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    def stranger(_tensors: Tensors, header: dict[str, str]) -> None:
        header.clear()

    folder = changed(run / "adapter", tmp_path / "adapter", stranger)
    verification = verify_adapter(folder, str(tiny_checkpoints["cogvideox-2b"]))
    assert verification.passed, verification.format_lines()
    assert "alpha 4, not recorded, so alpha equals rank" in verification.checks["scale"].message
    assert verification.checks["output"].message.startswith("not recorded")
    with pytest.raises(DitLoraError, match="does not name its base model; give --model"):
        verify_adapter(folder)


def test_what_cannot_be_checked_is_one_line_and_an_exit_code(
    run: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    adapter, base = run / "adapter" / ADAPTER_FILE, str(tiny_checkpoints["cogvideox-2b"])
    torn_file, text = tmp_path / "torn.safetensors", tmp_path / "text.safetensors"
    torn_file.write_bytes(adapter.read_bytes()[:-50])
    text.write_text("not tensors")
    (tmp_path / "empty").mkdir()
    cases: list[tuple[Path, str | None, int, str]] = [
        (torn_file, base, 1, "it is incomplete or not a safetensors file"),
        (text, base, 1, "it is incomplete or not a safetensors file"),
        (tmp_path / "nothing", None, 2, "does not exist"),
        (tmp_path / "empty", None, 2, "no adapter in"),
        (adapter, str(tmp_path / "away"), 2, "away"),
        (adapter, str(tiny_checkpoints["sana-600m"]), 2, "is a SanaPipeline checkpoint; family"),
        (tiny_checkpoints["cogvideox-2b"], base, 2, "--model does not apply"),
    ]
    for target, model, code, expected_message in cases:
        with pytest.raises(DitLoraError, match=expected_message) as error:
            verify_adapter(target, model)
        assert error.value.exit_code == code, expected_message
        assert "\n" not in str(error.value)


def test_a_result_that_fails_ends_the_run_with_1_and_stays(
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save = task.save_adapter

    def spoiled(*args: Any) -> Path:
        path = save(*args)
        # Checkpoints have adapters too.
        if path.parent.name != "adapter":
            return path
        changed(path.parent, tmp_path / "spoiled", alpha)
        shutil.copy(tmp_path / "spoiled" / ADAPTER_FILE, path)
        return path

    monkeypatch.setattr(task, "save_adapter", spoiled)
    args = quick(shape_clips, tmp_path, f"model.path={tiny_checkpoints['cogvideox-2b']}")
    cache = f"data.cache={run.parent / 'cache'}"
    with pytest.raises(DitLoraError) as error:
        lora_main([str(SMOKES / "cogvideox.yaml"), *args, cache])
    assert error.value.exit_code == 1
    assert "scale: rank and alpha do not agree" in str(error.value)
    assert (tmp_path / "run" / "adapter" / ADAPTER_FILE).is_file()
    assert (tmp_path / "run" / "report.html").is_file()
    record = json.loads((tmp_path / "run" / VERIFICATION_FILE).read_text())
    assert not record["passed"]
    assert {name for name, check in record["checks"].items() if not check["passed"]} == {
        "scale",
        "output",
    }


def test_a_chat_run_and_the_command_agree(chat_run: Path) -> None:
    written = json.loads((chat_run / VERIFICATION_FILE).read_text())
    assert written["passed"], written
    verification = verify_adapter(chat_run)
    assert verification.passed, verification.format_lines()
    assert verification.to_dict()["modules"] == written["modules"]
    assert "loads all 30 tensors of 15 modules, and" in verification.checks["keys"].message


def chat_nan(tensors: Tensors, _header: dict[str, str]) -> None:
    tensors[f"{Q_PROJ}.lora_B.weight"].view(-1)[0] = torch.nan


def chat_renamed(tensors: Tensors, _header: dict[str, str]) -> Tensors:
    return {name.replace("layers.0.self_attn.q_proj", "q"): t for name, t in tensors.items()}


def chat_dead(tensors: Tensors, header: dict[str, str]) -> None:
    zero_b(tensors, header)


CHAT: dict[Change, tuple[set[str], str]] = {
    chat_nan: ({"finite", "output"}, "q_proj.lora_B.weight has 1 NaN"),
    chat_renamed: ({"keys", "output"}, "q_proj.lora_A.weight: not in the file"),
    chat_dead: ({"effect", "output"}, "the updates of all 15 modules are zero"),
}


@pytest.mark.parametrize("change", CHAT, ids=lambda change: change.__name__)
def test_what_is_wrong_with_a_chat_adapter_is_named(
    change: Change, chat_run: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    failed, expected_message = CHAT[change]
    folder = changed(chat_run / "adapter", tmp_path / "adapter", change, CHAT_FILE)
    verification = verify_adapter(folder, str(tiny_checkpoints["videochat2-mistral"]))
    assert failing(verification) == failed, verification.format_lines()
    assert any(expected_message in check.message for check in verification.checks.values()), (
        verification.format_lines()
    )


def test_the_scale_and_the_base_of_a_chat_adapter_are_checked(
    chat_run: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(chat_run / "adapter", tmp_path / "adapter"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 32}))
    verification = verify_adapter(folder, str(tiny_checkpoints["videochat2-mistral"]))
    assert failing(verification) == {"scale", "output"}
    assert "alpha 32 in the header, but 8 was trained" in verification.checks["scale"].message
    get_family("videochat2").build_tiny_checkpoint("videochat2-mistral", tmp_path / "other", 1)
    verification = verify_adapter(chat_run, str(tmp_path / "other"))
    assert failing(verification) == {"output"}
    assert "the base differs" in verification.checks["output"].message


def test_a_whole_pipeline_is_verified(
    lora_main: Main, tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path: Path
) -> None:
    """`train.mode: full`, whose result has the averages."""
    args = quick(shape_clips, tmp_path, "train.ema=0.9", "data.height=64", "data.width=64")
    base = f"model.path={tiny_checkpoints['video-dit-text']}"
    lora_main([str(SMOKES / "video_dit.yaml"), base, *args])
    run = tmp_path / "run"
    record = json.loads((run / VERIFICATION_FILE).read_text())
    assert record["passed"], record
    assert record["checks"]["output"]["words"].startswith("as trained")
    assert verify_adapter(run).passed
    file = run / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors, name = load_file(file), "proj_out.weight"
    sound = tensors[name].clone()
    for value, failed in ((1.01 * sound, {"output"}), (sound / 0, {"finite", "output"})):
        save_file({**tensors, name: value}, file, metadata={"format": "pt"})
        assert failing(verify_adapter(run)) == failed
    save_file({n: t for n, t in tensors.items() if n != name}, file, metadata={"format": "pt"})
    verification = verify_adapter(run)
    assert failing(verification) == {"keys", "output"}
    assert f"{name}: not in the files" in verification.checks["keys"].message
