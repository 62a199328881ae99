"""One record per optimizer with everything the package knows about it. Recipes look it up by name.

`Guard.attach` also accepts optimizers without a record. Their state tensors are looked up under the names of all
records, which `collect_optimizer_names` collects.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

DEFAULT_OPTIMIZER = "adamw"


@dataclass(frozen=True)
class OptimizerRecord:
    """Facts about one optimizer, whose class takes groups and any of `betas`, `eps` and `weight_decay`.

    CONTRIBUTING.md lists the other places that name a new optimizer. tests/recipes/test_new_optimizer.py has a record
    for an example.
    """

    description: str
    """Description in a recipe's documentation."""
    class_path: str
    """Its class as `module:Class`. Imported only when the optimizer is built."""
    state_bytes: Callable[[Sequence["torch.Tensor"]], int]
    """Bytes of its state for these parameters after the first step, without the allocator's rounding.

    Only tensors count: a step count that the library keeps as a Python number takes none.
    """
    class_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Further arguments for its class, besides groups, betas, eps and weight decay."""
    decay_in_groups: bool = False
    """Pass the weight decay in each group instead of as a default."""
    package: str = "torch"
    """Top-level module of its class, and the package's key in `TESTED` (environment/versions.py)."""
    extra: str | None = None
    """The extra of `dit-lora` that installs the package."""
    is_native: bool = False
    """True for native code, which may not support the device: a step is tried before a run starts."""
    unpaged_variant: str | None = None
    """For an optimizer whose state is paged between GPU and host: name of the variant without paging."""
    smaller_variant: str | None = None
    """Name of an optimizer with less state that trains at the same learning rates, which `plan` proposes instead."""
    supported_sharding: tuple[Literal["fsdp2", "zero2"], ...] = ()
    """Launches that may shard its weights. Both need an elementwise update, which excludes 8-bit AdamW, where 256
    elements share a scale. ZeRO-2 also needs an optimizer that skips steps on the device."""
    found_inf_class: str | None = None
    """The class whose fused step reads `found_inf` on the device, itself or a base class, as `module:Class`."""
    nonnegative_state: tuple[str, ...] = ()
    """State tensors that cannot be negative: second moments, and the scales of 8-bit ones."""
    squared_state: tuple[str, ...] = ()
    """State tensors that grow with the square of gradients."""
    shared_state: tuple[str, ...] = ()
    """State tensors that all parameters share."""
    group_numbers: tuple[str, ...] = ()
    """Numbers that it keeps in parameter groups."""
    lr_factor: str | None = None
    """The one of `group_numbers` that multiplies the learning rate."""
    lr_bounds: tuple[float, float] | None = None
    """For optimizers that find one learning rate for all groups: bounds of `lr`, which multiplies it."""

    @property
    def class_name(self) -> str:
        """Name of the optimizer's class, without its module."""
        return self.class_path.partition(":")[2]


def collect_optimizer_names(get_names: Callable[[OptimizerRecord], tuple[str, ...]]) -> tuple[str, ...]:
    """Names that `get_names` returns for any of the known optimizers, without duplicates."""
    return tuple(dict.fromkeys(name for record in OPTIMIZERS.values() for name in get_names(record)))


def count_moment_bytes(parameters: Sequence["torch.Tensor"], *, num_moments: int, step_bytes: int) -> int:
    """Bytes of optimizer state with moments in each parameter's dtype.

    `step_bytes` is the size of a parameter's step count if it is a tensor, else 0.
    """
    return sum(num_moments * parameter.nbytes + step_bytes for parameter in parameters)


# bitsandbytes' defaults: tensors below this size keep fp32 moments, elements per scale, bytes of its two tables.
MIN_8BIT_SIZE = 4096
_BLOCK_SIZE = 256
_TABLE_BYTES = 2 * 256 * 4


def _count_8bit_moment_bytes(parameters: Sequence["torch.Tensor"]) -> int:
    """Bytes of 8-bit optimizer state: two moments of one byte per element, with fp32 scales.

    Small parameters have fp32 moments.
    """
    counts = [parameter.numel() for parameter in parameters]
    # Two fp32 moments of 4 bytes per element.
    small = sum(2 * 4 * count for count in counts if count < MIN_8BIT_SIZE)
    large = [count for count in counts if count >= MIN_8BIT_SIZE]
    # Two moments: a byte per element, and an fp32 scale per block.
    quantized = sum(2 * (count + 4 * math.ceil(count / _BLOCK_SIZE)) for count in large)
    # The two code tables exist once for all parameters.
    return small + quantized + (_TABLE_BYTES if large else 0)


def _count_prodigy_bytes(parameters: Sequence["torch.Tensor"]) -> int:
    """Bytes of Prodigy's optimizer state: three tensors per parameter and a copy of its initial value.

    The copy is one element if the initial value is zero. Call it before training. For meta tensors, whose values are
    unknown, the copy is counted in full.
    """
    total = 0
    for parameter in parameters:
        count = parameter.numel()
        # The initial value, from which Prodigy measures the distance. LoRA's B is zero, so its copy is one element.
        start = count if parameter.is_meta or parameter.any() else 1
        total += (3 * count + start) * parameter.element_size()
    return total


_ADAMW_8BIT = OptimizerRecord(
    description=(
        "bitsandbytes', whose moments take one byte a weight; tensors below 4096 elements keep theirs in fp32."
    ),
    class_path="bitsandbytes.optim:AdamW8bit",
    state_bytes=_count_8bit_moment_bytes,
    package="bitsandbytes",
    extra="bitsandbytes",
    is_native=True,
    nonnegative_state=("state2", "absmax1", "absmax2"),
    squared_state=("state2", "absmax2"),
    shared_state=("qmap1", "qmap2"),
)

OPTIMIZERS: dict[str, OptimizerRecord] = {
    DEFAULT_OPTIMIZER: OptimizerRecord(
        description="PyTorch's, fused.",
        class_path="torch.optim:AdamW",
        state_bytes=partial(count_moment_bytes, num_moments=2, step_bytes=4),
        class_kwargs={"fused": True},
        smaller_variant="adamw_8bit",
        supported_sharding=("fsdp2", "zero2"),
        found_inf_class="torch.optim.adam:Adam",
        nonnegative_state=("exp_avg_sq",),
        squared_state=("exp_avg_sq",),
    ),
    "adamw_8bit": _ADAMW_8BIT,
    "paged_adamw_8bit": replace(
        _ADAMW_8BIT,
        description="the same in memory that moves to the host where the GPU's does not suffice; CUDA only.",
        class_path="bitsandbytes.optim:PagedAdamW8bit",
        unpaged_variant="adamw_8bit",
    ),
    "prodigy": OptimizerRecord(
        description=(
            "finds the learning rate (arXiv 2306.06101): every group's lr multiplies it, 1 as a rule, and all groups "
            "have the same; its state is up to four times the weights."
        ),
        class_path="prodigyopt:Prodigy",
        state_bytes=_count_prodigy_bytes,
        # As its authors recommend for diffusion models: warm-up then does not distort the estimate.
        class_kwargs={"use_bias_correction": True, "safeguard_warmup": True},
        decay_in_groups=True,  # a weight decay among the defaults makes it print a message
        package="prodigyopt",
        extra="prodigy",
        nonnegative_state=("exp_avg_sq",),
        squared_state=("exp_avg_sq",),
        # Without d_denom and d_hat, which are written but never read.
        group_numbers=("d", "d_max", "d_numerator", "k"),
        lr_factor="d",
        lr_bounds=(0.1, 10.0),
    ),
}
