"""One record per optimizer with everything the package knows about it. Recipes look it up by name.

An optimizer without a record (`Guard.attach` accepts any of torch's) is assumed to name its state tensors as those
with one do: `of_all` collects the names of all records.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

DEFAULT = "adamw"


@dataclass(frozen=True)
class OptimizerRecord:
    """Facts about one optimizer. Its package must also be in pyproject.toml and in `environment.versions.TESTED`."""

    about: str
    """Description in a recipe's documentation."""
    target: str
    """Its class as `module:Class`. Imported only when the optimizer is built."""
    state_bytes: Callable[[Sequence["torch.Tensor"]], int]
    """Bytes of its state for these parameters after the first step, without the allocator's rounding."""
    arguments: Mapping[str, bool] = field(default_factory=dict)
    """Further arguments for its class, besides groups, betas, eps and weight decay."""
    decay_in_groups: bool = False
    """Pass the weight decay in each group instead of as a default."""
    package: str = "torch"
    """Name of the distribution, and of its module."""
    extra: str | None = None
    """The extra of `dit-lora` that installs the package."""
    native: bool = False
    """True for native code, which may not support the device: a step is tried before a run starts."""
    unpaged: str | None = None
    """For an optimizer whose state is paged between GPU and host: name of the variant without paging."""
    narrower: str | None = None
    """Name of an optimizer with less state, which `plan` proposes instead."""
    sharding: tuple[Literal["fsdp2", "zero2"], ...] = ()
    """Launches that may shard its weights. It must be elementwise, and for ZeRO it must skip steps on the device."""
    skips_on_device: str | None = None
    """Its class or base class as `module:Class`, if its fused step reads `found_inf` on the device."""
    never_negative: tuple[str, ...] = ()
    """State tensors that cannot be negative: second moments, and the scales of 8-bit ones."""
    squares: tuple[str, ...] = ()
    """State tensors that grow with the square of gradients."""
    shared_state: tuple[str, ...] = ()
    """State tensors that all parameters share."""
    group_numbers: tuple[str, ...] = ()
    """Numbers that it keeps in parameter groups."""
    rate_factor: str | None = None
    """The one of `group_numbers` that multiplies the learning rate."""
    multipliers: tuple[float, float] | None = None
    """For optimizers that find one learning rate for all groups: bounds of `lr`, which multiplies it."""

    @property
    def title(self) -> str:
        """The name of its class."""
        return self.target.partition(":")[2]


def of_all(names: Callable[[OptimizerRecord], tuple[str, ...]]) -> tuple[str, ...]:
    """The names that `names` gives for any record, without duplicates."""
    return tuple(dict.fromkeys(name for record in OPTIMIZERS.values() for name in names(record)))


def _fp32_moments(parameters: Sequence["torch.Tensor"]) -> int:
    """Bytes of two moments in each parameter's dtype, and of its step count in fp32."""
    # Two moments, and 4 bytes for the step count.
    return sum(2 * parameter.numel() * parameter.element_size() + 4 for parameter in parameters)


# bitsandbytes' defaults: tensors below this size keep fp32 moments, elements per scale, bytes of its two tables.
SMALLEST_8BIT = 4096
_BLOCK = 256
_TABLES = 2 * 256 * 4


def _8bit_moments(parameters: Sequence["torch.Tensor"]) -> int:
    """Bytes of two moments with one byte per element and fp32 scales; small parameters have fp32 moments."""
    counts = [parameter.numel() for parameter in parameters]
    # Two fp32 moments of 4 bytes per element.
    small = sum(2 * 4 * count for count in counts if count < SMALLEST_8BIT)
    large = [count for count in counts if count >= SMALLEST_8BIT]
    # Two moments: a byte per element, and an fp32 scale per block.
    quantized = sum(2 * (count + 4 * math.ceil(count / _BLOCK)) for count in large)
    # The two code tables exist once for all parameters.
    return small + quantized + (_TABLES if large else 0)


def _prodigy_state(parameters: Sequence["torch.Tensor"]) -> int:
    """Bytes of three tensors per parameter and a copy of its initial value; if that is zero, the copy is one element.

    Call it before training. For meta tensors, whose values are unknown, the copy is counted in full.
    """
    total = 0
    for parameter in parameters:
        count = parameter.numel()
        # The initial value, from which Prodigy measures the distance. LoRA's B is zero, so its copy is one element.
        start = count if parameter.is_meta or parameter.any() else 1
        total += (3 * count + start) * parameter.element_size()
    return total


_ADAMW_8BIT = OptimizerRecord(
    about="bitsandbytes', whose moments take one byte a weight; tensors below 4096 elements keep theirs in fp32.",
    target="bitsandbytes.optim:AdamW8bit",
    state_bytes=_8bit_moments,
    package="bitsandbytes",
    extra="bitsandbytes",
    native=True,
    never_negative=("state2", "absmax1", "absmax2"),
    squares=("state2", "absmax2"),
    shared_state=("qmap1", "qmap2"),
)

OPTIMIZERS: dict[str, OptimizerRecord] = {
    DEFAULT: OptimizerRecord(
        about="PyTorch's, fused.",
        target="torch.optim:AdamW",
        state_bytes=_fp32_moments,
        arguments={"fused": True},
        narrower="adamw_8bit",
        sharding=("fsdp2", "zero2"),
        skips_on_device="torch.optim.adam:Adam",
        never_negative=("exp_avg_sq",),
        squares=("exp_avg_sq",),
    ),
    "adamw_8bit": _ADAMW_8BIT,
    "paged_adamw_8bit": replace(
        _ADAMW_8BIT,
        about="the same in memory that moves to the host where the GPU's does not suffice; CUDA only.",
        target="bitsandbytes.optim:PagedAdamW8bit",
        unpaged="adamw_8bit",
    ),
    "prodigy": OptimizerRecord(
        about=(
            "finds the learning rate (arXiv 2306.06101): every group's lr multiplies it, 1 as a rule, and all groups "
            "have the same; its state is up to four times the weights."
        ),
        target="prodigyopt:Prodigy",
        state_bytes=_prodigy_state,
        # As its authors recommend for diffusion models: warm-up then does not distort the estimate.
        arguments={"use_bias_correction": True, "safeguard_warmup": True},
        decay_in_groups=True,  # a weight decay among the defaults makes it print a message
        package="prodigyopt",
        extra="prodigy",
        narrower="adamw_8bit",
        never_negative=("exp_avg_sq",),
        squares=("exp_avg_sq",),
        # Without d_denom and d_hat, which are written but never read.
        group_numbers=(
            "d",
            "d_max",
            "d_numerator",
            "k",
        ),
        rate_factor="d",
        multipliers=(0.1, 10.0),
    ),
}
