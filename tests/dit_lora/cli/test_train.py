"""`dit-lora train`: mistakes are answered at once, and exit code and Ctrl-C are the run's own."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from launching import ROOT, launch_environment
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.config.catalog import list_accelerate_configs
from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.training.session import accelerate
from dit_lora.training.session.accelerate import choose_launch_options, launch_training

SMOKE = str(ROOT / "recipes" / "smoke" / "cogvideox.yaml")
CPU = list_accelerate_configs()["cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SMOKE, "train.step=3"], "train.step: unknown key; did you mean train.steps?"),
        ([SMOKE, "model.family=cog"], "no family 'cog'"),
        ([SMOKE, "--config-file", "gone.yaml"], "the Accelerate config gone.yaml does not exist"),
        (
            [SMOKE, "run.dir=/dev/null", "train.resume=gone", "guard.quarantine=gone"],
            "error: correct these paths\n"
            "  - model.path: tiny/cogvideox-2b does not exist; create it with "
            "dit-lora tiny cogvideox-2b tiny/cogvideox-2b\n"
            "  - data.path: the folder clips does not exist; put your clips there, or set data.path to their folder; "
            "for a first test: dit-lora tiny shapes clips\n"
            "  - train.resume: gone does not exist; give auto, or a folder in /dev/null/checkpoints\n"
            "  - guard.quarantine: gone does not exist; give the quarantine.jsonl of a run\n"
            "  - cannot write run.dir /dev/null: /dev/null is not a writable directory\n",
        ),
    ],
)
def test_a_mistake_is_answered_before_anything_heavy_is_imported(arguments: list[str], message: str) -> None:
    code = (
        "import sys\nfrom dit_lora.cli import main\n"
        f"sys.argv = {['dit-lora', 'train', *arguments]!r}\n"
        "try:\n    main()\n"
        "finally:\n    print(*sorted(sys.modules))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 2
    assert message in process.stderr
    assert not {"torch", "accelerate", "diffusers", "transformers", "numpy"} & set(process.stdout.split())


@pytest.fixture
def smoke_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the folders that the smoke recipe names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny" / "cogvideox-2b").mkdir(parents=True)
    (tmp_path / "clips").mkdir()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["data.path=notes.txt"], "data.path: notes.txt is a file; give the folder of your clips, or a .tar file"),
        (["data.path=gone.tgz"], "data.path: no file gone.tgz"),
        (["data.path=null", "data.sources=[{path: clips}, {path: gone}]"], "data.sources[1]: the folder gone does"),
        (["model.path=notes.txt"], "model.path: notes.txt is a file; give the folder of a Diffusers checkpoint"),
        (["run.dir=tiny"], "run.dir tiny is not empty and is not a run"),
        (["run.dir=runs/old"], "run.dir runs/old already has a run; continue it with train.resume=auto"),
        (["model.family=chat"], "data.path: clips is a folder; give a .json or .jsonl file of conversations"),
    ],
)
@pytest.mark.usefixtures("smoke_paths")
def test_a_path_of_the_wrong_kind_is_answered_before_the_launch(values: list[str], message: str) -> None:
    Path("notes.txt").touch()
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/metrics.jsonl").touch()
    with pytest.raises(DitLoraError) as refused:
        CliRunner().invoke(app, ["train", SMOKE, *values], catch_exceptions=False)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "values",
    [
        ["model.path=me/it"],
        ["data.path=me/clips"],
        ["data.path=hub:data/clips"],
        ["data.path=null", "data.sources=[{path: made, caption: a cat, generate: 4}]"],
        ["run.dir=runs/old", "train.resume=auto"],
    ],
)
@pytest.mark.usefixtures("smoke_paths")
def test_names_on_the_hub_and_folders_to_fill_are_not_missing(
    values: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerate, "launch_training", lambda arguments, config_file: 0)
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/metrics.jsonl").touch()
    assert CliRunner().invoke(app, ["train", SMOKE, *values], catch_exceptions=False).exit_code == 0


@pytest.mark.usefixtures("smoke_paths")
def test_the_first_line_comes_before_the_launch_and_the_exit_code_after_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is for who waits at a terminal."""
    launched = []

    def launch(arguments: list[str], config_file: Path | None) -> int:
        launched.append((arguments, config_file, capsys.readouterr().err))
        return 3

    monkeypatch.setattr(accelerate, "launch_training", launch)
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_one=is_terminal: is_one)
        with pytest.raises(SystemExit) as ended:
            app(["train", SMOKE, "run.dir=runs/x", "--config-file", str(CPU)])
        assert ended.value.code == 3
    arguments = [SMOKE, "run.dir=runs/x"]
    line = f"training with {SMOKE}; results go to runs/x\n"
    assert launched == [(arguments, CPU, line), (arguments, CPU, "")]


@pytest.mark.usefixtures("smoke_paths")
def test_an_edited_script_beside_the_recipe_is_said_not_to_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerate, "launch_training", lambda arguments, config_file: 0)
    recipe, script = tmp_path / "smoke.yaml", tmp_path / "lora.py"
    shutil.copyfile(SMOKE, recipe)
    # As `dit-lora init` writes it.
    text = (ROOT / "recipes" / "lora.py").read_text(encoding="utf-8")
    script.write_text(text.replace("recipes/lora.py", "lora.py"), encoding="utf-8")
    unedited = CliRunner().invoke(app, ["train", str(recipe)])
    assert "differs" not in unedited.stderr
    with script.open("a", encoding="utf-8") as file:
        file.write("print('mine')\n")
    edited = CliRunner().invoke(app, ["train", str(recipe)])
    assert f"{script} differs from the package's script, which is used" in edited.stderr
    assert f"accelerate launch {script} {recipe}" in edited.stderr


def test_the_machine_decides_how_it_is_launched() -> None:
    chosen = [choose_launch_options(count) for count in (0, 1, 4)]
    assert [Path(options[1]).name for options in chosen] == ["cpu.yaml", "one_gpu.yaml", "ddp.yaml"]
    assert [options[2:] for options in chosen] == [[], [], ["--num_processes", "4"]]
    assert choose_launch_options(4, Path("mine.yaml")) == ["--config_file", "mine.yaml"]


@pytest.mark.usefixtures("smoke_paths")
def test_a_rank_does_not_launch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(DitLoraError, match="run it without a launcher"):
        CliRunner().invoke(app, ["train", SMOKE], catch_exceptions=False)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in place of recipes/lora.py, which takes no time to start. No signal comes from a terminal."""
    path = tmp_path / "recipes" / "lora.py"
    path.parent.mkdir()
    monkeypatch.setattr(accelerate, "find_packaged_files_root", lambda: tmp_path)
    monkeypatch.setattr(accelerate, "_is_signalled_by_terminal", lambda child: False)
    # torchrun sets this one for good.
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    return path


@pytest.fixture
def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return list_accelerate_configs()["ddp"]


@pytest.mark.parametrize("config", ["cpu", "ddp"])
def test_the_exit_code_is_the_runs(
    script: Path, two_ranks: Path, config: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch` and torchrun would end with 1, and Accelerate would list the defaults that it chose."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    configs = {"cpu": CPU, "ddp": two_ranks}
    assert [launch_training([code], configs[config]) for code in ("0", "3")] == [0, 3]
    assert "defaults used" not in caplog.text


@pytest.mark.parametrize("config", ["cpu", "ddp"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_the_runs_to_handle(
    script: Path, two_ranks: Path, tmp_path: Path, config: str, number: int, code: int
) -> None:
    script.write_text(
        textwrap.dedent(f"""
            import os, pathlib, signal, sys, time
            def save(number, frame):
                time.sleep(0.5)
                sys.exit(128 + number)
            signal.signal({int(number)}, save)
            pathlib.Path({str(tmp_path)!r}, "ready" + os.environ.get("RANK", "")).touch()
            time.sleep(60)
        """)
    )
    configs, count = {"cpu": CPU, "ddp": two_ranks}, {"cpu": 1, "ddp": 2}

    def interrupt() -> None:
        while len(list(tmp_path.glob("ready*"))) < count[config]:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    assert launch_training([], configs[config]) == code
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers


def test_a_run_that_is_killed_says_so(script: Path) -> None:
    script.write_text("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(DitLoraError, match="out of memory"):
        launch_training([], CPU)


def test_ctrl_c_before_the_run_handles_it_is_an_interrupt(script: Path) -> None:
    script.write_text("import os, signal; signal.signal(2, signal.SIG_DFL); os.kill(os.getpid(), 2)")
    with pytest.raises(KeyboardInterrupt):
        launch_training([], CPU)


@pytest.mark.usefixtures("smoke_paths")
def test_ctrl_c_before_the_run_handles_it_says_how_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(arguments: list[str], config_file: Path | None) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(accelerate, "launch_training", interrupt)
    with pytest.raises(InterruptedRunError, match="to continue, add train") as interrupted:
        CliRunner().invoke(app, ["train", SMOKE], catch_exceptions=False)
    assert interrupted.value.exit_code == 130


@pytest.mark.usefixtures("smoke_paths")
def test_ctrl_c_while_the_process_of_a_finished_run_ends_says_that_it_is_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def finish(arguments: list[str], config_file: Path | None) -> int:
        run = Path("runs/ended")
        run.mkdir(parents=True)
        (run / "status.json").write_text('{"state": "finished"}')
        (run / "metrics.jsonl").write_text('{"step": 3}\n')
        raise KeyboardInterrupt

    monkeypatch.setattr(accelerate, "launch_training", finish)
    with pytest.raises(InterruptedRunError, match=r"^the run in runs/ended is finished$") as interrupted:
        CliRunner().invoke(
            app, ["train", SMOKE, "train.steps=3", "train.save_every=1", "run.dir=runs/ended"], catch_exceptions=False
        )
    assert interrupted.value.exit_code == 130


def test_a_config_that_accelerate_refuses_is_one_line(script: Path, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 2\n")
    with pytest.raises(DitLoraError, match=r"Accelerate cannot launch with .*mine\.yaml: .*distributed_type"):
        launch_training([], config)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_saves_and_says_how_to_continue(smoke: list[str], tmp_path: Path) -> None:
    """The whole way: the command, Accelerate, the script, and a terminal that signals all of them."""
    run = tmp_path / "run"
    arguments = [*smoke, "train.steps=100000", "train.batch_size=1", f"run.dir={run}"]
    process, terminal = pty.fork()
    if process == 0:
        os.execve(sys.executable, [sys.executable, "-m", "dit_lora", "train", *arguments], launch_environment())
    output, is_interrupted = b"", False
    try:
        while chunk := os.read(terminal, 65536):
            output += chunk
            metrics = run / "metrics.jsonl"
            if not is_interrupted and metrics.exists() and metrics.read_bytes().count(b"\n") > 3:
                is_interrupted = bool(os.write(terminal, b"\x03"))
    except OSError:
        pass  # the last process that writes to the terminal has ended
    finally:
        os.close(terminal)
        if not is_interrupted:
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
    text = output.decode()
    assert os.waitstatus_to_exitcode(status) == 130, text
    assert text.startswith(f"training with {smoke[0]}; results go to {run}")
    assert text.count("to continue, add train.resume=auto") == 1
    assert "Traceback" not in text
    assert list((run / "checkpoints").glob("step_*"))
