"""Caches, next to the data cache, which kernels were compared with the unpatched model and found right."""

from collections.abc import Sequence

from dit_lora.guard.checks import CheckFinding, has_cached_findings, store_findings
from dit_lora.guard.comparison.block_parity import MIN_PASSES
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.ranks import is_true_on_all_ranks
from dit_lora.training.check_cache import REMEASURE, build_model_facts, get_preflight_cache_path
from dit_lora.training.recovery.kernel_parity import PeriodicKernelComparison
from dit_lora.training.recovery.run_recovery import RunRecovery
from dit_lora.training.task import AnySetup


class KernelComparisonCache:
    """The cached result of an earlier run's comparison of the same kernels, on the same model and batches.

    It counts only if every rank has it.
    """

    def __init__(
        self,
        setup: AnySetup,
        recovery: RunRecovery,
        parity_watch: PeriodicKernelComparison,
        batches: Sequence[MicroBatch],
        num_passes: int,
    ) -> None:
        self.file = get_preflight_cache_path(setup)
        key = {
            "what": "kernels",
            **build_model_facts(setup),
            # Kernels are compared on tensors of these shapes, whatever their values.
            "shapes": [{n: list(x.shape) for n, x in micro_batch.tensors.items()} for micro_batch in batches],
            "switches": sorted(switch.name for switch in parity_watch.fallbacks),
            "places": sorted(parity_watch.replaced_ops),
        }
        self._cache_key = {**key, "passes": num_passes}
        # If weights have trained since the last comparison, their values were never compared.
        weights_compared = parity_watch.start_step in (0, recovery.state.passed)
        is_known = weights_compared and setup.recipe.guard.preflight != REMEASURE
        # Without switches there is nothing to compare, and nothing to look up.
        is_remembered = bool(parity_watch.fallbacks) and is_known
        # A full comparison also stands for the shorter one of a short run.
        is_remembered &= has_cached_findings(self.file, self._cache_key) or has_cached_findings(
            self.file, {**key, "passes": MIN_PASSES}
        )
        # One rank without a cached result makes all ranks compare, because comparing is collective.
        self.has_passed_before: bool = is_true_on_all_ranks(is_remembered)
        """True if every rank has made the same comparison before, and found no difference."""

    def store_comparison_result(self, *, is_sound: bool) -> None:
        """Cache a kernel comparison if no rank found a difference, and nothing was left uncompared."""
        if is_true_on_all_ranks(is_sound):
            message = "no kernel differs from the stock model"
            store_findings(self.file, self._cache_key, [CheckFinding("kernels", True, message, fatal=False)])
