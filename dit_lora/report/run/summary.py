"""Summarize a run at the top of its report: one sentence, the guard's badge, and what to do next."""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dit_lora.config.lora import PEFT_ONLY_KINDS, WEIGHT_INITS
from dit_lora.errors import join_first_items
from dit_lora.families import CHAT_FAMILIES
from dit_lora.files import can_open_inside_folder
from dit_lora.report.charts.bars import format_number
from dit_lora.report.pages import truncate_text
from dit_lora.report.run.files import RunFiles, RunState
from dit_lora.report.run.history import ensure_dict, get_diagnosis
from dit_lora.report.run.recipe_diff import format_value

_MAX_ACTIONS = 3
_MAX_SAMPLES = 3  # sample names in one sentence
_STATE_STARTS: dict[RunState, str] = {
    "running": "Running",
    "finished": "Finished",
    "stopped": "Stopped by the guard",
    "interrupted": "Interrupted",
    "failed": "Ended with an error",
    "silent": "No longer running",
}
_UNCHANGED = 0.005  # a smaller relative change of the eval loss is no change


@dataclass(frozen=True)
class Suggestion:
    """A suggestion to the reader of a report: a link within the page, or a line to run."""

    title: str
    detail: str = ""
    command: str = ""
    link: str = ""
    """Id of a section of the page; empty without a link."""


@dataclass(frozen=True)
class RunSummary:
    sentence: str
    badge: str
    badge_color: str
    """Color class: `ok`, `warn` if steps failed, `reject` if the guard stopped the run."""
    actions: Sequence[Suggestion]


@dataclass(frozen=True)
class FailedSteps:
    """The steps of a run that failed, and were repeated, left out or rolled back, from its guard events."""

    texts: Sequence[str]
    """What happened, such as `1 step was repeated without clip.mp4`."""
    samples: Sequence[str]
    """Samples that a step was repeated without, in order of their events."""
    reason: str
    """Message of the first event about one of these samples."""


def build_summary(run: RunFiles, target: str, checkpoint_steps: Sequence[int]) -> RunSummary:
    """Summarize a run from its folder.

    Args:
        run: The run's files, redacted.
        target: The run's folder in commands, quoted for a shell.
        checkpoint_steps: Steps with a checkpoint.
    """
    failures = describe_failed_steps(run.events)
    steps = f"{run.num_steps_taken:,}" + (f" of {run.max_steps:,}" if run.max_steps is not None else "")
    parts = [f"{steps} steps", _describe_eval_loss(run), *failures.texts]
    # A run that has not ended has none.
    if run.verification:
        failed = run.verification.get("passed") is not True
        parts.append(f"the {_get_result_name(run)} {'failed' if failed else 'passed'} its checks")
    sentence = f"{_STATE_STARTS[run.state]}: {'; '.join(filter(None, parts))}."
    return RunSummary(
        sentence, *_build_badge(run, failures), _list_suggested_actions(run, target, checkpoint_steps, failures)
    )


def choose_run_path(run: RunFiles) -> str:
    """The run's folder in commands, relative to where the run was started if the recipe says it, else its name."""
    run_dir = ensure_dict(run.config.get("run")).get("dir")
    # A folder that was moved, or whose absolute path is not shown, is named from its parent.
    if isinstance(run_dir, str) and not Path(run_dir).is_absolute() and Path(run_dir).name == run.name:
        return shlex.quote(run_dir)
    return shlex.quote(run.name)


def describe_failed_steps(events: Sequence[dict[str, Any]]) -> FailedSteps:
    """Describe the steps that the guard repeated, left out or rolled back; `texts` is empty if there are none."""
    by_action: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_action.setdefault(str(event.get("action")), []).append(event)
    # Both leave samples out when they repeat the step.
    skips = [event for event in events if event.get("action") in ("skip", "quarantine")]
    samples = list(dict.fromkeys(name for event in skips for name in _list_samples(event)))
    # A skip in which no rank names a sample leaves the whole step out.
    repeated_steps = {str(event.get("step")) for event in skips if _list_samples(event)}
    repeated = [event for event in skips if str(event.get("step")) in repeated_steps]
    left_out = [event for event in skips if event not in repeated]
    fallbacks = by_action.get("fallback", ())
    switches = list(dict.fromkeys(format_value(get_diagnosis(event).get("switch")) for event in fallbacks))
    rollbacks = len(by_action.get("rollback", ()))
    texts = [
        _count_steps(repeated, f"repeated without {join_first_items(samples, _MAX_SAMPLES)}"),
        _count_steps(left_out, "left out"),
        _count_steps(fallbacks, f"repeated with {join_first_items(switches, _MAX_SAMPLES)} switched off"),
        _count_steps(by_action.get("retry", ()), "repeated unchanged"),
        f"rolled back {'once' if rollbacks == 1 else f'{rollbacks:,} times'}" if rollbacks else "",
    ]
    reason = next((format_value(get_diagnosis(event).get("words")) for event in repeated if _list_samples(event)), "")
    return FailedSteps([text for text in texts if text], samples, reason)


def _count_steps(events: Sequence[dict[str, Any]], outcome: str) -> str:
    # A step that failed twice counts once.
    count = len({str(event.get("step")) for event in events})
    return f"{count:,} {'step was' if count == 1 else 'steps were'} {outcome}" if count else ""


def _list_samples(event: dict[str, Any]) -> list[str]:
    names = event.get("sample_ids")
    return [truncate_text(str(name)) for name in names] if isinstance(names, list) else []


def _describe_eval_loss(run: RunFiles) -> str:
    losses = run.eval_losses
    if not losses:
        return ""
    # The first one is from before the first step, if it was measured.
    first_loss, last_loss = losses[min(losses)], losses[max(losses)]
    if len(losses) == 1 or not (math.isfinite(first_loss) and math.isfinite(last_loss)):
        return f"eval loss is {format_number(last_loss)}"
    # Relative to the larger one, which can be zero only if both are.
    is_equal = abs(last_loss - first_loss) <= _UNCHANGED * max(abs(first_loss), abs(last_loss))
    verb = "stayed" if is_equal else "fell" if last_loss < first_loss else "rose"
    return f"eval loss {verb} from {format_number(first_loss)} to {format_number(last_loss)}"


def _build_badge(run: RunFiles, failures: FailedSteps) -> tuple[str, str]:
    """Text and color class of the guard's badge."""
    if run.state == "stopped" and run.events:
        return f"guard: stopped at step {format_value(run.events[-1].get('step'))}", "reject"
    # events.jsonl is read from its end, so these are the latest.
    more = "; earlier events are in events.jsonl" if run.event_count > len(run.events) else ""
    if failures.texts:
        return f"guard: {'; '.join(failures.texts)}{more}", "warn"
    if run.event_count:
        return f"guard: no step lost, {run.event_count:,} event{'s' if run.event_count > 1 else ''} reported", "ok"
    return "guard: no step failed", "ok"


def _get_result_name(run: RunFiles) -> str:
    """What the run trains, which is also the name of the folder of its result."""
    return "model" if ensure_dict(run.config.get("train")).get("mode") == "full" else "adapter"


def _list_suggested_actions(
    run: RunFiles, target: str, checkpoint_steps: Sequence[int], failures: FailedSteps
) -> list[Suggestion]:
    """The most useful actions in this state of the run, the most urgent first."""
    actions = []
    # A result that must not be used comes before everything else.
    if run.verification and run.verification.get("passed") is not True:
        actions.append(Suggestion(f"Read why the {_get_result_name(run)} failed its checks", link="result"))
    if run.state == "stopped" and run.events:
        message = format_value(get_diagnosis(run.events[-1]).get("words"))
        actions.append(Suggestion("Read what stopped it", truncate_text(message), link="guard"))
        # Bundles are limited in number, so this one may be gone.
        bundle = run.events[-1].get("bundle")
        if isinstance(bundle, str) and can_open_inside_folder(run.folder, run.folder / bundle / "bundle.json"):
            actions.append(
                Suggestion("Repeat the failed step", command=f"dit-lora replay {target}/{shlex.quote(bundle)}")
            )
    elif failures.samples:
        title = f"Look at {join_first_items(failures.samples, _MAX_SAMPLES)}"
        actions.append(Suggestion(title, truncate_text(failures.reason), link="guard"))
    if run.state == "running":
        actions.append(Suggestion("Follow it", command=f"dit-lora report {target} --serve"))
    elif run.state != "finished" and checkpoint_steps:
        command = f"dit-lora train {target}/config.yaml train.resume=auto"
        actions.append(Suggestion(f"Continue it after step {checkpoint_steps[-1]:,}", command=command))
    return [*actions, *_list_result_uses(run, target, checkpoint_steps)][:_MAX_ACTIONS]


def _list_result_uses(run: RunFiles, target: str, checkpoint_steps: Sequence[int]) -> list[Suggestion]:
    """What a result can be used for: sampling, loading, and more steps."""
    model, lora = (ensure_dict(run.config.get(name)) for name in ("model", "lora"))
    if not (run.folder / _get_result_name(run)).is_dir():
        return []
    is_full = _get_result_name(run) == "model"
    # Facts of a chat model's run have no pipeline.
    pipeline = ensure_dict(run.facts.get("pipeline"))
    prompts = ensure_dict(run.config.get("validation")).get("prompts")
    # The run's own first prompt, which its samples can be compared with.
    prompt = shlex.quote(str(prompts[0])) if isinstance(prompts, list) and prompts else "PROMPT"
    actions = []
    if model.get("family") in CHAT_FAMILIES:
        actions.append(Suggestion("Ask it", command=f"dit-lora chat {target} --prompt QUESTION"))
    elif pipeline:
        # Placeholders for files that the model starts from.
        count = pipeline.get("references")
        inputs = " --image IMAGE" if pipeline.get("from_image") else ""
        inputs += " --reference FILE" * (count if isinstance(count, int) else 0)
        actions.append(Suggestion("Sample it", command=f"dit-lora sample {target} --prompt {prompt}{inputs}"))
        # A second expert, or changed base weights, need more than the pipeline's own loader.
        needs_ours = lora.get("kind", "lora") != "lora" or lora.get("init") in WEIGHT_INITS or bool(model.get("part"))
        # A shell's quotes are no part of a Python string.
        path = json.dumps(f"{shlex.split(target)[0]}/adapter", ensure_ascii=False)
        if not is_full and not needs_ours and pipeline.get("loads_lora"):
            actions.append(Suggestion("Load it", command=f"pipe.load_lora_weights({path})"))
        elif not is_full and lora.get("kind") not in PEFT_ONLY_KINDS:
            actions.append(Suggestion("Load it", command=f"dit_lora.load_adapter(pipe, {path})"))
    optim = ensure_dict(run.config.get("optim"))
    groups = map(ensure_dict, ensure_dict(optim.get("groups")).values())
    # With another schedule, the learning rate depends on the number of steps.
    is_constant = optim.get("schedule") == "constant" and all(
        group.get("schedule") in (None, "constant") for group in groups
    )
    is_complete = run.num_steps_taken == run.max_steps and run.max_steps in checkpoint_steps
    if run.max_steps and is_complete and is_constant:
        settings = f"train.steps={2 * run.max_steps} train.resume=auto"
        actions.append(Suggestion("Train it further", command=f"dit-lora train {target}/config.yaml {settings}"))
    return actions
