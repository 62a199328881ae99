"""Runs micro-batches again: in the loop that ran them, or from a bundle on another machine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from dit_lora.compat import probe_environment
from dit_lora.config import Recipe
from dit_lora.data.batch import LOSS_WEIGHT, Batch
from dit_lora.data.cache import MAX_ABS
from dit_lora.data.digest import Digests
from dit_lora.errors import DitLoraError, listed
from dit_lora.families import get_family
from dit_lora.numerics.bisect import diagnose
from dit_lora.numerics.bundle import Bundle, read_bundle, write_bundle
from dit_lora.numerics.precision import DTYPES, Precision
from dit_lora.numerics.replay import MicroBatch, Outcome, run
from dit_lora.numerics.state import has_run_away, run_away, weight_peak
from dit_lora.numerics.streams import Streams, fold
from dit_lora.numerics.suspects import Suspects
from dit_lora.numerics.switches import (
    Switch,
    all_switches,
    find_switch,
    in_fp32,
    kept_attention,
)
from dit_lora.numerics.verdict import Verdict
from dit_lora.objectives import LossOutput
from dit_lora.recipe import load_recipe, parse_recipe
from dit_lora.training.checkpointing import least_memory, set_checkpointing
from dit_lora.training.compiled import compile_blocks
from dit_lora.training.offload import offload_base, placement
from dit_lora.training.runtime import quiet_libraries
from dit_lora.training.task import Trained
from dit_lora.training.tasks import task_of

LossFunction = Callable[[nn.Module, Batch, Streams], LossOutput]


def sample_losses(checkpoint: Trained) -> LossFunction:
    """Return the function of the family's losses of a batch, each times its sample's weight."""

    def losses(model: nn.Module, batch: Batch, streams: Streams) -> LossOutput:
        output = checkpoint.losses(model, batch.tensors, streams)
        weights = batch.tensors.get(LOSS_WEIGHT)
        if weights is None:
            return output
        return LossOutput(output.losses * weights, output.timesteps)

    return losses


@dataclass(frozen=True)
class Place:
    """The place of a micro-batch in a run: with it, every draw is known."""

    seed: int
    step: int
    micro_step: int
    rank: int


def forward(losses: LossFunction, model: nn.Module, batch: Batch, place: Place) -> LossOutput:
    """Compute a micro-batch's losses, equal bit for bit at every call with equal weights."""
    # Seeded at every call: a replay draws what the step drew, whatever was drawn in between.
    # Dropout inside the model draws from torch's own generators.
    seed = fold(place.seed, "dropout", place.step, place.micro_step, place.rank)
    _seed_generators(seed, next(iter(batch.tensors.values())).device)
    return losses(model, batch, Streams(place.seed, batch.draws))


def _seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of the device, and no other.

    `torch.manual_seed` does it for every kind of device; one that is not there writes down a traceback at each call.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def replayable(losses: LossFunction, model: nn.Module, batch: Batch, place: Place) -> MicroBatch:
    """Return the micro-batch, to be run on the bare model whenever it is wanted."""
    return MicroBatch(
        ids=batch.ids,
        step=place.step,
        micro_step=place.micro_step,
        rank=place.rank,
        tensors=batch.tensors,
        forward=lambda: forward(losses, model, batch, place),
        single=lambda index: replayable(losses, model, batch.single(index), place),
        faults=batch.faults,
        draws=batch.draws,
        # For trials: the same samples at draws that training never uses, so that a bad draw is told from bad data.
        redrawn=lambda number: replayable(losses, model, _elsewhere(batch, number), place),
        at=lambda other, draws: replayable(
            losses,
            model,
            replace(batch, draws=other.draws) if draws else batch,
            Place(place.seed, other.step, other.micro_step, other.rank),
        ),
    )


class Parts(NamedTuple):
    """A micro-batch as it is sent to another rank."""

    batch: Batch
    """The samples, on the CPU."""
    step: int
    micro_step: int
    rank: int


def parts_of(one: MicroBatch) -> Parts:
    # Pickled on its way: a tensor on a device would come back on the sender's.
    tensors = {name: tensor.cpu() for name, tensor in one.tensors.items()}
    batch = Batch(one.ids, one.draws, tensors, dict(one.faults))
    return Parts(batch, one.step, one.micro_step, one.rank)


def together(
    parts: Parts, losses: LossFunction, model: nn.Module, seed: int, device: torch.device
) -> MicroBatch:
    """Return the micro-batch that another rank has sent, equal to its own bit for bit."""
    place = Place(seed, parts.step, parts.micro_step, parts.rank)
    return replayable(losses, model, parts.batch.to(device), place)


def _elsewhere(batch: Batch, number: int) -> Batch:
    """Return the same samples with draws that no epoch gives them."""
    return replace(batch, draws=tuple(fold(draw, "redrawn", number) for draw in batch.draws))


def keep_bundle(
    folder: Path,
    micro_batch: MicroBatch,
    event: dict[str, Any],
    weights: Mapping[str, torch.Tensor],
    recipe: Recipe,
    precision: Precision,
    transformer_digest: str,
    switched_off: Sequence[str],
    start_peak: float,
) -> list[str]:
    """Write a bundle of a micro-batch, with the trained weights whole; return what did not fit."""
    facts = {
        "event": event,
        "recipe": recipe.model_dump(mode="json"),
        "replay": {
            "step": micro_batch.step,
            "micro_step": micro_batch.micro_step,
            "rank": micro_batch.rank,
            "ids": micro_batch.ids,
            "draws": micro_batch.draws,
            "faults": dict(micro_batch.faults),
        },
        "switched_off": list(switched_off),
        "start_peak": start_peak,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype is precision.dtype),
        "transformer_digest": transformer_digest,
        "packages": dict(probe_environment().versions),
    }
    limit = recipe.guard.bundle_mib
    return write_bundle(folder, facts, micro_batch.tensors, weights, limit_mib=limit)


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
        torch.backends.cuda.enable_cudnn_sdp(False)  # as runs do
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
