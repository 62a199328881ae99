"""Optimizers, one record each: whatever the package knows of one is here, and is looked up by its name in a recipe.

Of an optimizer without a record (`Guard.attach` takes any of torch's) names of state tensors say the same as of those
with one: `of_all` gives the names of all records.
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
    """Facts about one optimizer. Add its package to pyproject.toml and `environment.versions.TESTED` too."""

    about: str
    """The sentence about it in a recipe's documentation."""
    target: str
    """Its class, `module:Class`, which is imported when it is built."""
    state_bytes: Callable[[Sequence["torch.Tensor"]], int]
    """Bytes of the tensors that it keeps of these parameters once it has stepped, without what allocators round up."""
    arguments: Mapping[str, bool] = field(default_factory=dict)
    """Arguments that its class takes beside groups, betas, eps and weight decay."""
    decay_in_groups: bool = False
    """Give the weight decay in each group rather than among the defaults."""
    package: str = "torch"
    """The distribution and module that it comes with."""
    extra: str | None = None
    """The extra of `dit-lora` that installs the package."""
    native: bool = False
    """Its package brings native code, which may lack the device: a step is tried before a run begins."""
    unpaged: str | None = None
    """Its state moves between a CUDA GPU and the host; the name of the same optimizer whose state stays."""
    narrower: str | None = None
    """The name of an optimizer with less state, which `plan` proposes instead."""
    sharding: tuple[Literal["fsdp2", "zero2"], ...] = ()
    """Launches that may share its weights out. It must be elementwise, and for ZeRO skip steps on the device."""
    skips_on_device: str | None = None
    """The class, `module:Class`, that it is or derives from, whose fused step reads `found_inf` on the device."""
    never_negative: tuple[str, ...] = ()
    """State tensors that cannot be negative: second moments, and the scales of 8-bit ones."""
    squares: tuple[str, ...] = ()
    """State tensors that grow with the square of gradients."""
    shared_state: tuple[str, ...] = ()
    """State tensors that all parameters have in common."""
    group_numbers: tuple[str, ...] = ()
    """Numbers that it keeps in its parameter groups."""
    rate_factor: str | None = None
    """The one of them that the learning rate is multiplied by."""
    multipliers: tuple[float, float] | None = None
    """It finds one learning rate for all groups: the bounds of `lr`, which multiplies that rate."""

    @property
    def title(self) -> str:
        """Return the name of its class."""
        return self.target.partition(":")[2]


def of_all(names: Callable[[OptimizerRecord], tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names that any record gives, each once."""
    return tuple(dict.fromkeys(name for one in OPTIMIZERS.values() for name in names(one)))


def _fp32_moments(parameters: Sequence["torch.Tensor"]) -> int:
    """Return the bytes of two moments in each parameter's dtype, and of its step in fp32."""
    return sum(2 * one.numel() * one.element_size() + 4 for one in parameters)


# bitsandbytes' defaults: elements below which moments stay fp32, elements that have a scale, bytes of its two tables.
SMALLEST_8BIT = 4096
_BLOCK = 256
_TABLES = 2 * 256 * 4


def _8bit_moments(parameters: Sequence["torch.Tensor"]) -> int:
    """Return the bytes of two moments of a byte an element with fp32 scales, of small parameters in fp32."""
    counts = [parameter.numel() for parameter in parameters]
    small = sum(2 * 4 * count for count in counts if count < SMALLEST_8BIT)
    large = [count for count in counts if count >= SMALLEST_8BIT]
    held = sum(2 * (count + 4 * math.ceil(count / _BLOCK)) for count in large)
    return small + held + (_TABLES if large else 0)


def _prodigy_state(parameters: Sequence["torch.Tensor"]) -> int:
    """Return the bytes of three tensors per parameter and of a copy of its start; a start of zeros is one element.

    Call it before training. Of meta tensors, which have no values, it counts the copy.
    """
    held = 0
    for parameter in parameters:
        count = parameter.numel()
        start = count if parameter.is_meta or parameter.any() else 1
        held += (3 * count + start) * parameter.element_size()
    return held


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
        # As its authors advise for diffusion models: an estimate that warm-up does not mislead.
        arguments={"use_bias_correction": True, "safeguard_warmup": True},
        decay_in_groups=True,  # of one among its defaults it prints a line
        package="prodigyopt",
        extra="prodigy",
        narrower="adamw_8bit",
        never_negative=("exp_avg_sq",),
        squares=("exp_avg_sq",),
        group_numbers=(
            "d",
            "d_max",
            "d_numerator",
            "k",
        ),  # d_denom and d_hat it writes and never reads
        rate_factor="d",
        multipliers=(0.1, 10.0),
    ),
}
