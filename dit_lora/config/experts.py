"""Split a recipe that trains both experts of a checkpoint into one recipe per expert, and find their runs."""

from pathlib import Path

from dit_lora.config.recipe import Recipe

EXPERT_NAMES = {"transformer": "high_noise", "transformer_2": "low_noise"}
"""Names of a checkpoint's two experts by component. Their files and folders end with these names."""


def split_recipe_by_expert(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipes to train one after another: one per expert if `model.part` is both, else the recipe itself.

    Each is a complete run in a folder below run.dir with its share of `train.steps`; both use one cache. The second
    samples with the first one's adapter. Neither pushes to the Hub, because both are pushed together.
    """
    if recipe.model.part != "both":
        return (recipe,)
    # At least one step for each expert, whatever the share is.
    high = min(max(round(recipe.train.steps * recipe.train.effective_high_noise_share), 1), recipe.train.steps - 1)
    steps = {"transformer": high, "transformer_2": recipe.train.steps - high}
    return tuple(_make_expert_recipe(recipe, part, count) for part, count in steps.items())


def find_expert_runs(folder: Path) -> tuple[Path, ...]:
    """The run folders of both experts, high noise first, if the folder is a run of both; else the folder itself."""
    # Both folders must hold a recipe; otherwise the folder counts as a single run.
    runs = tuple(folder / name for name in EXPERT_NAMES.values())
    return runs if all((run / "config.yaml").is_file() for run in runs) else (folder,)


def _make_expert_recipe(recipe: Recipe, part: str, steps: int) -> Recipe:
    folder = Path(recipe.run.dir)
    changes = {
        "model": recipe.model.model_copy(update={"part": part}),
        # The default cache lies beside run.dir, which changes below: name the recipe's own.
        "data": recipe.data.model_copy(update={"cache": str(recipe.cache_dir)}),
        # The share applies only to a recipe for both experts; read again, this one would be refused with it.
        "train": recipe.train.model_copy(update={"steps": steps, "high_noise_share": None}),
        "run": recipe.run.model_copy(update={"dir": str(folder / EXPERT_NAMES[part])}),
        "hub": recipe.hub.model_copy(update={"push": False}),
    }
    if part == "transformer_2":
        # The high-noise expert is trained first, so its adapter exists when this run samples.
        other_adapter = str(folder / EXPERT_NAMES["transformer"] / "adapter")
        changes["validation"] = recipe.validation.model_copy(update={"other_expert": other_adapter})
    return recipe.model_copy(update=changes)
