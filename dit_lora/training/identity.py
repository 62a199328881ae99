"""Names what makes a run this run and no other."""

from typing import Any

from dit_lora.config.optimizers import DEFAULT
from dit_lora.training.checkpoints.compatibility import SAMPLES
from dit_lora.training.task import AnySetup


def run_identity(setup: AnySetup) -> dict[str, Any]:
    """Return the values that a resumed run must share with its checkpoint, flat, named as in the recipe."""
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
        SAMPLES: session.samples_per_step,
        **setup.task.identity(recipe),
    }
    flat |= {f"lora.{key}": value for key, value in values["lora"].items()}
    # Compiled blocks round otherwise; left out where off, as in checkpoints from before the option.
    if recipe.train.compile:
        flat["train.compile"] = True
    optim = dict(values["optim"])
    groups = optim.pop("groups")
    if optim["name"] == DEFAULT:
        del optim["name"]  # as in checkpoints from before there was a choice
    flat |= {f"optim.{key}": value for key, value in optim.items()}
    flat |= {f"optim.groups.{name}": group for name, group in groups.items() if group}
    groups_given = recipe.optim.groups.given().values()
    if any((group.schedule or recipe.optim.schedule) != "constant" for group in groups_given):
        flat["train.steps"] = recipe.train.steps  # where the schedule ends
    return flat
