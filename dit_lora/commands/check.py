"""Check a recipe on this machine, with short runs in a temporary folder, and describe the results as a page."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from dit_lora.config.catalog import find_packaged_files_root
from dit_lora.config.load import load_recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.files import read_json, read_json_lines
from dit_lora.report.pages import render_page, write_page
from dit_lora.training.checkpoints.files import checkpoint_path
from dit_lora.training.session.accelerate import choose_launch_options
from dit_lora.training.session.early_checks import require_recipe_paths
from dit_lora.version import __version__

_NUM_STEPS, _RESUMED_STEP = 4, 2
_OVERRIDES = (
    # A checkpoint to resume from, and one to compare.
    f"train.steps={_NUM_STEPS}",
    f"train.save_every={_RESUMED_STEP}",
    "train.resume=none",
    "train.keep=9",
    "train.keep_best=0",
    "train.stop_after=null",
    # Training does not depend on these.
    "validation.prompts=[]",
    "validation.images=[]",
    "validation.last_images=[]",
    "validation.references=[]",
    "validation.media=[]",
    "validation.model=null",
    "validation.data=null",
    "validation.every=null",
    "validation.eval_draws=0",
    # Cached results of the first run are used by the others, which therefore have the same kernels on.
    "guard.preflight=true",
    "guard.parity_every=0",
    "guard.gradient_every=0",
    "hub.push=false",
    "run.trackers=[]",
)
"""Settings of all runs, after the user's own."""
_MAX_RANK_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Relative difference of losses and gradient norms between one and two ranks, by precision.

They differed by 5e-6 in fp32 on a CPU. A sum over ranks in place of the mean doubles the norm."""

Outcome = Literal["passed", "differs", "cannot tell", "not run"]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    outcome: Outcome
    message: str


@dataclass(frozen=True)
class CheckReport:
    """The outcome of all checks, and what a reader of a bug report needs to know about the machine."""

    results: Sequence[CheckResult]
    environment: Mapping[str, Any]
    recipe: str
    """The recipe of the first run, as YAML."""
    log: str
    seconds: float

    @property
    def passed(self) -> bool:
        return all(result.outcome != "differs" for result in self.results)

    def format_text(self) -> str:
        return "\n".join(f"{result.outcome:<11}  {result.name}: {result.message}" for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        results = [asdict(result) for result in self.results]
        return {"passed": self.passed, "checks": results, "environment": self.environment, "seconds": self.seconds}


@dataclass(frozen=True)
class _FinishedRun:
    """A run in the temporary folder that has ended."""

    folder: Path
    exit_code: int
    log: str

    @property
    def error(self) -> str:
        """The run's error message; empty if it has none."""
        # Further lines of a message are indented.
        messages = re.findall(r"^(?:error|stopped)[^:\n]*: (.*(?:\n  .*)*)", self.log, re.MULTILINE)
        return messages[0].strip() if messages else ""

    @property
    def failure(self) -> str:
        """Why the run has failed, in one line."""
        # Without a message of ours: the end of a traceback.
        last_line = self.log.rpartition("\n")[2]
        return " ".join((self.error or last_line or "it ended without output").split())

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        return read_json_lines(self.folder / name).objects

    def load_checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the last checkpoint, by file and name."""
        files = sorted(checkpoint_path(self.folder, _NUM_STEPS).rglob("*.safetensors"))
        return {f"{file.name}: {name}": tensor for file in files for name, tensor in load_file(file).items()}


def check_recipe(recipe_file: str, overrides: Sequence[str], say: Callable[[str], None]) -> CheckReport:
    """Train a few steps with a recipe, again from a checkpoint, and with two ranks; compare what must be equal.

    The recipe's run folder is not used. Samples that are missing in its cache are encoded into it, as in a run.

    Args:
        recipe_file: The recipe.
        overrides: Changes of the recipe.
        say: Writes a line about progress.

    Raises:
        DitLoraError: The recipe cannot be trained with.
    """
    began = time.perf_counter()
    recipe = load_recipe(recipe_file, overrides)
    get_family(recipe.model.family)
    if recipe.model.part == "both":
        raise DitLoraError("dit-lora check trains one expert at a time; add model.part=transformer or transformer_2")
    num_gpus = torch.cuda.device_count()
    accumulate = recipe.train.accumulate
    # Two ranks share a step's micro-batches.
    if num_gpus != 1 and accumulate % 2:
        accumulate *= 2
    with TemporaryDirectory(prefix="dit_lora_check_", ignore_cleanup_errors=True) as temporary:
        common = [*overrides, *_OVERRIDES, f"data.cache={recipe.cache_dir}", f"train.accumulate={accumulate}"]

        def train(name: str, *changes: str, num_ranks: int = 1) -> _FinishedRun:
            folder = Path(temporary) / name
            arguments = [*common, *changes, f"run.dir={folder}"]
            # Before a process imports torch.
            require_recipe_paths(load_recipe(recipe_file, arguments))
            completed = run_script([recipe_file, *arguments], num_ranks)
            # Progress bars overwrite their line. Names of temporary files say nothing.
            log = re.sub(r"[^\n]*\r", "", f"{completed.stdout}{completed.stderr}").replace(f"{temporary}/", "")
            return _FinishedRun(folder, completed.returncode, log.strip())

        say(f"training {_NUM_STEPS} steps, with checks of kernels and of the gradient")
        reference = train("first", "guard.preflight=anew", "guard.gradient_every=1000")
        metrics = reference.read_lines("metrics.jsonl")
        # Before the first step, this is an error of the recipe, the data or the machine.
        if reference.exit_code and reference.error and not metrics:
            raise DitLoraError(reference.error)
        results = [_check_training(reference), _check_kernels(reference), _check_gradient(reference)]
        logs = [reference.log]
        if not reference.exit_code:
            say(f"training steps {_RESUMED_STEP + 1} to {_NUM_STEPS} again, from a checkpoint")
            resume = f"train.resume={checkpoint_path(reference.folder, _RESUMED_STEP)}"
            resumed = train("resumed", resume)
            results.append(_check_resume(reference, resumed, lambda: train("resumed_again", resume)))
            logs.append(resumed.log)
        if not reference.exit_code and num_gpus != 1 and not recipe.lora.dropout:
            say("training with two ranks")
            ranked = train("ranks", f"train.accumulate={accumulate // 2}", num_ranks=2)
            results.append(_check_ranks(reference, ranked))
            logs.append(ranked.log)
        elif not reference.exit_code:
            reason = "two GPUs are needed"
            if num_gpus != 1:
                reason = f"with lora.dropout={recipe.lora.dropout:g}, two ranks drop other values; add lora.dropout=0"
            results.append(CheckResult("two ranks as one", "not run", reason))
        environment_file, recipe_copy = reference.folder / "environment.json", reference.folder / "config.yaml"
        environment = read_json(environment_file) if environment_file.is_file() else {}
        recipe_text = recipe_copy.read_text(encoding="utf-8") if recipe_copy.is_file() else ""
    return CheckReport(results, environment, recipe_text, "\n\n".join(logs), round(time.perf_counter() - began, 1))


def run_script(arguments: Sequence[str], num_ranks: int) -> subprocess.CompletedProcess[str]:
    """Run recipes/lora.py with these arguments in new processes of this machine, and wait for it."""
    # Also on CPUs, where Accelerate's own launcher starts one process.
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    if num_ranks == 1:
        # Use only one of several GPUs.
        options = choose_launch_options(min(torch.cuda.device_count(), 1))
        launcher = ["accelerate.commands.launch", "--quiet", *options]
    script = find_packaged_files_root() / "recipes" / "lora.py"
    command = [sys.executable, "-m", *launcher, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def _check_training(run: _FinishedRun) -> CheckResult:
    if run.exit_code:
        return CheckResult("training", "differs", run.failure)
    other_events = [
        event for event in run.read_lines("events.jsonl") if event["kind"] not in ("preflight", "gradient_check")
    ]
    events_text = f"; the guard reported: {_join_messages(other_events)}" if other_events else ""
    return CheckResult("training", "passed", f"{_NUM_STEPS} steps; the saved result is as trained{events_text}")


def _check_kernels(run: _FinishedRun) -> CheckResult:
    name = "kernels and attention"
    events = [event for event in run.read_lines("events.jsonl") if event["kind"] == "preflight"]
    if events:
        return CheckResult(name, "differs", _join_messages(events))
    if not run.read_lines("metrics.jsonl"):
        return CheckResult(name, "not run", "training has failed before")
    # The log says which kernels are on.
    kernels = re.findall(r"^kernels: (.*(?:\n  .*)*)", run.log, re.MULTILINE)
    kernels_text = f" ({'; '.join(' '.join(text.split()) for text in kernels)})" if kernels else ""
    return CheckResult(name, "passed", f"equal to the unpatched model on this recipe's samples{kernels_text}")


def _check_gradient(run: _FinishedRun) -> CheckResult:
    name = "gradient against loss"
    # A gradient that agrees has no event.
    for event in run.read_lines("events.jsonl"):
        if event["kind"] == "gradient_check":
            is_wrong = event["verdict"]["evidence"]["result"] == "differs"
            return CheckResult(name, "differs" if is_wrong else "cannot tell", _join_messages([event]))
    if match := re.search(r"^guard: step \d+: (the gradient agrees .*)", run.log, re.MULTILINE):
        return CheckResult(name, "passed", match[1])
    # The gradient check does not support every engine and kernel.
    if match := re.search(r"gradients are not checked.*", run.log):
        return CheckResult(name, "not run", match[0])
    # Out of memory, or for the step's gate.
    if match := re.search(r"gradient checks are skipped.*", run.log):
        return CheckResult(name, "cannot tell", match[0])
    return CheckResult(name, "cannot tell", "the first step has no finite loss and gradient")


def _check_resume(
    reference: _FinishedRun, resumed: _FinishedRun, resume_again: Callable[[], _FinishedRun]
) -> CheckResult:
    name = "resume, bit for bit"
    if resumed.exit_code:
        return CheckResult(name, "differs", resumed.failure)
    expected, state = reference.load_checkpoint_tensors(), resumed.load_checkpoint_tensors()
    unequal = _find_unequal_tensors(expected, state)
    if not unequal:
        return CheckResult(name, "passed", f"{len(expected)} tensors of step {_NUM_STEPS} are equal")
    message = f"{len(unequal)} of {len(expected)} tensors of step {_NUM_STEPS} differ, such as {unequal[0]}"
    # Atomic additions on a GPU have no order: then two equal runs differ too.
    repeated = resume_again()
    if not repeated.exit_code and _find_unequal_tensors(state, repeated.load_checkpoint_tensors()):
        return CheckResult(name, "cannot tell", f"{message}; so do those of two equal runs on this machine")
    return CheckResult(name, "differs", message)


def _find_unequal_tensors(expected: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal in both states, or missing in one of them."""
    shared = expected.keys() & state.keys()
    names = dict.fromkeys((*expected, *state))
    return [name for name in names if name not in shared or not torch.equal(expected[name], state[name])]


def _check_ranks(reference: _FinishedRun, ranked: _FinishedRun) -> CheckResult:
    name = "two ranks as one"
    if ranked.exit_code:
        return CheckResult(name, "differs", ranked.failure)
    precision = read_json(reference.folder / "environment.json")["precision"].partition(":")[0]
    limit = _MAX_RANK_DIFFERENCE.get(precision, _MAX_RANK_DIFFERENCE["bfloat16"])
    # Later steps show whether the update is equal too.
    pairs = zip(reference.read_lines("metrics.jsonl"), ranked.read_lines("metrics.jsonl"), strict=False)
    differences = [
        (abs(metrics[key] / expected[key] - 1) if expected[key] else abs(metrics[key]), expected["step"], key)
        for expected, metrics in pairs
        for key in ("loss", "grad_norm")
    ]
    difference, step, key = max(differences, key=lambda item: item[0])
    message = f"losses and gradient norms of {_NUM_STEPS} steps differ by {difference:.1g} at most"
    if difference <= limit:
        return CheckResult(name, "passed", f"{message} (rounding)")
    return CheckResult(name, "differs", f"{message}: {key} of step {step}; {limit:g} is rounding in {precision}")


def _join_messages(events: Iterable[Mapping[str, Any]]) -> str:
    return "; ".join(str(event["verdict"]["words"]) for event in events)


def write_check_page(path: Path, report: CheckReport) -> Path:
    """Write a report as an HTML page, without access tokens and absolute paths.

    Raises:
        DitLoraError: If the file cannot be written.
    """
    # Empty if no run came to its folder.
    environment = report.environment
    devices = ", ".join(device["name"] for device in environment.get("devices", ())) or "CPU"
    packages = ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items())
    facts = {
        "dit-lora": __version__,
        "Python": f"{environment.get('python', '')} on {environment.get('platform', '')}",
        "Device": devices,
        "Precision": environment.get("precision", ""),
        "Packages": packages,
    }
    colors = {"passed": "ok", "differs": "reject", "cannot tell": "warn", "not run": ""}
    page = render_page(
        "check_page.html",
        passed=report.passed,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        seconds=f"{report.seconds:,.0f}",
        results=[(result, colors[result.outcome]) for result in report.results],
        facts=facts,
        recipe=report.recipe,
        log=report.log,
    )
    return write_page(path, page)
