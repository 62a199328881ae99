"""Every benchmark runs in its smallest form and prints a figure; a new one without a test fails here.

What they start as processes runs in this one: see `benchmark_stand_ins`.
"""

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import triton
from accelerate.state import AcceleratorState
from benchmark_stand_ins import exit_code_of, processes_in_this_one, scikit_learn, write_small_videos
from launching import ROOT

from benchmarks import first_step
from benchmarks.faults.world import World
from benchmarks.loops.loop_file import find_loops
from benchmarks.world import quality, settings
from dit_lora.errors import DitLoraError

BENCHMARKS = ROOT / "benchmarks"


@dataclass(frozen=True)
class SmallRun:
    """A benchmark's smallest form, and a figure or row of its table."""

    module: str
    arguments: str
    """As in a shell; `{work}` is an empty folder."""
    figure: str
    """Regular expression of a whole line of the output, with N for a number."""
    is_thorough: bool = False
    """True if another run of the table starts most of its code."""


SMALL_RUNS = (
    SmallRun("activations", "--rank 4 --blocks DiT-XL/2", r"\| DiT-XL/2 \| N \| N \| 0\.\d+ \|"),
    SmallRun("audit", "--clips 5 --seconds 1 --workers 1", r"the audit takes N times as much; 0 clips are rejected"),
    SmallRun(
        "cache",
        "--rounds 2 --clips 2 --entries 100",
        r"\| texts \| N \| 1 \| N \| N \| N \| N \(N to N\) \| N \(N to N\) \|",
    ),
    SmallRun("cache_memory", "--clips 2", r"\| 2 \| \d{3,} \|  \|"),
    SmallRun(
        "caption_cache",
        "{work}/cache --captions 2 --models Qwen-Image",
        r"\| Qwen-Image \| 2 \| N \| \d{3,} \|",
    ),
    SmallRun(
        "decode",
        "--rounds 1 --threads 1 --short",
        r"\| 49 frames, all wanted \| N \| N \(x N\) \| N \(x N\)( \| N \(x N\))* \|",
    ),
    SmallRun(
        "digits",
        "{work} --trained 40 --replayed 1 --steps 2 --lora-steps 2 --vae-steps 2 --inference-steps 2 --per-class 2 "
        "--picture {work}/grid.png",
        r"with the LoRA: zero N, .*, nine N; mean N",
    ),
    SmallRun("edit", "{work} --steps 1 --pairs 4", r"\| captions shuffled \| N \| N \| \d+ \|"),
    SmallRun(
        "first_step",
        "--work {work} --rounds 1 --steps 2 --layers 1 --size 32 48",
        r"\| ours, again \| N \| N \| N \| (yes|no) \(N s\) \| N \| N \| N \| N \| N \|",
    ),
    SmallRun("fuzz.__main__", "--count 2 --only jsonl", r"jsonl: 2 inputs, \d+ s, 0 findings"),
    SmallRun(
        "guard",
        "--pairs 2 --batch 1 --faults 'NaN in an adapter weight'",
        r"diagnosis of weights: N s at most",
    ),
    SmallRun(
        "gradient_check.__main__",
        "--work {work} --families cogvideox --dtypes fp32 --steps 0 --only halved",
        r"1 faults: 1 found, 0 within the bound, 0 missed, 0 cannot tell; 0 with a wrong layer",
    ),
    SmallRun(
        "gradient_check.cost",
        "--work {work} --family latte --micro-batches 1 --checks 1 --weights 2",
        r"\| fp32 \| N \| N \| \d+ \| \d+ \| N% \| N \|",
    ),
    SmallRun(
        "gradient_check.foreign_loops",
        "--loops plain/adamw --only none",
        r"\| plain/adamw \| healthy \| agrees \|  \|",
    ),
    SmallRun(
        "gradient_check.healthy",
        "--work {work} --families latte --dtypes fp32 --only dora --checks 1",
        r"all fp32: 0 false alarms of 1 checks, 0 cannot tell; difference at most N bounds; evaluations \d+ .*",
    ),
    SmallRun(
        "guard_in_turns",
        "--model tiny-sana --rounds 2 --steps 1 --device cpu",
        r"tiny-sana: N s a step without the guard, with it N times that \(median of 2 rounds; N to N\)",
    ),
    SmallRun("guard_loops", "--tensors 2 --rounds 1", r"\| plain PyTorch \| 2 \| N \| N \| N \| N \| N \| N \| N \|"),
    # tests/recipes/test_lora.py kills a run every time.
    SmallRun("kill_nine", "--rounds 1 --steps 6 --out {work}/out", r' +"ended": [1-9],', is_thorough=True),
    SmallRun(
        "loops.__main__",
        "run --only plain/adamw --fault healthy --guard command --jobs 1",
        r"healthy runs: 1 equal, 0 different",
    ),
    SmallRun(
        "loops.__main__",
        "compose --count 1 --fault healthy --jobs 1",
        r"healthy runs: 1 equal, 0 different",
    ),
    SmallRun("machine", "--device cpu", r' "torch": "\d.*",'),
    SmallRun("media_corpus", "{work}/media", r"33 videos with their frames, \d+ kB"),
    SmallRun("overhead", "--rounds 5 --batch 1", r"ours over bare: +N \(by round N \+- N\)"),
    SmallRun(
        "race",
        "--work {work} --rounds 1 --steps 2 --layers 1 --size 32 48",
        r"\| 2 \| warm \| N \| N \| N \| 1\.25 \| before: .*; training:.*; after: .* \|",
        is_thorough=True,  # it is two of first_step's runs
    ),
    SmallRun(
        "snapshot",
        "--rounds 1 --pairs 2 --device cpu",
        r"\| restore \| N \| N \| N to N \| N \|",
    ),
    SmallRun("start", "--samples 4 --work {work}", r"\| 4 \| N s \| N s \| N s \| N s \|"),
    SmallRun(
        "verdicts.__main__",
        "--faults 1 --families dit-tiny --ranks 1 --jobs 1 --places 'no fault'",
        r"1 of 1 faults, seed 0, \d+ s with 1 jobs",
    ),
    SmallRun(
        "world.__main__",
        "{work} --vae-steps 1 --decoder-steps 1 --vae-clips 2 --steps 2 --clips 4 --judged 1 "
        # Its 20 inference steps of four prompts, three times, are two thirds of the time.
        "--overrides validation.prompts=[] train.batch_size=2",
        r"\{'shape': N, 'colour': N, 'motion': N, 'all': N\}",
    ),
    SmallRun(
        "world.settings",
        "{work} --settings 'rank 4' --seeds 0 --steps 1 --new-clips 2 --known-clips 2 --per-group 1",
        r"\| rank 4 \| 1 \| N \(N to N\) \| N \(N to N\) \| N \| N \|",
        is_thorough=True,  # it trains as world.__main__ and measures as world.quality
    ),
    SmallRun(
        "world.distilled",
        "{work} --seeds 0 --routes guided --steps 1 --per-group 1 --new-clips 2 --known-clips 2 "
        "--distillation-steps 1 --distillation-clips 1",
        r"\| guided target \| 1 \| N \(N to N\) \| N \(N to N\) \| N \| N \|",
        is_thorough=True,  # it trains and samples by world.settings
    ),
    SmallRun(
        "world.quality",
        "dit_lora/models/moving_shapes --per-group 1",
        r'before: \{"new": \{"shape": N, .*\}, "others": \{.*\}\}',
    ),
    SmallRun("studio_load", "--files 70 --runs 2 --rounds 1", r"\| a caption that is saved \| N \| N \| N \|"),
)
NUMBER = r"-?\\d+(\\.\\d+)?"
TESTED_ELSEWHERE = {
    "faults.__main__": "tests/benchmarks/faults/test_suite.py",
    "gpu_recovery": "tests/benchmarks/test_gpu_recovery.py",
    "host": "tests/benchmarks/test_host.py",  # replaces the driver, for the rest of its process
    "interrupt": "tests/benchmarks/test_interrupt.py",  # starts whole commands, a minute in all
    "step": "tests/benchmarks/test_step.py",
    "studio_walk": "tests/benchmarks/test_studio_walk.py",  # installs packages
    "trainers": "tests/benchmarks/test_trainers.py",  # the repositories are not part of this one
    "world.diffusers_script": "tests/benchmarks/test_world.py",  # the script is not part of this repository
}
TESTED_HERE = {
    "bare_start",  # by first_step
    "faults.killed",
    "faults.suite",
}


@pytest.fixture(autouse=True)
def as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run as their references; nothing that a benchmark sets for its own process stays."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(quality, "INFERENCE_STEPS", 1)  # of twelve, for each of its samples
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.dict(os.environ):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("sklearn") is None:
        for name, module in scikit_learn().items():
            monkeypatch.setitem(sys.modules, name, module)
    if shutil.which("ffmpeg") is None:
        from benchmarks import media_corpus

        monkeypatch.setattr(media_corpus, "ffmpeg", write_small_videos(tmp_path))


@pytest.mark.parametrize(
    "small_run",
    [
        pytest.param(small_run, marks=pytest.mark.thorough if small_run.is_thorough else (), id=small_run.module)
        for small_run in SMALL_RUNS
    ],
)
def test_its_smallest_form_prints_a_figure(
    small_run: SmallRun,
    tmp_path: Path,
    lora_main: Callable[[list[str]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    arguments = shlex.split(small_run.arguments.replace("{work}", str(work)))
    benchmark = importlib.import_module(f"benchmarks.{small_run.module}")
    # `race` starts its processes by `first_step`, `world.distilled` by `settings`.
    for module in (benchmark, first_step, settings):
        if hasattr(module, "subprocess"):
            monkeypatch.setattr(module, "subprocess", processes_in_this_one(lora_main))
    code = exit_code_of(lambda: benchmark.main(arguments))
    output = capsys.readouterr()
    assert code == 0, output.out + output.err
    figure = re.sub(r"\bN\b", NUMBER, small_run.figure)
    assert re.search(f"^{figure}$", output.out, flags=re.MULTILINE), output.out


def test_the_suites_process_writes_its_judgements(tmp_path: Path) -> None:
    from benchmarks.faults import suite

    suite.main([str(tmp_path / "judged.json"), "dit-tiny", "lora", "ddp", "NaN in an adapter weight"])
    (judgement,) = json.loads((tmp_path / "judged.json").read_text())
    assert (judgement["named"], judgement["recovered"], judgement["action"]) == (True, True, "rollback")


def test_a_killed_run_leaves_a_partial_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    from benchmarks.faults import killed
    from benchmarks.faults.target_table import targets_for
    from dit_lora.config.load import dump_recipe

    world = World(tmp_path, Accelerator(cpu=True), targets_for("dit-tiny"))
    recipe = world.recipe("killed", world.clips, world.cache("killed"), ())
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))

    def fail(_pid: int, _signal: int) -> None:
        raise DitLoraError("killed")

    monkeypatch.setattr(killed.checkpoints, "_write_synced", killed.checkpoints._write_synced)
    monkeypatch.setattr(os, "kill", fail)
    with pytest.raises(DitLoraError, match="killed"):
        killed.main(tmp_path / "recipe.yaml")
    files = list((Path(recipe.run.dir) / "checkpoints").glob(".step_*.partial/*"))
    assert files


def modules_with_a_main() -> set[str]:
    """Names of benchmarks/'s modules that are commands; not the scripts of the corpus of loops, which it runs."""
    scripts = {loop.path for loop in find_loops()}
    names = set()
    for path in BENCHMARKS.rglob("*.py"):
        statements = ast.parse(path.read_text()).body
        functions = {node.name for node in statements if isinstance(node, ast.FunctionDef)}
        tests = [ast.unparse(node.test) for node in statements if isinstance(node, ast.If)]
        is_command = "main" in functions or "__name__ == '__main__'" in tests
        if is_command and path not in scripts:
            names.add(".".join(path.relative_to(BENCHMARKS).with_suffix("").parts))
    return names


def test_every_benchmark_has_a_test() -> None:
    in_table = {small_run.module for small_run in SMALL_RUNS}
    assert modules_with_a_main() == in_table | TESTED_ELSEWHERE.keys() | TESTED_HERE
    for module, file in TESTED_ELSEWHERE.items():
        name = module.removesuffix(".__main__")
        assert re.search(rf"\bbenchmarks(\.| import ){name}\b", (ROOT / file).read_text()), file
