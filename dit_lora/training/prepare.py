"""Prepares a run: builds its objects in order, each complete before the next one uses it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from dit_lora.config.lora import DATA_INIT, NEWER_OPTIONS
from dit_lora.config.optimizers import DEFAULT_OPTIMIZER
from dit_lora.data.loading.training_set import TrainingData
from dit_lora.families.base import TrainableCheckpoint
from dit_lora.guard.snapshots import Snapshots
from dit_lora.training.base_fingerprint import record_base_fingerprint, write_base_fingerprint
from dit_lora.training.checkpoint_state import CheckpointManager, resume
from dit_lora.training.checkpoints.files import (
    SAMPLES_PER_STEP_KEY,
    VALIDATION_CONVERSATIONS_KEY,
    VALIDATION_DATA_KEY,
    describe_launch_topology,
    require_same_recipe,
)
from dit_lora.training.choose_checkpointing import choose_checkpointing
from dit_lora.training.distributed.build import build_engine
from dit_lora.training.distributed.context_parallel import enable_context_parallel
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.eva_init import initialize_lora_from_data
from dit_lora.training.execution.compiled import compile_blocks
from dit_lora.training.execution.offload import offload_base
from dit_lora.training.journal import Journal
from dit_lora.training.optim.build import build_optimizer
from dit_lora.training.recovery.build import build_recovery, build_watcher, load_guard_state
from dit_lora.training.recovery.kernel_parity import PeriodicKernelComparison
from dit_lora.training.recovery.monitoring import share_spike_history
from dit_lora.training.recovery.run_recovery import RecoveryFileUpdater
from dit_lora.training.recovery.state_checks import collect_local_state
from dit_lora.training.run import Run
from dit_lora.training.session.sample_budget import SamplingTimeBudget
from dit_lora.training.session.session import Session, open_run_folder
from dit_lora.training.status import build_tracker_config
from dit_lora.training.task import AnySetup, Setup, Task


def prepare(
    session: Session,
    task: Task,
    checkpoint: TrainableCheckpoint,
    data: TrainingData,
    transformer: nn.Module,
    groups: list[dict[str, Any]],
    resume_from: Path | None,
    *,
    has_finished: bool = False,
    apply_checkpointing: Callable[[AnySetup], None] = choose_checkpointing,
) -> Run:
    """Place the model, build its optimizer and guard, restore `resume_from` if given, and open the run's folder.

    With `has_finished` nothing will be trained, and the base's output is not computed.
    """
    recipe, phases = session.recipe, session.phases
    # On resume the checkpoint has the adapter's values.
    if resume_from is None and recipe.optim.groups.adapter is not None and recipe.lora.init == DATA_INIT:
        with phases.time_phase("LoRA init from data"):
            session.say(initialize_lora_from_data(session, checkpoint, data, transformer))
    with phases.time_phase("placing"):
        # Hooks of shared context and offload, then compiled code beneath them, then DDP or FSDP2 around all.
        enable_context_parallel(session, checkpoint, data, transformer)
        offload_base(recipe, transformer, session.accelerator)
        compile_blocks(recipe, transformer, session.accelerator)
        engine = build_engine(session, transformer, build_optimizer(groups, recipe.optim))
        setup: AnySetup = Setup(session, task, checkpoint, data, engine)
    # After the engine has sharded the weights: the averages are over this rank's tensors.
    ema = TrainedEMA(engine.unwrapped_model, recipe.train.ema) if recipe.train.ema is not None else None
    identity = build_trajectory_config(setup)
    if resume_from is not None:
        # First: with another recipe the base would differ too, and its message would hide the cause.
        require_same_recipe(resume_from, identity, describe_launch_topology(session))
    # Before a checkpoint's weights are loaded: the base is the model as its files have it.
    with phases.time_phase("base fingerprint"):
        base = record_base_fingerprint(setup, resume_from, has_finished=has_finished)
    with phases.time_phase("loading checkpoint"):
        start_step, record = resume(setup, ema, identity, resume_from)
    start = load_guard_state(setup, record)
    # Counts what is free once the model is placed.
    with phases.time_phase("memory estimate"):
        apply_checkpointing(setup)
    # Nothing is written before this line: a run that is refused above leaves no folder behind.
    open_run_folder(session)
    write_base_fingerprint(session, base, start_step)
    if session.is_main and start.quarantine.records:
        start.quarantine.save()
    checkpoints = CheckpointManager(setup, ema, identity)
    journal = _open_run_log(setup, checkpoints, start_step)
    snapshots = Snapshots(
        lambda: collect_local_state(engine, ema),
        interval_steps=recipe.guard.snapshot_every,
        write_back=engine.load_scalar_state,
    )
    watcher = build_watcher(setup, snapshots)
    # After the journal has dropped the lines of steps that will be repeated.
    share_spike_history(watcher, journal)
    files = RecoveryFileUpdater(checkpoints, journal, watcher, start)
    with phases.time_phase("digests"):
        recovery = build_recovery(setup, ema, start, snapshots, files)
    parity = PeriodicKernelComparison(setup, recovery, ema=ema, start_step=start_step)
    return Run(
        session,
        task,
        checkpoint,
        data,
        engine,
        start_step,
        ema,
        base,
        recovery,
        watcher,
        parity,
        checkpoints,
        journal,
        SamplingTimeBudget(recipe.validation.max_sample_share),
    )


def _open_run_log(setup: AnySetup, checkpoints: CheckpointManager, start_step: int) -> Journal | None:
    """Open the run's log files and start the trackers; None except on the main process."""
    session = setup.session
    if not session.is_main:
        return None
    session.trackers.start_trackers(build_tracker_config(session), start_step)
    journal = Journal(
        session.dir,
        start_step=start_step,
        trackers=session.trackers,
        say=session.say,
        on_error=checkpoints.writer.record_error,
    )
    journal.write_rejected(setup.data.rejected, start_step)
    return journal


def build_trajectory_config(setup: AnySetup) -> dict[str, Any]:
    """The settings that a resumed run must share with its checkpoint: a flat dict, named as in the recipe."""
    session, recipe = setup.session, setup.recipe
    values = recipe.model_dump(mode="json")
    flat = {
        "model.family": recipe.model.family,
        "model.dtype": str(session.precision.dtype),
        "model.quantize": recipe.model.quantize,
        "model (digest of the transformer's files)": setup.data.transformer_digest,
        "data (digest of clips, captions and shape)": setup.data.data_digest,
        "train.mode": recipe.train.mode,
        "train.seed": recipe.train.seed,
        "train.ema": recipe.train.ema,
        SAMPLES_PER_STEP_KEY: session.samples_per_step,
        **setup.task.trajectory_config(recipe),
    }
    if setup.data.validation_digest:
        # Chat models have conversations instead of `validation.data`.
        of_chat = recipe.validation.conversations is not None
        flat[VALIDATION_CONVERSATIONS_KEY if of_chat else VALIDATION_DATA_KEY] = setup.data.validation_digest
    flat |= {f"lora.{key}": value for key, value in values["lora"].items()}
    # Omit options at their default: checkpoints written before the option existed must still match.
    for name, field in type(recipe.lora).model_fields.items():
        default = field.get_default(call_default_factory=True)
        if name in NEWER_OPTIONS and getattr(recipe.lora, name) == default:
            del flat[f"lora.{name}"]
    # Replaced by digests and scales: moving a file does not change the training.
    flat.pop("lora.under", None)
    if recipe.lora.under:
        flat["lora.under"] = [[*_list_digests(adapter), adapter["scale"]] for adapter in setup.data.adapters["under"]]
    if recipe.lora.has_file_init:
        # The file's folder and name are not part of its content.
        flat["lora.init"] = " ".join(_list_digests(setup.data.adapters["continued"]))
        # These are values of the file, whether the recipe repeats them or not.
        for name in ("rank", "alpha", "targets"):
            del flat[f"lora.{name}"]
    # Compiled blocks round differently; omitted if off, as in checkpoints from before the option.
    if recipe.train.compile:
        flat["train.compile"] = True
    # Omitted if off, for the same reason.
    if recipe.kernels.fp8 != "off":
        flat["kernels.fp8"] = recipe.kernels.fp8
    optim = dict(values["optim"])
    groups = optim.pop("groups")
    if optim["name"] == DEFAULT_OPTIMIZER:
        # As in checkpoints from before there was a choice.
        del optim["name"]
    flat |= {f"optim.{key}": value for key, value in optim.items()}
    # Groups that do not train are omitted.
    flat |= {f"optim.groups.{name}": group for name, group in groups.items() if group}
    groups_given = recipe.optim.groups.get_configured_groups().values()
    if any((group.schedule or recipe.optim.schedule) != "constant" for group in groups_given):
        # A schedule ends at this step. With a constant rate a run may be extended.
        flat["train.steps"] = recipe.train.steps
    return flat


def _list_digests(adapter: dict[str, Any]) -> list[str]:
    return [value for key, value in adapter.items() if key.endswith("sha256")]
