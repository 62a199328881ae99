"""Runs the micro-batch of a bundle again, on another machine or with some components switched off."""

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from dit_lora.commands.replay_script import replay_in_script
from dit_lora.commands.replayed import ReplayResult, describe_version_differences, run_and_diagnose_micro_batch
from dit_lora.commands.replayed_gradient import replay_gradient
from dit_lora.config.load import load_recipe, parse_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.cache.cache import MAX_ABS
from dit_lora.data.cache.digests import Digests
from dit_lora.data.loading.batch import Batch
from dit_lora.environment.progress_bar import hide_progress_bars
from dit_lora.environment.versions import probe_environment
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.repro_bundle import Bundle, read_replay_bundle
from dit_lora.numerics.precision import DTYPES, Precision
from dit_lora.training.execution.activation_checkpointing import choose_least_memory_mode, set_checkpointing
from dit_lora.training.execution.compiled import compile_blocks
from dit_lora.training.execution.offload import get_device_placement, offload_base
from dit_lora.training.replayable_batch import BatchPosition, ReplayableBatch, WeightedLoss
from dit_lora.training.tasks.registry import get_task_of_family


def replay_bundle(
    folder: Path,
    *,
    model: str | None = None,
    device: str | None = None,
    fp32: bool = False,
    without: Sequence[str] = (),
    script: str | None = None,
    arguments: Sequence[str] = (),
) -> ReplayResult:
    """Run a bundle's micro-batch again and diagnose it; of a wrong gradient, all micro-batches of the step.

    Args:
        folder: The bundle.
        model: The base checkpoint, if not the one of the run's config.
        device: `cpu`, `cuda` or `cuda:N`; None for the GPU if there is one.
        fp32: Compute in fp32.
        without: Names of the guard's fallbacks to apply, such as kernels to turn off.
        script: A bundle from another training loop needs the script that builds its model.
        arguments: Arguments of the script.

    Raises:
        DitLoraError: The bundle, the base model or the script cannot be used, or a name in `without` is unknown.
    """
    hide_progress_bars()
    bundle = read_replay_bundle(folder)
    # Only a bundle of an external loop records calls of the model.
    if bundle.facts.keys() & {"call", "calls"}:
        if model is not None or device is not None:
            raise DitLoraError(
                "--model and --device apply only to the bundle of a run; with --script, the script decides both"
            )
        return replay_in_script(bundle, folder, script, arguments, fp32=fp32, without=without)
    if script is not None or arguments:
        raise DitLoraError(
            f"--script applies only to bundles of other training loops, and {folder} comes from a run of "
            "dit-lora; remove it"
        )
    recipe = _load_recipe_of_replay_bundle(bundle, folder, model)
    micro_batches, transformer, digest = _rebuild_micro_batches(bundle, recipe, _resolve_device(device))
    notes = []
    if digest != bundle.facts["transformer_digest"]:
        notes.append("the base model's files differ from those of the run, so results may differ")
    notes += describe_version_differences(bundle, probe_environment().versions)
    masked_attention = get_family(recipe.model.family).has_attention_mask
    # Only the bundle of a wrong gradient has all micro-batches of its step.
    if "micro_batches" in bundle.facts:
        return replay_gradient(
            bundle,
            micro_batches,
            transformer,
            dtype=DTYPES[bundle.facts["dtype"]],
            fp32=fp32,
            disabled_names=without,
            masked_attention=masked_attention,
            notes=notes,
        )
    return run_and_diagnose_micro_batch(
        bundle,
        micro_batches[0],
        transformer,
        fp32=fp32,
        without=without,
        limit=MAX_ABS,
        masked_attention=masked_attention,
        notes=notes,
    )


def _resolve_device(requested: str | None) -> torch.device:
    """The requested device; None for the GPU if there is one, else the CPU.

    Raises `DitLoraError` if it does not exist.
    """
    # The bundle's own device may not exist on this machine.
    if requested is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise DitLoraError(f"--device must be cpu, cuda or cuda:N; got {requested}") from error
    if device.type not in ("cpu", "cuda"):
        raise DitLoraError(f"--device must be cpu, cuda or cuda:N; got {requested}")
    # `cuda` without an index is the first GPU.
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DitLoraError(f"--device {requested}: this machine has {torch.cuda.device_count()} GPUs")
    return device


def _load_recipe_of_replay_bundle(bundle: Bundle, folder: Path, model: str | None) -> Recipe:
    """The recipe of a replay bundle, with `model` as base checkpoint or, if None, the one of the run's config.yaml."""
    recipe = parse_recipe(dict(bundle.facts["recipe"]), source=str(folder))
    # RUN/bundles/BUNDLE: two folders up is the run.
    config = folder.absolute().parent.parent / "config.yaml"
    # A bundle may be published, so it names its base without folders. The run's config.yaml has the path.
    if model is None and config.exists():
        model = load_recipe(config).model.path
    if model is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model})})


def _rebuild_micro_batches(
    bundle: Bundle, recipe: Recipe, device: torch.device
) -> tuple[list[MicroBatch], nn.Module, str]:
    """Rebuild a bundle's micro-batches and their model, as the run had them.

    Also returns the digest of the base's files.
    """
    family = get_family(recipe.model.family)
    try:
        checkpoint = family.open(recipe.model, recipe)
    except DitLoraError as error:
        raise DitLoraError(f"{error}; --model names the run's base checkpoint") from error
    # Diffusion or chat: they load their models and form batches differently.
    task = get_task_of_family(recipe.model.family)
    digest = task.model_digest(checkpoint, recipe, Digests(checkpoint.path / "digests.json"))
    # The dtype of the run, also if this device would choose another one.
    dtype = DTYPES[bundle.facts["dtype"]]
    # The same steps in the same order as in a run, so that the same kernels are used.
    transformer, _, _ = task.load_trainable(recipe, family, checkpoint, dtype)
    _load_weights(transformer, bundle)
    mode = recipe.train.effective_checkpointing
    # Recomputation is bit-identical, and this machine may have less memory than the run's.
    set_checkpointing(transformer, choose_least_memory_mode(transformer) if mode == "auto" else mode)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Accelerate adds the same wrappers as in the run, such as autocast.
    accelerator = Accelerator(
        cpu=device.type == "cpu", mixed_precision=Precision(dtype, "as recorded").mixed_precision
    )
    offload_base(recipe, transformer, accelerator)
    compile_blocks(recipe, transformer, accelerator)
    prepared = accelerator.prepare(transformer, device_placement=get_device_placement(transformer))
    # Training mode: dropout is part of the recorded step.
    unwrapped_model = accelerator.unwrap_model(prepared).train()
    micro_batches: list[MicroBatch] = []
    for facts, tensors in bundle.micro_batches:
        # Sample ids and draw numbers of the recorded step: with the seed they determine all its random numbers.
        batch = Batch(tuple(facts["ids"]), tuple(facts["draws"]), tensors, facts["faults"]).to(accelerator.device)
        position = BatchPosition(recipe.train.seed, facts["step"], facts["micro_step"], facts["rank"])
        replayable = ReplayableBatch.from_batch(WeightedLoss(checkpoint), unwrapped_model, batch, position)
        micro_batches.append(replayable)
    return micro_batches, unwrapped_model, digest


def _load_weights(transformer: nn.Module, bundle: Bundle) -> None:
    """Copy the bundle's trained weights into the model. Raises `DitLoraError` if names or shapes differ."""
    # The bundle has only trained weights; the frozen ones come from the base checkpoint.
    trained = {name: p for name, p in transformer.named_parameters() if p.requires_grad}
    # Compared as a whole: a missing name counts as a different shape.
    if {n: p.shape for n, p in trained.items()} != {n: t.shape for n, t in bundle.weights.items()}:
        raise DitLoraError(
            "the trained weights of the bundle do not fit this base model; give the run's base model with --model"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(bundle.weights[name])
