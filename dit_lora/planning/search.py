"""Implements `dit-lora plan`: a recipe's memory budget, and a change of settings that makes it fit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.optimizers import OPTIMIZERS
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families.without_weights import opened, without_weights
from dit_lora.numerics.precision import choose_precision
from dit_lora.planning.budget import GIB, Launch, MemoryBudget, count
from dit_lora.planning.subject import Subject
from dit_lora.training.execution.activation_checkpointing import MODES
from dit_lora.training.session.launch import require_shared

Settings = Mapping[str, object]
"""Recipe keys, and `_SHARDING`, with their values."""
_SHARDING = "sharding"
_SCALES = (0.75, 0.5)  # factors to try for frames, and for height and width


@dataclass(frozen=True)
class Change:
    """Settings to add to the command line so that the run fits."""

    overrides: tuple[str, ...]
    budget: MemoryBudget


@dataclass(frozen=True)
class Planned:
    """A memory budget, and the change that makes it fit if it does not."""

    budget: MemoryBudget
    change: Change | None
    """None if the budget fits, and if no known change makes it fit."""

    @property
    def sharding(self) -> str | None:
        """The sharding that the change switches to; None if it stays as launched."""
        after = self.change.budget.launch if self.change else self.budget.launch
        return after.sharding if after != self.budget.launch else None

    def record(self) -> dict[str, Any]:
        """The output of `plan --json`; sizes in GiB."""
        budget, change = self.budget, self.change
        # None if the run fits, or if no change was found.
        cheapest = None
        if change is not None:
            needs = change.budget.needs / GIB
            overrides = list(change.overrides)
            cheapest = {"overrides": overrides, "sharding": self.sharding, "needs": needs}
        return {
            "phases": _gib(budget.phases),
            "fits": budget.fits,
            "gpu": budget.gpu / GIB if budget.gpu is not None else None,
            "cheapest_change": cheapest,
            "training": _gib(vars(budget.training)),
            "checkpointing": budget.mode,
            "activations": {shape: _gib(needs) for shape, needs in budget.activations.items()},
            "host": _gib(budget.host),
            "disk": _gib(budget.disk),
            "clips": budget.clips,
            "steps": budget.recipe.train.steps,
            "ranks": budget.launch.ranks,
            "sharding": budget.launch.sharding,
            "assumed": list(budget.assumed),
        }


def plan(
    path: str | Path,
    overrides: Sequence[str],
    launch: Launch,
    gpu: int | None,
) -> Planned:
    """Compute the memory budget of a recipe, and a change that makes it fit.

    Args:
        path: The recipe file.
        overrides: `key=value` settings on top of it.
        launch: Number of ranks and sharding.
        gpu: Bytes of the GPU; None for no limit. The budget is computed for a GPU in either case.

    Raises:
        DitLoraError: The recipe is wrong, the checkpoint's configs cannot be found, or the launch is not possible.
    """
    recipe = load_recipe(path, overrides)
    _require_possible(recipe, launch)
    # A folder with the checkpoint's configs, downloaded if necessary; weights are not read.
    with without_weights(recipe) as local:
        variants = _Variants(path, overrides, local.model.path, launch, gpu)
        budget = variants.count()
        return Planned(budget, None if budget.fits else _what_fits(variants, budget))


def subject_of(recipe: Recipe, *, gpu: bool) -> Subject:
    """Open the checkpoint of a recipe whose `model.path` is local."""
    family, checkpoint = opened(recipe)
    precision = choose_precision(recipe.model.dtype, torch.device("cpu"))
    # The plan is for a GPU even on a machine without one, so `auto` means bf16.
    dtype = torch.bfloat16 if gpu and recipe.model.dtype == "auto" else precision.dtype
    return Subject(recipe, family, checkpoint, dtype, gpu)


def _require_possible(recipe: Recipe, launch: Launch) -> None:
    """Raise `DitLoraError` for a combination of recipe and launch that training rejects."""
    # There is nothing to shard over.
    if launch.sharding != "ddp" and launch.ranks == 1:
        raise DitLoraError(f"--sharding {launch.sharding} needs --ranks 2 or more; got 1")
    if launch.sharding != "ddp":
        require_shared(recipe, launch.sharding)
    if recipe.train.offload != "none" and recipe.model.quantize is not None:
        raise DitLoraError("train.offload and model.quantize do not go together; leave one out")
    if launch.ranks % recipe.train.context_parallel:
        raise DitLoraError(
            f"train.context_parallel={recipe.train.context_parallel} must divide --ranks {launch.ranks}"
        )


@dataclass
class _Variants:
    """Variants of one recipe with some settings changed, and their budgets."""

    path: str | Path
    overrides: Sequence[str]
    local: str
    """The folder of the checkpoint's configs."""
    launch: Launch
    gpu: int | None
    _subjects: dict[str, Subject] = field(default_factory=dict)

    def count(self, changes: Sequence[Settings] = ()) -> MemoryBudget:
        """The budget with these changes. Raises `DitLoraError` if the recipe or the launch does not allow them."""
        settings = _together(changes)
        recipe = load_recipe(self.path, [*self.overrides, *_typed(settings)])
        # Sharding is no key of the recipe: it belongs to the launch.
        launch = Launch(self.launch.ranks, "fsdp2") if _SHARDING in settings else self.launch
        _require_possible(recipe, launch)
        # The recipe was read again, so its path is that of the original checkpoint.
        model = recipe.model.model_copy(update={"path": self.local})
        recipe = recipe.model_copy(update={"model": model})
        return count(recipe, self.subject(recipe), launch, self.gpu)

    def tried(self, changes: Sequence[Settings]) -> MemoryBudget | None:
        """The budget with these changes; None if they are not allowed."""
        try:
            return self.count(changes)
        except DitLoraError:
            return None

    def subject(self, recipe: Recipe) -> Subject:
        """The recipe's checkpoint on the meta device. Cached by the data settings, which shapes depend on."""
        key = repr((recipe.data, recipe.chat))
        if key not in self._subjects:
            self._subjects[key] = subject_of(recipe, gpu=True)
        return self._subjects[key]


def _what_fits(variants: _Variants, budget: MemoryBudget) -> Change | None:
    """The first single change that makes the run fit, else several together.

    Data shapes change only as the last resort.
    """
    selected: list[Settings] = []
    # The smallest peak so far.
    min_bytes = budget.needs
    smaller = _smaller(budget.recipe, variants.subject(budget.recipe))
    # First settings that keep the data's shape, then smaller shapes.
    for changes in (list(_settings(budget)), list(smaller)):
        for change in changes:
            single_budget = variants.tried([change])
            if single_budget is not None and single_budget.fits:
                return _as_typed([change], single_budget)
        # No single change is enough: add up those that reduce the peak, until it fits.
        for change in changes:
            together = variants.tried([*selected, change])
            # Not allowed, or without an effect on the peak.
            if together is None or together.needs >= min_bytes:
                continue
            selected.append(change)
            min_bytes = together.needs
            if together.fits:
                return _without_excess(variants, selected, together)
    return None


def _without_excess(variants: _Variants, taken: list[Settings], fitting: MemoryBudget) -> Change:
    """Drop the changes that are not needed, starting with the last one.

    For example, full checkpointing makes the selective checkpointing before it superfluous.
    """
    # The last ones first: they cost the most.
    for change in reversed(taken):
        fewer = [other_change for other_change in taken if other_change is not change]
        budget = variants.tried(fewer)
        if budget is not None and budget.fits:
            taken, fitting = fewer, budget
    return _as_typed(taken, fitting)


def _as_typed(changes: Sequence[Settings], budget: MemoryBudget) -> Change:
    """The changes as command-line overrides."""
    return Change(tuple(_typed(_together(changes))), budget)


def _together(changes: Sequence[Settings]) -> Settings:
    """Merge the settings. If a key occurs twice, the last value wins."""
    return {name: value for change in changes for name, value in change.items()}


def _typed(settings: Settings) -> list[str]:
    """The settings as `key=value`, without sharding."""
    return [f"{name}={value}" for name, value in settings.items() if name != _SHARDING]


def _settings(budget: MemoryBudget) -> Iterator[Settings]:
    """Settings of the recipe to try, the cheapest first. The order is fixed, because no time is predicted.

    VAE tiling, then more recomputation one mode at a time, smaller micro-batches, fewer bits, offload, sharding.
    """
    recipe, train, launch = budget.recipe, budget.recipe.train, budget.launch
    # Phases that do not fit. Tiling helps where the VAE runs; sampling can be turned off.
    too_much = {name for name, size in budget.phases.items() if size > (budget.gpu or size)}
    if too_much & {"clips", "validation"}:
        yield {"data.vae_tiling": "true"}
    if too_much == {"validation"}:
        yield {"validation.prompts": "[]"}
    if train.checkpointing != "auto":
        for mode in MODES[MODES.index(train.checkpointing) + 1 :]:
            yield {"train.checkpointing": mode}
    # The product of batch size and accumulation stays, and so does the effective batch.
    for size in range(train.batch_size - 1, 0, -1):
        if train.batch_size % size == 0:
            accumulate = train.accumulate * train.batch_size // size
            yield {"train.batch_size": size, "train.accumulate": accumulate}
    # An optimizer with less state.
    narrower = OPTIMIZERS[recipe.optim.name].narrower
    if narrower is not None:
        yield {"optim.name": narrower}
    if recipe.model.quantize is None and train.mode == "lora":
        yield {"model.quantize": "fp8"}
        yield {"model.quantize": "nf4"}
    if train.offload == "none" and train.mode == "lora":
        yield {"train.checkpointing": "full", "train.offload": "group"}
    if launch.ranks > 1 and launch.sharding != "fsdp2":
        yield {_SHARDING: "fsdp2"}


def _smaller(recipe: Recipe, subject: Subject) -> Iterator[Settings]:
    """Settings with fewer frames, then with smaller frames, of sizes that the model accepts."""
    data, checkpoint = recipe.data, subject.checkpoint
    if subject.is_chat:
        for frames in {data.frames // 2, data.frames // 4} - {0}:
            yield {"data.frames": frames}
        return
    for scale in _SCALES:
        # The largest number of frames that the checkpoint accepts.
        for frames in range(int(data.frames * scale), 1, -1):
            if checkpoint.refusal(VideoShape(frames, data.height, data.width)) is None:
                yield {"data.frames": frames}
                break
    # Height and width must be multiples of it.
    step = checkpoint.side_step
    for scale in _SCALES:
        height, width = (
            max(step, round(side * scale / step) * step) for side in (data.height, data.width)
        )
        if checkpoint.refusal(VideoShape(data.frames, height, width)) is None:
            yield {"data.height": height, "data.width": width}


def _gib(sizes: Any) -> dict[str, float]:
    """Convert bytes to GiB."""
    return {name: size / GIB for name, size in sizes.items()}
