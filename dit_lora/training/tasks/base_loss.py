"""Remembers, beside the cache, the held-out loss of a base whose adapter does nothing yet."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate.utils import gather_object

from dit_lora.environment.versions import probe_environment
from dit_lora.guard.checks import CheckFinding, cached_findings, remember
from dit_lora.training.guarding.parity_memory import ANEW, device_facts, memory_file
from dit_lora.training.task import AnySetup
from dit_lora.training.tasks.held_out import HeldOut
from dit_lora.version import __version__


def base_loss(
    setup: AnySetup,
    draws: Sequence[HeldOut],
    measure: Callable[[], tuple[float | None, bool]],
) -> float | None:
    """Return what was measured before for the same base, data and draws; else `measure()`, whose second value is
    true if every sample was good, and remember it. Collective.

    Only for a model that does nothing yet beside its base.
    """
    path, facts = memory_file(setup), _facts(setup, draws)
    known = None
    if setup.recipe.guard.preflight != ANEW:
        known = next(iter(cached_findings(path, facts)), None)
    losses = gather_object([float(known.words) if known is not None else None])
    if all(loss is not None for loss in losses):
        setup.session.say(
            "held-out loss: of this base, data and draws it was measured before; "
            "guard.preflight=anew measures it again"
        )
        return float(losses[0])
    loss, sound = measure()
    if loss is not None and math.isfinite(loss) and all(gather_object([sound])):
        remember(path, facts, [CheckFinding("held-out loss", True, repr(loss), fatal=False)])
    return loss


def _facts(setup: AnySetup, draws: Sequence[HeldOut]) -> Mapping[str, Any]:
    recipe, environment = setup.recipe, probe_environment()
    return {
        "what": "held-out loss",
        "version": __version__,
        "packages": dict(environment.versions),
        "cuda": environment.torch_cuda,
        "device": device_facts(setup.session.accelerator.device),
        "ranks": setup.session.accelerator.num_processes,
        "family": recipe.model.family,
        "transformer": setup.data.transformer_digest,
        "data": setup.data.data_digest,
        "draws": [(one.entry.id, one.draw, one.weight) for one in draws],
        "seed": recipe.train.seed,
        "dtype": str(setup.dtype),
        "quantize": recipe.model.quantize,
        "identity": setup.task.identity(recipe),
        "under": setup.data.adapters.get("under"),
        "kernels": recipe.kernels.model_dump(mode="json"),
    }
