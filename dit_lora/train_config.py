"""The sections `optim` and `train` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dit_lora.section import Count, Decay, NonNegative, Positive, Section

Schedule = Literal["constant", "linear", "cosine"]


class GroupConfig(Section):
    lr: Positive
    weight_decay: NonNegative | None = None
    """By default `optim.weight_decay`."""
    clip: Positive | None = None
    """Clip this group's gradient norm on its own; by default it shares `optim.clip`."""
    schedule: Schedule | None = None
    """By default `optim.schedule`."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """By default `optim.warmup_steps`."""
    modules: tuple[str, ...] | None = None
    """Patterns of parameter names (`patch_embed.*`); only for connector and backbone, by default the family's."""


class GroupsConfig(Section):
    adapter: GroupConfig | None = GroupConfig(lr=1e-4)
    """LoRA matrices: both, or only A where `adapter_b` is given. Of chat models, null for no adapter: only the
    base groups train."""
    adapter_b: GroupConfig | None = None
    """LoRA's B matrices on their own, as LoRA+ does (arXiv 2402.12354): about 16 times adapter.lr."""
    connector: GroupConfig | None = None
    """Base weights between the conditions, the latents and the blocks, trained in full."""
    backbone: GroupConfig | None = None
    """Base weights of the blocks, trained in full."""

    @field_validator("adapter", "adapter_b")
    @classmethod
    def _no_patterns(cls, group: GroupConfig | None) -> GroupConfig | None:
        if group is not None and group.modules is not None:
            raise ValueError("modules does not apply here: lora.targets chooses where adapters go")
        return group

    def given(self) -> dict[str, GroupConfig]:
        """The groups that the recipe names, in a fixed order."""
        return {name: group for name in type(self).model_fields if (group := getattr(self, name))}


class OptimConfig(Section):
    groups: GroupsConfig = GroupsConfig()
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 1e-4
    clip: Positive | None = 1.0
    """Norm that the gradients of all groups without a clip of their own are scaled to; null for none."""
    schedule: Schedule = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_lr_rate: Decay = 0.0
    """Share of the learning rate that `linear` and `cosine` fall to."""


class TrainConfig(Section):
    mode: Literal["lora", "full"] = "lora"
    """`lora`: an adapter, and what `optim.groups` names of the base. `full`: every weight of the transformer,
    in fp32, with no adapter; the result is a whole pipeline."""
    steps: Count
    """Optimizer steps."""
    batch_size: Count = 1
    """Clips per process and micro-step."""
    accumulate: Count = 1
    """Micro-steps per optimizer step."""
    seed: Annotated[int, Field(ge=0)] = 42
    save_every: Count = 500
    """Steps between checkpoints; the last step and an interrupt save too."""
    keep: Count = 2
    """Checkpoints kept."""
    resume: str = "none"
    """`none`; `auto` for the newest whole checkpoint of run.dir; or a checkpoint's path."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a moving average of what is trained (Diffusers' EMAModel), which is then what is validated
    and saved; null for none."""
    checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """What of each block the backward pass computes again, to save memory: `none`; `selective`, all but
    attention; `full`, all. `auto`: the least that fits the device's free memory. No value depends on it."""
    vlb: bool | None = None
    """Models with a learned variance (DiT, Latte): train the variance too, by the variational bound; null for
    yes where the checkpoint has one."""
