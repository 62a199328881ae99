"""Runs the micro-batch of a bundle again, on another machine or with something switched off."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from dit_lora.config.load import load_recipe, parse_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.cache.cache import MAX_ABS
from dit_lora.data.cache.digests import Digests
from dit_lora.data.loading.batch import Batch
from dit_lora.environment.versions import probe_environment
from dit_lora.errors import DitLoraError, listed
from dit_lora.families import get_family
from dit_lora.guard.bundle import Bundle, read_bundle
from dit_lora.guard.diagnose import diagnose
from dit_lora.guard.replay import MicroBatch, Outcome, run
from dit_lora.guard.state import has_run_away, run_away, weight_peak
from dit_lora.guard.suspects import Suspects
from dit_lora.guard.switches import (
    Switch,
    all_switches,
    choose_cudnn,
    find_switch,
    in_fp32,
    kept_attention,
)
from dit_lora.guard.verdict import Verdict
from dit_lora.numerics.precision import DTYPES, Precision
from dit_lora.training.execution.activation_checkpointing import least_memory, set_checkpointing
from dit_lora.training.execution.compiled import compile_blocks
from dit_lora.training.execution.offload import offload_base, placement
from dit_lora.training.micro_batch import Place, replayable, sample_losses
from dit_lora.training.session.session import quiet_libraries
from dit_lora.training.tasks.registry import task_of


@dataclass(frozen=True)
class Replayed:
    """The result of running a bundle again."""

    outcome: Outcome
    verdict: Verdict | None
    """The diagnosis; None if the micro-batch was healthy."""
    ids: tuple[str, ...]
    """The samples, in the order of the outcome's losses."""
    recorded: dict[str, Any]
    """The event, as the run wrote it."""
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "healthy": self.verdict is None,
            "verdict": self.verdict.record() if self.verdict else None,
            "recorded": self.recorded,
            "sample_ids": list(self.ids),
            "losses": [str(loss) for loss in self.outcome.losses],
            "timesteps": list(self.outcome.timesteps),
            "notes": list(self.notes),
        }

    def told(self) -> str:
        """Return the two verdicts, then each sample's loss and timestep, and the trail to the first bad value."""
        then = self.recorded["verdict"]
        lines = [f"recorded: step {self.recorded['step']}: {then['cause']}: {then['words']}"]
        if self.verdict is None:
            lines.append("replayed: healthy; the event does not come back here")
        else:
            lines.append(f"replayed: {self.verdict.cause}: {self.verdict.words}")
        rows = zip(self.ids, self.outcome.losses, self.outcome.timesteps, strict=True)
        lines += [f"  {sample}: loss {loss:g} at timestep {t}" for sample, loss, t in rows]
        trail = self.verdict.evidence.get("trail", []) if self.verdict else []
        return "\n".join([*lines, *(f"  {step}" for step in trail), *self.notes])


def replay_bundle(
    folder: Path,
    *,
    model: str | None = None,
    device: str | None = None,
    fp32: bool = False,
    without: Sequence[str] = (),
) -> Replayed:
    """Run a bundle's micro-batch again and diagnose it; `without` names switches that stay off.

    Raises `DitLoraError` if the bundle or the base model cannot be used, or nothing has such a name.
    """
    quiet_libraries()
    bundle = read_bundle(folder)
    recipe = _recipe(bundle, folder, model)
    micro_batch, transformer, digest = _rebuild(bundle, recipe, _device(device))
    kind = bundle.facts["event"]["kind"]
    with ExitStack() as stack:
        stack.enter_context(kept_attention())
        choose_cudnn(masked=get_family(recipe.model.family).masked_attention)
        switches: list[Switch] = all_switches(transformer)
        names = {switch.name for switch in switches}
        # A recorded name may be missing here: another machine has other kernels and backends.
        for name in [*(n for n in bundle.facts["switched_off"] if n in names), *without]:
            stack.enter_context(find_switch(switches, name).off())
        start = bundle.facts["start_peak"]
        suspects = Suspects(transformer, lambda: [], switches, start_peak=start, limit=MAX_ABS)
        if fp32:
            stack.enter_context(in_fp32(transformer))
        outcome = run(micro_batch, transformer)
        # Zero gradients are a fault only where the run tripped by them.
        healthy = outcome.is_healthy(needs_gradient=kind == "zero_gradient")
        verdict = None if healthy else diagnose(micro_batch, suspects, kind=kind)
        # A step tripped by its weights replays healthy: their size is then the evidence.
        if verdict is None and has_run_away(weight_peak(bundle.weights.values()), start):
            verdict = run_away(micro_batch, suspects)
    return Replayed(
        outcome, verdict, micro_batch.ids, bundle.facts["event"], _notes(bundle, digest)
    )


def _device(asked: str | None) -> torch.device:
    """Return the device asked for, by default the GPU if there is one; never another than that."""
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise DitLoraError(f"--device {asked}: give cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise DitLoraError(f"--device {asked}: give cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DitLoraError(f"--device {asked}: this machine has {torch.cuda.device_count()} GPUs")
    return device


def _recipe(bundle: Bundle, folder: Path, model: str | None) -> Recipe:
    """Return the bundle's recipe, with the base model that was given, or that the run beside the bundle used."""
    recipe = parse_recipe(dict(bundle.facts["recipe"]), source=str(folder))
    config = folder.absolute().parent.parent / "config.yaml"
    # A bundle names its base without folders, for it may be published; the run beside it knows the path.
    if model is None and config.exists():
        model = load_recipe(config).model.path
    if model is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model})})


def _rebuild(
    bundle: Bundle, recipe: Recipe, device: torch.device
) -> tuple[MicroBatch, nn.Module, str]:
    """Return the micro-batch on the model as the run had it, that model, and the digest of the base's files."""
    family = get_family(recipe.model.family)
    try:
        checkpoint = family.open(recipe.model, recipe)
    except DitLoraError as error:
        raise DitLoraError(f"{error}; --model names the run's base checkpoint") from error
    task = task_of(recipe.model.family)
    digest = task.model_digest(checkpoint, recipe, Digests(checkpoint.path / "digests.json"))
    dtype = DTYPES[bundle.facts["dtype"]]
    # The same steps in the same order as a run takes them, so that the same kernels compute.
    transformer, _, _ = task.load_trainable(recipe, family, checkpoint, dtype)
    _load(transformer, bundle)
    mode = recipe.train.asked_checkpointing
    # A recomputation gives the same bits, and this machine may be smaller than the run's.
    set_checkpointing(transformer, least_memory(transformer) if mode == "auto" else mode)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    accelerator = Accelerator(
        cpu=device.type == "cpu", mixed_precision=Precision(dtype, "as recorded").mixed
    )
    offload_base(recipe, transformer, accelerator)
    compile_blocks(recipe, transformer, accelerator)
    prepared = accelerator.prepare(transformer, device_placement=placement(transformer))
    bare = accelerator.unwrap_model(prepared).train()
    # Names and draws of the recorded step: with the seed they give every random number of it.
    facts = bundle.facts["replay"]
    batch = Batch(tuple(facts["ids"]), tuple(facts["draws"]), bundle.samples, facts["faults"]).to(
        accelerator.device
    )
    place = Place(recipe.train.seed, facts["step"], facts["micro_step"], facts["rank"])
    return replayable(sample_losses(checkpoint), bare, batch, place), bare, digest


def _load(transformer: nn.Module, bundle: Bundle) -> None:
    trained = {name: p for name, p in transformer.named_parameters() if p.requires_grad}
    if {n: p.shape for n, p in trained.items()} != {n: t.shape for n, t in bundle.weights.items()}:
        raise DitLoraError("the bundle's trained weights are not of this base model's shapes")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(bundle.weights[name])


def _notes(bundle: Bundle, digest: str) -> tuple[str, ...]:
    """Return what differs from the machine that wrote the bundle."""
    notes = []
    if digest != bundle.facts["transformer_digest"]:
        notes.append("the base model's files are not those of the run: results may differ")
    here, theirs = probe_environment().versions, bundle.facts["packages"]
    other = [
        f"{n}: {theirs[n]} then, {here.get(n)} now" for n in theirs if here.get(n) != theirs[n]
    ]
    return (*notes, *([listed("other versions", other)] if other else []))
