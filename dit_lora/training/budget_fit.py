"""`dit-lora plan`: a recipe's budget, and of what would make it fit, the change that costs least."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dit_lora.config import Recipe
from dit_lora.data_config import DataConfig, VideoShape
from dit_lora.errors import DitLoraError
from dit_lora.numerics.precision import choose_precision
from dit_lora.optimizers import OPTIMIZERS
from dit_lora.recipe import load_recipe
from dit_lora.training.budget import GIB, Budget, Launch, count
from dit_lora.training.budget_model import opened, without_weights
from dit_lora.training.budget_subject import Subject
from dit_lora.training.checkpointing import MODES
from dit_lora.training.launch import require_for_zero, require_shardable

_SCALES = (0.75, 0.5)  # of a side that is made smaller


@dataclass(frozen=True)
class Change:
    """What to add to the command, so that a run fits."""

    overrides: tuple[str, ...]
    launch: Launch
    budget: Budget


@dataclass(frozen=True)
class Planned:
    """A budget, and what makes it fit if it does not."""

    budget: Budget
    change: Change | None
    """None where it fits, and where nothing that is known here makes it fit."""

    def record(self) -> dict[str, Any]:
        """As `plan --json` prints it; sizes in GiB."""
        budget, change = self.budget, self.change
        return {
            "phases": _gib(budget.phases),
            "fits": budget.fits,
            "gpu": budget.gpu / GIB if budget.gpu is not None else None,
            "cheapest_change": {
                "overrides": list(change.overrides),
                "sharding": change.launch.sharding if change.launch != budget.launch else None,
                "needs": change.budget.needs / GIB,
            }
            if change
            else None,
            "training": _gib(vars(budget.training)),
            "checkpointing": budget.mode,
            "activations": {shape: _gib(needs) for shape, needs in budget.activations.items()},
            "host": _gib(budget.host),
            "disk": _gib(budget.disk),
            "clips": budget.clips,
            "step": {"flops": budget.step.flops, "bytes_moved": budget.step.moved},
            "steps": budget.recipe.train.steps,
            "ranks": budget.launch.ranks,
            "sharding": budget.launch.sharding,
            "assumed": list(budget.assumed),
        }


def plan(path: str | Path, overrides: Sequence[str], launch: Launch, gpu: int | None) -> Planned:
    """The budget of a recipe on a GPU of so many bytes (None: no limit), counted as for a GPU.

    Raises `DitLoraError` for a recipe that is wrong, a checkpoint whose configs are nowhere, and what a launch
    cannot do.
    """
    recipe = load_recipe(path, overrides)
    _require_possible(recipe, launch)
    with without_weights(recipe) as local:
        search = _Search(path, overrides, local.model.path, gpu)
        budget = search.count((), launch)
        return Planned(budget, None if budget.fits else search.cheapest(budget))


def subject_of(recipe: Recipe, *, gpu: bool) -> Subject:
    """Of a recipe whose `model.path` is local."""
    family, checkpoint = opened(recipe)
    precision = choose_precision(recipe.model.dtype, torch.device("cpu"))
    dtype = torch.bfloat16 if gpu and recipe.model.dtype == "auto" else precision.dtype
    return Subject(recipe, family, checkpoint, dtype, gpu)


def _require_possible(recipe: Recipe, launch: Launch) -> None:
    """Raise `DitLoraError` for what training refuses of a recipe and a launch together."""
    if launch.sharding != "ddp" and launch.ranks == 1:
        raise DitLoraError(f"--sharding {launch.sharding} needs --ranks 2 or more; got 1")
    if launch.sharding == "fsdp2":
        require_shardable(recipe)
    if launch.sharding == "zero2":
        require_for_zero(recipe, some_idle=False)
    if recipe.train.offload != "none" and recipe.model.quantize is not None:
        raise DitLoraError("train.offload and model.quantize do not go together; leave one out")
    if launch.ranks % recipe.train.context_parallel:
        raise DitLoraError(
            f"train.context_parallel={recipe.train.context_parallel} must divide --ranks {launch.ranks}"
        )


@dataclass
class _Search:
    """Counts variants of one recipe."""

    path: str | Path
    overrides: Sequence[str]
    local: str
    """Where the checkpoint's configs are."""
    gpu: int | None

    def __post_init__(self) -> None:
        self._subjects: dict[Any, Subject] = {}

    def recipe(self, extra: Sequence[str]) -> Recipe:
        recipe = load_recipe(self.path, [*self.overrides, *extra])
        model = recipe.model.model_copy(update={"path": self.local})
        return recipe.model_copy(update={"model": model})

    def subject(self, recipe: Recipe) -> Subject:
        """Another for other data, on which shapes depend."""
        key = repr((recipe.data, recipe.chat))
        if key not in self._subjects:
            self._subjects[key] = subject_of(recipe, gpu=True)
        return self._subjects[key]

    def count(self, extra: Sequence[str], launch: Launch) -> Budget:
        recipe = self.recipe(extra)
        return count(recipe, self.subject(recipe), launch, self.gpu)

    def cheapest(self, budget: Budget) -> Change | None:
        """One change if one is enough, the cheapest first; else several. The data's shape only where nothing else does."""
        steps = list(self._steps(budget))
        helping: list[_Step] = []
        for own in (False, True):  # those that change the shape
            for step in [one for one in steps if (one.kind == "shape") is own]:
                change = self._try([step], budget.launch)
                if change is not None and change.budget.fits:
                    return change
                if change is not None and change.budget.needs < budget.needs:
                    helping.append(step)
            together = self._together(helping, budget)
            if together is not None:
                return together
        return None

    def _together(self, steps: Sequence["_Step"], budget: Budget) -> Change | None:
        taken: list[_Step] = []
        for step in steps:
            # A stronger form of what is taken already, such as full checkpointing, comes in its place.
            kept = [one for one in taken if one.kind != step.kind]
            change = self._try([*kept, step], budget.launch)
            if change is None:
                continue
            taken = [*kept, step]
            if change.budget.fits:
                return self._weakened(taken, steps, budget.launch) or change
        return None

    def _weakened(
        self, taken: list["_Step"], steps: Sequence["_Step"], launch: Launch
    ) -> Change | None:
        """What fits with less: each change, the dearest first, is left out or has a weaker form if that still fits."""
        best = None
        for step in reversed(taken):
            weaker = [one for one in steps[: steps.index(step)] if one.kind == step.kind]
            for instead in ([], *([one] for one in weaker)):
                fewer = [other for one in taken for other in (instead if one is step else [one])]
                change = self._try(fewer, launch) if fewer else None
                if change is not None and change.budget.fits:
                    taken, best = fewer, change
                    break
        return best

    def _try(self, steps: Sequence["_Step"], launch: Launch) -> Change | None:
        """None for what the recipe or the launch refuses."""
        overrides = tuple(one for step in steps for one in step.overrides)
        for step in steps:
            launch = step.launch or launch
        try:
            _require_possible(load_recipe(self.path, [*self.overrides, *overrides]), launch)
            return Change(overrides, launch, self.count(overrides, launch))
        except DitLoraError:
            return None

    def _steps(self, budget: Budget) -> Iterator["_Step"]:
        """What can be changed, by what it costs: time first, then precision, machines, and data at last."""
        recipe, train = budget.recipe, budget.recipe.train
        too_much = [name for name, size in budget.phases.items() if size > (budget.gpu or size)]
        if {"clips", "validation"} & set(too_much) and "vae_tiling" in DataConfig.model_fields:
            yield _Step("vae", ("data.vae_tiling=true",))
        if too_much == ["validation"]:
            yield _Step("validation", ("validation.prompts=[]",))
        if train.checkpointing != "auto":
            for mode in MODES[MODES.index(train.checkpointing) + 1 :]:
                yield _Step("checkpointing", (f"train.checkpointing={mode}",))
        for size in range(train.batch_size - 1, 0, -1):
            if train.batch_size % size == 0:
                accumulate = train.accumulate * train.batch_size // size
                overrides = (f"train.batch_size={size}", f"train.accumulate={accumulate}")
                yield _Step("batch", overrides)
        narrower = OPTIMIZERS[recipe.optim.name].narrower
        if narrower is not None:
            yield _Step("optimizer", (f"optim.name={narrower}",))
        if recipe.model.quantize is None and train.mode == "lora":
            for kind in ("fp8", "nf4"):
                yield _Step("quantize", (f"model.quantize={kind}",))
        if train.offload == "none" and train.mode == "lora":
            yield _Step("offload", ("train.checkpointing=full", "train.offload=group"))
        if budget.launch.ranks > 1 and budget.launch.sharding in ("ddp", "zero2"):
            yield _Step("sharding", (), Launch(budget.launch.ranks, "fsdp2"))
        yield from self._smaller(recipe)

    def _smaller(self, recipe: Recipe) -> Iterator["_Step"]:
        """Fewer frames, then smaller pictures, of those that the model takes."""
        data, checkpoint = recipe.data, self.subject(recipe).checkpoint
        if self.subject(recipe).is_chat:
            for frames in {data.frames // 2, data.frames // 4} - {0}:
                yield _Step("shape", (f"data.frames={frames}",))
            return
        step = checkpoint.side_step
        for scale in _SCALES:
            fewer = range(int(data.frames * scale), 1, -1)
            given = (VideoShape(frames, data.height, data.width) for frames in fewer)
            taken = next((one for one in given if _takes(checkpoint, one)), None)
            if taken is not None:
                yield _Step("shape", (f"data.frames={taken.frames}",))
        for scale in _SCALES:
            height, width = (
                max(step, round(side * scale / step) * step) for side in (data.height, data.width)
            )
            if _takes(checkpoint, VideoShape(data.frames, height, width)):
                yield _Step("shape", (f"data.height={height}", f"data.width={width}"))


@dataclass(frozen=True)
class _Step:
    """One change; of one kind, the last one counts."""

    kind: Literal[
        "vae",
        "validation",
        "checkpointing",
        "batch",
        "optimizer",
        "quantize",
        "offload",
        "sharding",
        "shape",
    ]
    overrides: tuple[str, ...]
    launch: Launch | None = None


def _takes(checkpoint: Any, shape: VideoShape) -> bool:
    try:
        checkpoint.check_shape(shape)
    except DitLoraError:
        return False
    return True


def _gib(sizes: Any) -> dict[str, float]:
    return {name: size / GIB for name, size in sizes.items()}
