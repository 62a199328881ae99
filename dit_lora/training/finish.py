"""Ends a run: writes the adapter or the whole pipeline, verifies the file, validates, and reports."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dit_lora.adapters.diffusers_format import BASE_FILE
from dit_lora.adapters.under import disable_frozen_adapters
from dit_lora.config.recipe import Recipe
from dit_lora.errors import CheckFailedError, DitLoraError, format_list
from dit_lora.families import CHAT_FAMILIES
from dit_lora.numerics.memory import convert_to_out_of_memory_error
from dit_lora.training.base_fingerprint import (
    BaseFingerprint,
    find_changed_base_output,
    find_wrong_kernels,
    make_synthetic_inputs,
)
from dit_lora.training.fit import use_averaged_weights, validate, write_missing_samples
from dit_lora.training.result_metadata import build_metadata
from dit_lora.training.run import Run
from dit_lora.training.session.session import Session, raise_errors_on_all_ranks
from dit_lora.training.task import AnySetup
from dit_lora.verify.output_fingerprint import FAILURE, NOT_RECORDED, record_output
from dit_lora.verify.pipeline_checks import check_pipeline_files
from dit_lora.verify.reference_model import find_sharing_obstacle, share_model_weights
from dit_lora.verify.verified_files import VERIFICATION_FILE, compute_digests, list_result_files, write_verification
from dit_lora.verify.verify import (
    Verification,
    VerificationTarget,
    check_adapter,
    check_pipeline,
    raise_check_failed_if_unreadable,
)


@dataclass(frozen=True)
class WrittenFiles:
    """The files that a run has written as its result, and their verification. Filled on the main process only."""

    path: Path | None = None
    """The adapter's file, or the pipeline's folder."""
    verification: Verification | None = None
    """The result of verifying it; None if it could not be verified."""


def finish(run: Run) -> WrittenFiles:
    """Save the adapter or the whole pipeline, verify the file, then run the last validation. Collective."""
    session, written = run.session, WrittenFiles()
    with use_averaged_weights(run):
        # Collective where weights are sharded.
        weights = run.engine.trainable_state_dict()
        # On the weights that are saved, averages included; before the file is written, because its header contains the
        # output.
        with session.phases.time_phase("output fingerprint"):
            output = record_trained_output(run, run.base_fingerprint)
        with raise_errors_on_all_ranks(session.accelerator):
            if session.is_main:
                metadata = {**build_metadata(run), "steps": run.last_step, "output": output}
                written = _write_final_weights(run, metadata, weights)
    # After the adapter is safe: sampling takes the most memory and time of all. The validation that ended a run early
    # was of the same weights.
    if run.early_stop.step is None:
        validate(run, step=run.last_step)
    else:
        write_missing_samples(run, run.last_step)
    skipped = run.sample_budget.describe_skipped()
    if skipped is not None:
        # In the report and in the log: its line at the first of these steps may be far up.
        session.phases.reductions["samples"] = skipped
        session.closing_lines.append(skipped)
    # The run may only end once its last checkpoint is on the disk.
    with session.phases.time_phase("saving"):
        run.saved_checkpoints.wait_for_writes()
    return written


def _write_final_weights(run: Run, metadata: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> WrittenFiles:
    phases = run.session.phases
    try:
        with phases.time_phase("saving"):
            path = run.task.save(run, metadata, weights)
        with phases.time_phase("verification"):
            return WrittenFiles(path, _try_verification(run, path, metadata, weights))
    except (OSError, SafetensorError) as problem:
        raise DitLoraError(
            f"cannot write the result to {run.session.dir}: {problem}; the checkpoint of step "
            f"{run.last_step} is complete; free space and run again with train.resume=auto"
        ) from problem


def _try_verification(
    setup: AnySetup, path: Path, metadata: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> Verification | None:
    """Verify the run's result; None, with a warning, if memory does not suffice."""
    try:
        with convert_to_out_of_memory_error(), raise_check_failed_if_unreadable():
            return verify_result(setup, path, metadata, weights)
    except torch.OutOfMemoryError:
        folder = setup.session.dir
        setup.session.say(
            f"warning: wrote {path}, but ran out of memory while verifying it; run dit-lora verify {folder}"
        )
        return None


def verify_result(
    setup: AnySetup, path: Path, metadata: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> Verification:
    """Verify what the run has just written, and write verification.json. Main process only, not collective.

    `weights` are the trained weights, unsharded. The fresh unpatched model shares the run's frozen
    tensors, so that no weight is in memory twice. If these are spread over ranks or devices, the output is not
    compared: `output` says so and refers to `dit-lora verify`.
    """
    reference_model, dtype, live = setup.task.build_reference_model(setup.checkpoint), setup.dtype, setup.transformer
    # The reason if a fresh model cannot share the run's weights, for example because they are sharded.
    unsharable_reason = find_sharing_obstacle(live)
    full = setup.recipe.train.mode == "full"
    fresh = reference_model.load_meta_model(dtype)
    # The run's own frozen tensors, not a copy: there may be no memory for a second base.
    if unsharable_reason is None:
        fresh = share_model_weights(fresh, live, dtype, share_trained=full)
    # The output is then not compared here; `dit-lora verify` loads the written file.
    later = f"{unsharable_reason}; dit-lora verify {setup.session.dir.name} does" if unsharable_reason else None
    allow = setup.recipe.guard.allow_extreme_update
    result = VerificationTarget(
        path, metadata, metadata["base_model"], reference_model, dtype, later, allow, shares_weights=True
    )
    part = metadata.get("part", "transformer") if full else ""
    folder = path if full else path.parent
    # Recorded with the result, so that a file that changes later is not taken for a verified one.
    digests = compute_digests(setup.session.dir, list_result_files(folder, part))
    if full:
        files = sorted((path / metadata.get("part", "transformer")).glob("*.safetensors"))
        checks = check_pipeline_files(files, fresh.state_dict(), reference_model.name, weights)
        verification = check_pipeline(result, checks, lambda: fresh)
    else:
        verification = check_adapter(result, fresh)
    verification = replace(verification, files=digests)
    write_verification(setup.session.dir, verification.to_dict())
    return verification


def record_trained_output(setup: AnySetup, fingerprint: BaseFingerprint) -> dict[str, Any]:
    """Record the model's output with its present weights, and every fault found in the model. Collective.

    If a forward pass needs only one rank, the main process records it and the other ranks return an empty dict.
    """
    # On every rank, because it is collective in any case.
    fault = find_changed_base_output(setup, fingerprint)
    if not (setup.session.is_main or setup.engine.collective_forward):
        return {}
    reference_model = setup.task.build_reference_model(setup.checkpoint)
    try:
        # Without the frozen adapters below: users load the result on the plain base, and `verify` has no other.
        with disable_frozen_adapters(setup.transformer):
            inputs, base_output = make_synthetic_inputs(setup), fingerprint.final_output
            if base_output is not None and base_output["inputs"] != inputs:
                base_output = None  # an earlier version's record
            output = record_output(reference_model, setup.transformer, inputs, setup.dtype, base_output)
            # A changed base explains a wrong output already: kernels are compared only without one.
            if fault is None and NOT_RECORDED not in output:
                fault = find_wrong_kernels(setup, fingerprint, output)
    except torch.OutOfMemoryError:
        output = {NOT_RECORDED: "its forward pass did not fit the memory of the run's device"}
    return {**output, FAILURE: fault} if fault else output


def require_verified(session: Session, verification: Verification | None) -> None:
    """Raise `CheckFailedError` on every rank if the written result failed verification; the files stay. Collective."""
    with raise_errors_on_all_ranks(session.accelerator):
        # Only the main process has a verification; the error is raised on all ranks.
        if verification is not None and not verification.passed:
            summary = f"the run's result failed its verification ({VERIFICATION_FILE}); the checkpoints are complete"
            raise CheckFailedError(format_list(summary, verification.failures))


def summary(
    session: Session, adapter: Path, verification: Verification | None, *, is_one_of_both: bool = False
) -> str:
    """The closing lines: what was written, and whether it is sound.

    With `is_one_of_both` the line on a verified adapter is left out, because `combine_expert_adapters` names the copy.
    """
    lines: list[str] = []
    base = adapter.with_name(BASE_FILE)
    if base.exists() and base != adapter:
        lines.append(f"adapter: {adapter.parent} (load its {Path(BASE_FILE).stem} first)")
    elif base.exists() or verification is None or not is_one_of_both:
        lines.append(f"{'model' if session.recipe.train.mode == 'full' else 'adapter'}: {adapter}")
    if verification is not None:
        lines.append(verification.format_summary())
    return "\n".join([*lines, *session.optional_work.format_lines(), *session.closing_lines])


def format_next_commands(recipe: Recipe) -> str:
    """The commands that a user types after a finished run, one per line."""
    folder = shlex.quote(recipe.run.dir)
    sample = "chat" if recipe.model.family in CHAT_FAMILIES else "sample"
    commands = [
        f"dit-lora {sample} {folder} --prompt '...'",
        f"dit-lora report {folder} --serve  # or open report.html",
    ]
    if not recipe.hub.push:
        commands.append(f"dit-lora push {folder} OWNER/NAME")
    return "next: " + "\n      ".join(commands)
