"""Caches, next to the data cache, the eval loss of a base whose adapter has no effect yet."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dit_lora.environment.versions import probe_environment
from dit_lora.guard.checks import CheckFinding, read_cached_findings, store_findings
from dit_lora.numerics.ranks import gather_object, is_true_on_all_ranks
from dit_lora.training.check_cache import REMEASURE, REUSED, describe_device, get_preflight_cache_path
from dit_lora.training.task import AnySetup
from dit_lora.training.tasks.eval_loss import EvalSample
from dit_lora.version import __version__


def compute_base_eval_loss(
    setup: AnySetup,
    eval_samples: Sequence[EvalSample],
    data_digest: str,
    measure: Callable[[], tuple[float | None, bool]],
) -> float | None:
    """The eval loss of the base: cached for equal base, data and seeds, else from `measure`. Collective.

    Call it only while the adapter has no effect. `data_digest` is that of the set with `eval_samples`. `measure`
    returns the loss and whether every sample was good; only then is the loss cached. None without samples.
    """
    path, facts = get_preflight_cache_path(setup), _build_cache_key(setup, eval_samples, data_digest)
    cached_finding = None
    if setup.recipe.guard.preflight != REMEASURE:
        # The file holds one loss for each set of facts.
        cached_finding = next(iter(read_cached_findings(path, facts)), None)
    # The text of the finding is the loss itself, in full precision.
    losses = gather_object([float(cached_finding.message) if cached_finding is not None else None])
    # One rank without a cached loss makes all ranks measure it, because that is collective.
    cached_losses = [loss for loss in losses if loss is not None]
    if len(cached_losses) == len(losses):
        setup.session.phases.reductions["eval loss at step 0"] = REUSED
        return cached_losses[0]
    loss, sound = measure()
    # A loss without a damaged sample would differ from later ones, so it is measured again next time.
    if loss is not None and math.isfinite(loss) and is_true_on_all_ranks(sound):
        store_findings(path, facts, [CheckFinding("eval loss", True, repr(loss), fatal=False)])
    return loss


def _build_cache_key(setup: AnySetup, eval_samples: Sequence[EvalSample], data_digest: str) -> Mapping[str, Any]:
    # Everything that changes the loss's bits: a cached value must equal a measured one.
    recipe, environment = setup.recipe, probe_environment()
    return {
        "what": "eval loss",
        "version": __version__,
        "packages": dict(environment.versions),
        "cuda": environment.torch_cuda,
        "device": describe_device(setup.accelerator.device),
        "ranks": setup.accelerator.num_processes,
        "family": recipe.model.family,
        "transformer": setup.data.transformer_digest,
        "data": data_digest,
        "draws": [(eval_sample.entry.id, eval_sample.sample_seed, eval_sample.weight) for eval_sample in eval_samples],
        "seed": recipe.train.seed,
        "dtype": str(setup.dtype),
        "quantize": recipe.model.quantize,
        "identity": setup.task.trajectory_config(recipe),
        "under": setup.data.adapters.get("under"),
        "kernels": recipe.kernels.model_dump(mode="json"),
    }
