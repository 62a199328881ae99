"""Implements `dit-lora plan`: a recipe's memory budget, and a change of settings that makes it fit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.optimizers import OPTIMIZERS
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families.without_weights import config_only_recipe, open_recipe_checkpoint
from dit_lora.numerics.precision import choose_precision
from dit_lora.planning.budget import GIB, LaunchLayout, MemoryBudget, compute_budget
from dit_lora.planning.subject import MemoryEstimator
from dit_lora.training.execution.activation_checkpointing import CHECKPOINTING_MODES
from dit_lora.training.session.launch import require_shardable

Settings = Mapping[str, object]
"""Recipe keys, and `_SHARDING_KEY`, with their values."""
_SHARDING_KEY = "sharding"
_SHAPE_SCALES = (0.75, 0.5)  # factors to try for frames, and for height and width


@dataclass(frozen=True)
class PlanChange:
    """Settings to add to the command line so that the run fits."""

    overrides: tuple[str, ...]
    budget: MemoryBudget


@dataclass(frozen=True)
class MemoryPlan:
    """A memory budget, and the change that makes it fit if it does not."""

    budget: MemoryBudget
    change: PlanChange | None
    """None if the budget fits, and if no known change makes it fit."""

    @property
    def sharding(self) -> str | None:
        """The sharding that the suggested change switches to; None if it stays as launched."""
        after = self.change.budget.launch if self.change else self.budget.launch
        return after.sharding if after != self.budget.launch else None

    def to_json_values(self) -> dict[str, Any]:
        """The memory plan as JSON-compatible values, the output of `plan --json`; sizes in GiB."""
        budget, change = self.budget, self.change
        # None if the run fits, or if no change was found.
        cheapest = None
        if change is not None:
            needs = change.budget.needed_bytes / GIB
            cheapest = {"overrides": list(change.overrides), "sharding": self.sharding, "needs": needs}
        return {
            "phases": _convert_to_gib(budget.phase_bytes),
            "fits": budget.fits,
            "gpu": budget.gpu_bytes / GIB if budget.gpu_bytes is not None else None,
            "cheapest_change": cheapest,
            "training": _convert_to_gib(vars(budget.training)),
            "checkpointing": budget.checkpointing_mode,
            "activations": {shape: _convert_to_gib(needs) for shape, needs in budget.activations.items()},
            "host": _convert_to_gib(budget.host_bytes),
            "disk": _convert_to_gib(budget.disk_bytes),
            "clips": budget.num_clips,
            "steps": budget.recipe.train.steps,
            "ranks": budget.launch.num_ranks,
            "sharding": budget.launch.sharding,
            "assumed": list(budget.assumptions),
        }


def plan_memory(path: str | Path, overrides: Sequence[str], launch: LaunchLayout, gpu_bytes: int | None) -> MemoryPlan:
    """Compute the memory budget of a recipe, and a change that makes it fit.

    Args:
        path: The recipe file.
        overrides: `key=value` settings on top of it.
        launch: Number of ranks and sharding.
        gpu_bytes: Bytes of the GPU; None for no limit. The budget is computed for a GPU in either case.

    Raises:
        DitLoraError: The recipe is wrong, the checkpoint's configs cannot be found, the launch is not possible, or a
            model's forward depends on values of tensors.
    """
    recipe = load_recipe(path, overrides)
    _require_valid_launch(recipe, launch)
    # A folder with the checkpoint's configs, downloaded if necessary; weights are not read.
    with config_only_recipe(recipe) as local:
        variants = _RecipeVariants(path, overrides, local.model.path, launch, gpu_bytes)
        try:
            budget = variants.compute_memory_budget()
            return MemoryPlan(budget, None if budget.fits else _find_fitting_change(variants, budget))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise DitLoraError(
                f"the memory of family {recipe.model.family} cannot be counted: a model reads values of tensors "
                f"({error.func}), and plan knows only their shapes; measure a run of a few steps instead"
            ) from error


def open_estimator(recipe: Recipe, *, is_gpu: bool) -> MemoryEstimator:
    """Open the checkpoint of a recipe whose `model.path` is local."""
    family, checkpoint = open_recipe_checkpoint(recipe)
    precision = choose_precision(recipe.model.dtype, torch.device("cpu"))
    # The plan is for a GPU even on a machine without one, so `auto` means bf16.
    dtype = torch.bfloat16 if is_gpu and recipe.model.dtype == "auto" else precision.dtype
    return MemoryEstimator(recipe, family, checkpoint, dtype, is_gpu)


def _require_valid_launch(recipe: Recipe, launch: LaunchLayout) -> None:
    """Raise `DitLoraError` for a combination of recipe and launch that training rejects."""
    # There is nothing to shard over.
    if launch.sharding != "ddp" and launch.num_ranks == 1:
        raise DitLoraError(f"--sharding {launch.sharding} needs --ranks 2 or more; got 1")
    if launch.sharding != "ddp":
        require_shardable(recipe, launch.sharding)
    if recipe.train.offload != "none" and recipe.model.quantize is not None:
        raise DitLoraError("train.offload and model.quantize do not work together; remove one of them")
    if launch.num_ranks % recipe.train.context_parallel:
        raise DitLoraError(
            f"train.context_parallel={recipe.train.context_parallel} must divide --ranks {launch.num_ranks}"
        )


@dataclass
class _RecipeVariants:
    """Variants of one recipe with some settings changed, and their budgets."""

    path: str | Path
    overrides: Sequence[str]
    config_folder: str
    """The folder of the checkpoint's configs."""
    launch: LaunchLayout
    gpu_bytes: int | None
    _estimators: dict[str, MemoryEstimator] = field(default_factory=dict)

    def compute_memory_budget(self, changes: Sequence[Settings] = ()) -> MemoryBudget:
        """Memory needs of the recipe with these settings changed. Raises `DitLoraError` if they are not allowed."""
        settings = _merge_settings(changes)
        recipe = load_recipe(self.path, [*self.overrides, *_format_overrides(settings)])
        # Sharding is not a key of the recipe: it belongs to the launch.
        launch = LaunchLayout(self.launch.num_ranks, "fsdp2") if _SHARDING_KEY in settings else self.launch
        _require_valid_launch(recipe, launch)
        # The recipe was read again, so its path is that of the original checkpoint.
        model = recipe.model.model_copy(update={"path": self.config_folder})
        recipe = recipe.model_copy(update={"model": model})
        return compute_budget(recipe, self.get_estimator(recipe), launch, self.gpu_bytes)

    def compute_budget_with_changes(self, changes: Sequence[Settings]) -> MemoryBudget | None:
        """Compute the memory budget with these settings changed; None if the settings are not allowed."""
        try:
            return self.compute_memory_budget(changes)
        except DitLoraError:
            return None

    def get_estimator(self, recipe: Recipe) -> MemoryEstimator:
        """The recipe's checkpoint on the meta device. Cached by the data settings, which shapes depend on."""
        key = repr((recipe.data, recipe.chat))
        if key not in self._estimators:
            self._estimators[key] = open_estimator(recipe, is_gpu=True)
        return self._estimators[key]


def _find_fitting_change(variants: _RecipeVariants, budget: MemoryBudget) -> PlanChange | None:
    """Find the first single change that makes the run fit, else several together. Data shapes are the last resort."""
    selected: list[Settings] = []
    # The smallest peak so far.
    min_bytes = budget.needed_bytes
    smaller = _iterate_smaller_shapes(budget.recipe, variants.get_estimator(budget.recipe))
    # First settings that keep the data's shape, then smaller shapes.
    for changes in (list(_iterate_setting_changes(budget)), list(smaller)):
        for change in changes:
            single_budget = variants.compute_budget_with_changes([change])
            if single_budget is not None and single_budget.fits:
                return _build_change([change], single_budget)
        # No single change is enough: add up those that reduce the peak, until it fits.
        for change in changes:
            together = variants.compute_budget_with_changes([*selected, change])
            # Not allowed, or without an effect on the peak.
            if together is None or together.needed_bytes >= min_bytes:
                continue
            selected.append(change)
            min_bytes = together.needed_bytes
            if together.fits:
                return _drop_unneeded_changes(variants, selected, together)
    return None


def _drop_unneeded_changes(
    variants: _RecipeVariants, selected: list[Settings], fitting_budget: MemoryBudget
) -> PlanChange:
    """Drop changes that others make superfluous, as full checkpointing does the selective one before it."""
    # The last ones first: they cost the most.
    for change in reversed(selected):
        fewer = [other_change for other_change in selected if other_change is not change]
        budget = variants.compute_budget_with_changes(fewer)
        if budget is not None and budget.fits:
            selected, fitting_budget = fewer, budget
    return _build_change(selected, fitting_budget)


def _build_change(changes: Sequence[Settings], budget: MemoryBudget) -> PlanChange:
    return PlanChange(tuple(_format_overrides(_merge_settings(changes))), budget)


def _merge_settings(changes: Sequence[Settings]) -> Settings:
    """Merge several changes of settings. If a key occurs twice, the last value wins."""
    return {name: value for change in changes for name, value in change.items()}


def _format_overrides(settings: Settings) -> list[str]:
    """Changed settings as `key=value` for the command line, except settings of sharding."""
    return [f"{name}={value}" for name, value in settings.items() if name != _SHARDING_KEY]


def _iterate_setting_changes(budget: MemoryBudget) -> Iterator[Settings]:
    """Settings of the recipe to try, the cheapest first. The order is fixed, because no time is predicted."""
    recipe, train, launch = budget.recipe, budget.recipe.train, budget.launch
    # Phases that do not fit. Tiling helps where the VAE runs; sampling can be turned off.
    too_much = {name for name, size in budget.phase_bytes.items() if size > (budget.gpu_bytes or size)}
    if too_much & {"clips", "validation"}:
        yield {"data.vae_tiling": "true"}
    if too_much == {"validation"}:
        yield {"validation.prompts": "[]"}
    if train.checkpointing != "auto":
        for mode in CHECKPOINTING_MODES[CHECKPOINTING_MODES.index(train.checkpointing) + 1 :]:
            yield {"train.checkpointing": mode}
    # The product of batch size and accumulation stays, and so does the effective batch.
    for size in range(train.batch_size - 1, 0, -1):
        if train.batch_size % size == 0:
            accumulate = train.accumulate * train.batch_size // size
            yield {"train.batch_size": size, "train.accumulate": accumulate}
    # An optimizer with less state.
    narrower = OPTIMIZERS[recipe.optim.name].smaller_variant
    if narrower is not None:
        yield {"optim.name": narrower}
    if recipe.model.quantize is None and train.mode == "lora":
        yield {"model.quantize": "fp8"}
        yield {"model.quantize": "nf4"}
    if train.offload == "none" and train.mode == "lora":
        yield {"train.checkpointing": "full", "train.offload": "group"}
    if launch.num_ranks > 1 and launch.sharding != "fsdp2":
        yield {_SHARDING_KEY: "fsdp2"}


def _iterate_smaller_shapes(recipe: Recipe, estimator: MemoryEstimator) -> Iterator[Settings]:
    """Settings with fewer frames, then with smaller frames, of sizes that the model accepts."""
    data, checkpoint = recipe.data, estimator.checkpoint
    if estimator.is_chat:
        for frames in {data.frames // 2, data.frames // 4} - {0}:
            yield {"data.frames": frames}
        return
    for scale in _SHAPE_SCALES:
        # The largest number of frames that the checkpoint accepts.
        for frames in range(int(data.frames * scale), 1, -1):
            if checkpoint.info.unsupported_reason(VideoShape(frames, data.height, data.width)) is None:
                yield {"data.frames": frames}
                break
    # Height and width must be multiples of it.
    step = checkpoint.info.size_multiple
    for scale in _SHAPE_SCALES:
        height, width = (max(step, round(side * scale / step) * step) for side in (data.height, data.width))
        if checkpoint.info.unsupported_reason(VideoShape(data.frames, height, width)) is None:
            yield {"data.height": height, "data.width": width}


def _convert_to_gib(sizes: Any) -> dict[str, float]:
    return {name: size / GIB for name, size in sizes.items()}
