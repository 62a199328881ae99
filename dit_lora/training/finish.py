"""Ends a run: writes the adapter or the whole pipeline, checks what was written, and measures it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

import dit_lora
from dit_lora.compat import probe_environment
from dit_lora.config import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.redact import redacted
from dit_lora.remedies import HUB
from dit_lora.training.fit import averaged, validate
from dit_lora.training.run import Run
from dit_lora.training.runtime import agree
from dit_lora.training.task import Setup
from dit_lora.training.verify import Verification, noted_output, verify_result


@dataclass(frozen=True)
class Written:
    """What a run has written; known on the main process alone."""

    path: Path | None = None
    """The adapter's file, or the pipeline's folder."""
    verification: Verification | None = None


def finish(run: Run) -> Written:
    """Save the adapter or whole pipeline, checked, verify the file, then validate. Collective."""
    setup, steps = run.setup, run.setup.recipe.train.steps
    error, written = None, Written()
    with averaged(run):
        weights = setup.engine.weights()  # collective where they are sharded
        output = noted_output(setup, run.base)
        try:
            if setup.runtime.is_main:
                made = {**provenance(setup), "output": output}
                path = setup.task.save(setup, made, weights)
                written = Written(path, verify_result(setup, path, made, weights))
        except (OSError, SafetensorError) as problem:
            error = DitLoraError(
                f"cannot write the result to {setup.runtime.dir}: {problem}; the checkpoint "
                f"of step {steps} is whole: free space and run again with train.resume=auto"
            )
        except DitLoraError as problem:
            error = problem
    agree(setup.runtime.accelerator, error)
    # After the adapter is safe: sampling takes the most memory and time of all.
    validate(run, step=steps)
    run.checkpoints.settle()
    return written


def provenance(setup: Setup[Any, Any]) -> dict[str, Any]:
    """What the adapter's header says of its making; a local checkpoint is named without its folders."""
    recipe, path = setup.recipe, Path(setup.recipe.model.path).expanduser()
    made = {
        "version": dit_lora.__version__,
        "family": recipe.model.family,
        "base_model": path.resolve().name if path.is_dir() else recipe.model.path.removeprefix(HUB),
        "revision": recipe.model.revision,
        "transformer_digest": setup.data.transformer_digest,
        **_lora_facts(recipe),
        **{key: getattr(recipe.train, key) for key in ("steps", "ema", "seed")},
        "dtype": str(setup.dtype),
        "quantize": recipe.model.quantize,
        **setup.task.provenance(setup),
        "packages": dict(probe_environment().versions),
    }
    return dict(redacted(made))


def _lora_facts(recipe: Recipe) -> dict[str, Any]:
    if recipe.train.mode == "full":
        return {"mode": "full"}
    lora = recipe.lora
    return {"rank": lora.rank, "alpha": lora.alpha or lora.rank, "dropout": lora.dropout}
