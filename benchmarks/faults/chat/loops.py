"""Chat models in loops that are not ours: fp16 LoRA under AdamW, queries that begin at zero."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.faults.fault import Expected, Fault
from benchmarks.faults.loop import forget, not_finite, observed
from benchmarks.faults.world import Observation, World
from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.data.loading.batch import collate
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.guard.attach.guard import Guard
from dit_lora.training.tasks.chat.samples import build_training_set, find_conversations

Change = Callable[[Any], None]
_UPDATES = 2


class Stock:
    """A plain accelerate loop over a VideoChat2 in fp16 throughout, as its scripts load it."""

    def __init__(self, world: World, change: Change) -> None:
        recipe = world.recipe("stock", world.clips, world.root / "caches" / "stock", ())
        family: Any = world.family
        self.checkpoint = family.open(recipe.model, recipe)
        conversations = find_conversations(recipe, self.checkpoint, recipe.data, quiet=True)
        clips = build_training_set(conversations.entries, self.checkpoint, recipe)
        self.batch = collate([clips.read_sample(entry, 0) for entry in clips.entries[:2]])
        self.model: Any = self.checkpoint.load_model(torch.float16)
        torch.manual_seed(3)
        change(self.model)
        self.accelerator = world.accelerator
        self.accelerator.gradient_accumulation_steps = 1
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)  # eps 1e-8
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def run(self, guard: Guard | None = None) -> None:
        """Take two updates, and check what stands before a save."""
        inputs = self.checkpoint.build_model_inputs(self.batch.tensors)
        inputs["pixel_values"] = inputs["pixel_values"].half()
        tensors = self.batch.tensors
        answers = {
            "answer_positions": tensors["answer_positions"],
            "answer_labels": tensors["labels"],
        }
        for _ in range(_UPDATES):
            losses = self.model(**inputs, **answers)
            self.accelerator.backward(losses.mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        if guard is not None:
            guard.require_finite()


def _lora(model: nn.Module) -> None:
    targets = r".*language_model.*\.(k_proj|v_proj|qkv_proj)"
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=targets), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        parameter.data = parameter.data.half()


def _wide_lora(model: nn.Module) -> None:
    _lora(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@contextmanager
def _stock(world: World, change: Change) -> Iterator[Stock]:
    try:
        yield Stock(world, change)
    finally:
        forget(world.accelerator)


def _guarded(world: World, change: Change, then: Change = lambda model: None) -> Observation:
    """Run the loop under the two lines of the plugin; `then` is done to the model after them."""
    with _stock(world, change) as loop:
        try:
            guard = Guard.attach(
                loop.accelerator,
                loop.model,
                loop.optimizer,
                config=RecoveryConfig(max_skips=1),
                folder=world.root / "guarded",
            )
        except DitLoraError as refused:
            return Observation([], refused)

        def run() -> None:
            then(loop.model)
            loop.run(guard)

        return observed(lambda: guard, run)


def _half(fault: Fault, world: World) -> Observation:
    """Run half-precision LoRA: unguarded, the first update makes NaN of a finite loss; guarded, it is undone."""
    with _stock(world, _lora) as loop:
        loop.run()
        if not not_finite(loop.model):
            raise CheckFailedError("fp16 LoRA under AdamW stayed finite: the fault is gone")
    return _guarded(world, _lora)


def _halved_later(fault: Fault, world: World) -> Observation:
    """Halve the model after the guard was attached: nothing that it has looked at shows it."""
    return _guarded(world, _wide_lora, lambda model: model.half())


def _queries(model: Any) -> None:
    """Train only the extra queries, in fp32, read in fp16; scale the loss as fp16 needs."""
    model.requires_grad_(False)
    queries = model.get_parameter(_QUERIES)
    queries.data = queries.data.float()
    queries.requires_grad_(True)
    trunk = model.model

    def read(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].to(trunk.projection.weight.dtype), *args[1:])

    trunk.qformer.register_forward_pre_hook(read)
    model.register_forward_hook(lambda _module, _args, losses: losses * _SCALE)


def _zero_queries(model: Any) -> None:
    _queries(model)
    model.get_parameter(_QUERIES).data.zero_()


def _zero_in_fp16(fault: Fault, world: World) -> Observation:
    """Run a loop that is healthy with queries that differ, and is not with zeros."""
    usual = _guarded(world, _queries)
    if usual.error is not None or usual.events:
        raise CheckFailedError(f"it fails without the fault: {usual.error or usual.events}")
    return _guarded(world, _zero_queries)


def _zero_in_our_run(fault: Fault, world: World) -> Observation:
    """Run with zero queries: in fp32 that is finite, at a thousand times the others' gradient, which the
    connector's norm shows.
    """
    folder = world.root / "zero_queries"
    path, name = folder / "model.safetensors", str(world.targets.queries)
    if world.accelerator.is_main_process:
        world.family.build_tiny_checkpoint(world.targets.variant, folder, 0)
        weights = load_file(path)
        weights[name] = torch.zeros_like(weights[name])
        save_file(weights, path, metadata={"format": "pt"})
    world.accelerator.wait_for_everyone()
    usual = world.observe(f"{fault.name}, usual", None)
    observation = world.observe(fault.name, None, (("model.path", str(folder)),))
    before, after = (_connector_norm(seen_run.folder) for seen_run in (usual, observation))
    error = observation.error
    if not error and not after > _MORE * before:
        error = CheckFailedError(f"the connector's gradient norm is {after:g}, without {before:g}")
    if not error and (num_constant := _constant_queries(world)):
        error = CheckFailedError(f"{num_constant} new queries are constant")
    return replace(observation, error=error)


def _connector_norm(folder: Path) -> float:
    """The connector's gradient norm before clipping, at the first step."""
    line = (folder / "metrics.jsonl").read_text("utf-8").splitlines()[0]
    return json.loads(line)["grad_norm_groups"]["connector"]


def _constant_queries(world: World) -> int:
    """Number of queries of a newly created model whose values are all equal."""
    checkpoint: Any = world.family.open(world.recipe("new", world.clips, world.root, ()).model)
    queries = checkpoint.model_class(checkpoint.config).get_parameter(world.targets.queries)
    return int((queries.amax(-1) == queries.amin(-1)).sum())


_SCALE, _MORE = 1024.0, 1000.0
_QUERIES = "model.extra_query_tokens"
_HALF = Expected("precision", "stop", ("is fp16", "AdamW"), exit_code=3)
_ZERO = Expected("precision", "stop", ("in the backward",), module="qformer.embeddings.LayerNorm", exit_code=3)
_SAID_NOTHING = Expected("none", "none")
FAULTS: tuple[Fault, ...] = tuple(
    Fault(f"chat:{name}", component, moment, expected, play=play, needs=("queries",))
    for name, component, moment, expected, play in (
        ("half trainables", "optimizer", "step 1", _HALF, _half),
        ("half trainables after the guard", "optimizer", "step 1", _HALF, _halved_later),
        ("zero queries in fp16", "precision", "step 1", _ZERO, _zero_in_fp16),
        ("zero queries in our run", "precision", "every step", _SAID_NOTHING, _zero_in_our_run),
    )
)
