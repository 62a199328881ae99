"""Tells from the files of a run whether it is finished. Needs no torch, so that Ctrl-C is answered at once."""

from pathlib import Path

from dit_lora.config.experts import split_recipe_by_expert
from dit_lora.config.recipe import Recipe
from dit_lora.config.records import Status, VerifiedFiles, read_typed_json
from dit_lora.files import read_json_lines
from dit_lora.parsing import ParseError
from dit_lora.training.early_stopping import find_best_step_if_stalled
from dit_lora.training.eval_losses import read_eval_losses


def find_finished_step(recipe: Recipe) -> int | None:
    """The last step of a run that has written its result; None if the recipe leaves it anything to do.

    It is `train.steps`, or the step after which `train.stop_after` has ended the run.
    """
    folder, train = Path(recipe.run.dir), recipe.train
    verification = folder / "verification.json"
    try:
        has_ended = read_typed_json(folder / "status.json", Status).get("state") == "finished"
        is_sound = True
        if verification.is_file():
            record = read_typed_json(verification, VerifiedFiles)
            # A result that failed its verification, or that was deleted, is written again.
            is_sound = record.get("passed", True) and all(
                (folder / name).is_file() for name in record.get("files", ())
            )
    except (OSError, ParseError):  # missing or damaged: a resumed run writes them again
        return None
    if not (has_ended and is_sound):
        return None
    metrics = read_json_lines(folder / "metrics.jsonl").objects
    step = metrics[-1].get("step") if metrics else None
    if step == train.steps:
        return train.steps
    if train.stop_after is None:
        return None
    losses = read_eval_losses(folder, recipe.validation.ranking_loss)
    # The validation after the last step ended the run, and still would.
    has_stopped = step == max(losses, default=None) and find_best_step_if_stalled(losses, train.stop_after) is not None
    return step if has_stopped else None


def is_finished(recipe: Recipe) -> bool:
    """True if nothing is left to train of a recipe, for both experts if it trains both."""
    return all(find_finished_step(turn) is not None for turn in split_recipe_by_expert(recipe))
