"""The command: instant, plain about mistakes, and its verbs do what they say."""

import json
import pydoc
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mypy.api
import pytest
import typer
from typer.testing import CliRunner

import dit_lora
from dit_lora import guard
from dit_lora.cli import main
from dit_lora.cli.app import app
from dit_lora.data.media.video import read_frames, read_header
from dit_lora.errors import DitLoraError
from dit_lora.families import FAMILIES

runner = CliRunner()


def invoke(*arguments: object) -> str:
    result = runner.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def heavy_imports(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {"torch", "diffusers", "transformers", "pydantic", "numpy"} & set(process.stdout.split())


@pytest.mark.parametrize("code", ["import dit_lora", "import dit_lora.cli.app"])
def test_importing_is_instant_because_nothing_heavy_is_imported(code: str) -> None:
    assert not heavy_imports(code)


def test_listing_recipes_needs_no_recipe_classes() -> None:
    """Their types take as long to build as everything else that the command does."""
    code = "from dit_lora.cli.app import app; app(['recipes'], standalone_mode=False)"
    script = f"{code}\nimport sys; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"dit_lora.config.recipe", "psutil", "torch"} & set(process.stdout.split())


def test_reports_and_the_audit_of_a_folder_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("{}")
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "events.jsonl").write_text("")
    script = f"""
import sys
from dit_lora.cli.app import app
for folder in ("run", "guard"):
    app(["report", "{tmp_path}/" + folder], standalone_mode=False)
import dit_lora.commands.audit, dit_lora.studio.app
print(*sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *reports, modules = process.stdout.splitlines()
    assert reports == [f"{tmp_path}/{folder}/report.html" for folder in ("run", "guard")]
    assert not {"torch", "peft", "diffusers"} & set(modules.split())


def test_public_names_are_listed_and_documented() -> None:
    assert dir(dit_lora) == sorted(dit_lora.__all__)
    text = pydoc.render_doc(dit_lora, renderer=pydoc.plaintext)
    # `fuse` is a package too.
    for name in {*dit_lora.__all__} - {"fuse", "__version__"}:
        assert re.search(rf"^    (class )?{name}\(", text, re.MULTILINE), name


def test_a_misspelled_name_is_one_for_mypy(tmp_path: Path) -> None:
    source = tmp_path / "script.py"
    source.write_text("import dit_lora\nfrom dit_lora import guard\ndit_lora.fuse\ndit_lora.fuze\nguard.Gard\n")
    packages = [str(path) for path in (dit_lora.__file__, guard.__file__) if path]
    options = ["--follow-imports=skip", "--no-incremental", "--config-file=", "--ignore-missing-imports"]
    output, _, _ = mypy.api.run([*options, *packages, str(source)])
    assert 'Module has no attribute "fuze"' in output
    assert 'Module has no attribute "Gard"' in output
    assert '"fuse"' not in output


def test_the_version_is_the_packages() -> None:
    assert invoke("--version").strip() == dit_lora.__version__


def test_help_lists_every_verb() -> None:
    output = invoke("--help")
    assert "[key.path=value ...]" in " ".join(output.split())
    for verb in ("doctor", "recipes", "tiny", "sample", "report", "convert"):
        assert verb in output


def list_commands(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield (*names, name), command
        if hasattr(command, "commands"):
            yield from list_commands(command, (*names, name))


def test_help_is_for_users_and_fits_a_terminal() -> None:
    commands = dict(list_commands(typer.main.get_command(app)))
    assert len(commands) > 20
    for names, command in commands.items():
        result = runner.invoke(app, [*names, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
        assert result.exit_code == 0
        text = re.sub("\x1b\\[[0-9;]*m", "", result.stdout)
        assert max(map(len, text.splitlines())) <= 80, names
        # Types of Python, and the bounds of 64-bit numbers.
        assert not re.findall(r"<(?:class|str|int|bool|float|path|list)|INTEGER|\d{12}", text), names
        # Neither options nor verbs go without a sentence, nor does one begin in the middle of it.
        sentences = [command.help, *(param.help for param in command.params)]
        assert all(text and text[0] != text[0].lower() for text in sentences), names


def test_doctor_speaks_json() -> None:
    result = runner.invoke(app, ["doctor", "--json"])
    report = json.loads(result.output)
    assert report["packages"]["torch"]["version"] == version("torch")
    assert result.exit_code == (0 if report["ok"] else 1)


def test_shapes_writes_real_h264_with_captions(tmp_path: Path) -> None:
    size = ("--frames", 9, "--height", 32, "--width", 48)
    invoke("tiny", "shapes", tmp_path / "clips", "--clips", 3, *size)
    lines = (tmp_path / "clips" / "metadata.jsonl").read_text().splitlines()
    assert len(lines) == 3
    for line in lines:
        path = tmp_path / "clips" / json.loads(line)["file_name"]
        assert (read_header(path).height, read_header(path).width) == (32, 48)
        video = read_frames(path, frames=9, height=32, width=48, fps=8).float()
        assert (video[0] - video[-1]).abs().mean() > 5  # something moves


def test_shapes_of_one_frame_are_images_with_captions(tmp_path: Path) -> None:
    size = ("--frames", 1, "--height", 33, "--width", 47)
    invoke("tiny", "shapes", tmp_path / "images", "--clips", 3, *size)
    files = sorted((tmp_path / "images").glob("*.png"))
    assert len(files) == 3
    assert len({f.with_suffix(".txt").read_text() for f in files}) == 3
    pixels = [read_frames(f, frames=1, height=33, width=47, fps=None).float() for f in files]
    assert all(image.std() > 5 for image in pixels)
    assert (pixels[0] - pixels[1]).abs().mean() > 5


def test_class_folders_of_clips_differ_by_class_and_within_one(tmp_path: Path) -> None:
    size = ("--frames", 4, "--height", 32, "--width", 48)
    invoke("tiny", "shapes", tmp_path / "clips", "--classes", "--clips", 12, *size)
    files = sorted((tmp_path / "clips").rglob("*.mp4"))
    assert len({path.parent.name for path in files}) == 6
    assert [path.name for path in files] == ["000.mp4", "001.mp4"] * 6
    videos = [read_frames(path, frames=4, height=32, width=48, fps=8).float() for path in files]
    assert (videos[0][0] - videos[0][-1]).abs().mean() > 5  # something moves
    assert (videos[0] - videos[1]).abs().mean() > 2
    assert (videos[0] - videos[2]).abs().mean() > 2


def test_class_folders_are_of_images_by_default(tmp_path: Path) -> None:
    size = ("--height", 33, "--width", 47)
    invoke("tiny", "shapes", tmp_path / "images", "--classes", "--clips", 7, *size)
    files = sorted((tmp_path / "images").rglob("*.png"))
    assert len({path.parent.name for path in files}) == 6
    assert len(files) == 7


def test_pairs_are_images_by_default_and_exclude_other_kinds(tmp_path: Path) -> None:
    output = invoke("tiny", "shapes", tmp_path / "pairs", "--pairs", "--clips", 2)
    assert output == f"wrote 2 images, each with the picture before the edit to {tmp_path / 'pairs'}\n"
    files = sorted(path.parent.name for path in (tmp_path / "pairs").rglob("*.png"))
    assert files == ["after", "after", "before", "before", "mask", "mask"]
    for option in ("--chat", "--classes"):
        result = runner.invoke(app, ["tiny", "shapes", str(tmp_path / "other"), "--pairs", option])
        assert isinstance(result.exception, DitLoraError)
        assert "--pairs" in str(result.exception)
    assert not (tmp_path / "other").exists()


def test_files_that_samples_are_made_from_are_looked_for_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    (tmp_path / "there.png").write_bytes(b"a picture")
    files_options = ["--reference", "there.png", "--reference", "gone.png", "--image", "lost.png"]
    files = [str(tmp_path / word) if word.endswith(".png") else word for word in files_options]
    result = runner.invoke(app, ["sample", "no run", "--prompt", "x", *files])
    assert str(result.exception) == (
        f"no such file: --image {tmp_path / 'lost.png'}, --reference {tmp_path / 'gone.png'}"
    )


def test_tiny_checkpoints_are_listed_as_the_families_name_them() -> None:
    lines = invoke("recipes", "--families").splitlines()
    assert [line.split(":")[0] for line in lines if line[0] != " "] == list(FAMILIES)
    assert max(map(len, lines)) <= 80
    sana = ["sana-600m", "sana-1.5", "sana-fp16"]
    assert f"sana: tiny {', '.join(sana)}" in lines
    report = invoke("recipes", "--families", "--family", "sana", "--json")
    assert json.loads(report) == {"families": {"sana": sana}}


def test_tiny_builds_what_the_stock_pipeline_loads(tmp_path: Path) -> None:
    from diffusers import CogVideoXPipeline

    invoke("tiny", "cogvideox-5b", tmp_path / "model")
    pipeline = CogVideoXPipeline.from_pretrained(tmp_path / "model")
    assert pipeline.transformer.config.use_rotary_positional_embeddings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["tiny", "cogvideox-9b", "out"],
            "unknown tiny checkpoint 'cogvideox-9b'; choose one of anima, chroma, cogvideox-2b",
        ),
        (["tiny", "cogvideox-2b", "."], "exists; choose another folder"),
        (["tiny", "shapes", "."], "exists; choose another folder"),
        (["tiny", "shapes", "out", "--height", "33"], "height and width must be even for H.264; got 33x96"),
        (["tiny", "shapes", "out", "--seed", "0"], "--seed is an option of a checkpoint; remove"),
        (["tiny", "cogvideox-2b", "out", "--frames", "1"], "--frames is an option of tiny shapes"),
        (["tiny", "cogvideox-2b", "out", "--chat"], "--chat is an option of tiny shapes; remove"),
        (["tiny", "cogvideox-2b", "out", "--seed", str(2**63)], r"--seed must be below 2\^63"),
        (["sample", "x", "--prompt", "x", "--guidance-scale", "inf"], "--guidance-scale must be finite; got inf"),
        (["sample", "nowhere", "--prompt", "x"], "no adapter in nowhere"),
        (["tiny", "cogvideox-2b", "/proc/x"], "cannot create /proc/x"),
        (["tiny", "shapes", "/proc/x"], "cannot create /proc/x"),
        (["report", "."], "config.yaml"),
        (["report", "notes.bin"], "notes.bin is not a run: it has no config.yaml"),
        (["push", "notes.bin", "me/it", "--dry-run"], "notes.bin is not a run: it has no config.yaml"),
        (["replay", "notes.bin"], "notes.bin is not a complete bundle: it has no"),
        (["plan", "folder.yaml"], "cannot read the recipe folder.yaml: Is a directory"),
        (["train", "folder.yaml"], "cannot read the recipe folder.yaml: Is a directory"),
        (["guard", "notes.bin"], "notes.bin is not valid Python: "),
        (["guard", "-m", "no_such.module"], "no module named no_such.module can be run"),
        (["guard", "half.py"], "half.py is not valid Python: .*line 1"),
        (["guard", "folder.yaml"], "folder.yaml is a folder without __main__.py; give a Python script"),
        (["caption", "notes.bin", "--model", "tiny"], "notes.bin is not a folder; give the folder with your clips"),
        (["plan", "notes.bin"], "notes.bin is not UTF-8 text"),
        (["doctor", "--config-file", "folder.yaml"], "cannot read the Accelerate config folder.yaml: Is a directory"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.bin").write_bytes(bytes(range(256)))
    (tmp_path / "half.py").write_text("def train(:\n")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(DitLoraError, match=message.replace("(", r"\(")) as refused:
        runner.invoke(app, arguments, catch_exceptions=False)
    assert "Errno" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["plan", f"{'x' * 300}.yaml"], ["quarantine", "x" * 300], ["report", "loop"]])
def test_paths_that_the_file_system_refuses_are_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(sys, "argv", ["dit-lora", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_ctrl_c_during_the_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "dit_lora.cli.app")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=interrupt)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_from_the_shell_a_mistake_has_its_exit_code_and_no_traceback() -> None:
    command = [sys.executable, "-c", "from dit_lora.cli import main; main()", "tiny", "x", "y"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr.startswith("error: unknown tiny checkpoint 'x'")
    assert "Traceback" not in process.stderr


def difference(one: str | Path, two: str | Path) -> float:
    """Mean absolute difference of two sampled videos, in grey levels."""
    frames = [read_frames(Path(p), frames=9, height=32, width=48, fps=8).float() for p in (one, two)]
    return (frames[0] - frames[1]).abs().mean().item()


def test_sample_writes_videos_that_the_adapter_changes(
    lora_main: Callable[[list[str]], None], smoke: list[str], tmp_path: Path
) -> None:
    """From a run, from its adapter, from a copy of that with --model, equal for equal seeds."""
    from dit_lora.commands.sample import SampleRequest, write_samples

    run = tmp_path / "run"
    lora_main([*smoke, f"run.dir={run}", "train.steps=5", "optim.groups.adapter.lr=0.1"])
    model = next(value for value in smoke if value.startswith("model.path=")).split("=")[1]
    common = ["--prompt", "a", "--prompt", "b", "--inference-steps", "2", "--seed", "3"]
    first_paths = invoke("sample", run, *common, "--out", tmp_path / "one").split()
    assert [Path(path).name[:9] for path in first_paths] == ["seed_3_a_", "seed_3_b_", "samples.h"]
    adapter = run / "adapter" / "pytorch_lora_weights.safetensors"
    copy = Path(shutil.copy(adapter, tmp_path / "copy.safetensors"))
    second = invoke("sample", adapter, *common, "--out", tmp_path / "two").split()
    third = invoke("sample", copy, "--model", model, *common, "--out", tmp_path / "three").split()
    for sample_paths in zip(first_paths[:2], second[:2], third[:2], strict=True):
        assert len({Path(path).read_bytes() for path in sample_paths}) == 1
    header = read_header(Path(first_paths[0]))
    assert (header.height, header.width, header.fps) == (32, 48, 8.0)
    other_paths = write_samples(
        SampleRequest(target=run, prompts=("a",), seed=4, inference_steps=2, output_folder=tmp_path / "other")
    )
    assert difference(other_paths[0], first_paths[0]) > 5
    with pytest.raises(DitLoraError, match=r"does not name its base model .*; give --model"):
        runner.invoke(app, ["sample", str(copy), *common], catch_exceptions=False)
    with pytest.raises(DitLoraError, match=r"cannot write .*copy.safetensors.*: Not a directory"):
        runner.invoke(app, ["sample", str(run), *common, "--out", str(copy / "below")], catch_exceptions=False)
