"""The sections `optim` and `train` of a recipe."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticKnownError

from dit_lora.config.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from dit_lora.config.section import Count, Decay, NonNegative, Positive, Section
from dit_lora.config.timesteps import TimestepsConfig

Schedule = Literal["constant", "linear", "cosine"]

_MIN_NORMAL_FP32 = 2.0**-126
"""The smallest normal fp32 number; smaller ones lose precision."""


def _check_optimizer_name(name: object) -> object:
    if isinstance(name, str) and name in OPTIMIZERS:
        return name
    # The same error as for a Literal with the names of all optimizers.
    *names, last_name = map(repr, OPTIMIZERS)
    raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names)} or {last_name}"})


OptimizerName = Annotated[
    str,
    BeforeValidator(_check_optimizer_name),
    Field(
        description="\n".join(f"`{name}`: {record.description}" for name, record in OPTIMIZERS.items()),
        json_schema_extra={"enum": list(OPTIMIZERS)},
    ),
]


class GroupConfig(Section):
    lr: Positive
    weight_decay: NonNegative | None = None
    """Weight decay; by default `optim.weight_decay`."""
    clip: Positive | None = None
    """Clip this group's gradient norm on its own; by default it shares `optim.clip`."""
    schedule: Schedule | None = None
    """Shape of the learning rate; by default `optim.schedule`."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of warm-up; by default `optim.warmup_steps`."""
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
    def _reject_patterns(cls, group: GroupConfig | None) -> GroupConfig | None:
        if group is not None and group.modules is not None:
            raise ValueError("modules does not apply here, because lora.targets chooses the adapted layers; remove it")
        return group

    def get_configured_groups(self) -> dict[str, GroupConfig]:
        """The groups that the recipe configures, in a fixed order."""
        return {name: group for name in type(self).model_fields if (group := getattr(self, name))}


class OptimConfig(Section):
    name: OptimizerName = DEFAULT_OPTIMIZER
    groups: GroupsConfig = GroupsConfig()
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Beta1 and beta2 as the optimizer defines them: for AdamW the decay rates of its two moments. Prodigy estimates
    the learning rate over a horizon of sqrt(beta2)."""
    eps: Positive = 1e-8
    weight_decay: NonNegative = 1e-4
    clip: Positive | None = 1.0
    """Norm that the gradients of all groups without a clip of their own are scaled to; null for none."""
    schedule: Schedule = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_lr_rate: Decay = 0.0
    """Share of the learning rate that `linear` and `cosine` fall to."""

    @field_validator("eps")
    @classmethod
    def _check_eps(cls, eps: float) -> float:
        # The field's type refuses 0; this refuses numbers that are subnormal in fp32.
        if eps < _MIN_NORMAL_FP32:
            raise ValueError(
                f"is too small: in fp32 {eps:g} rounds to 0 or loses digits, and 0 / 0 is NaN; give at least "
                f"{_MIN_NORMAL_FP32:.3g}, usually 1e-8"
            )
        return eps

    def find_learning_rate_problems(self, groups: Mapping[str, GroupConfig]) -> list[str]:
        """Messages why the optimizer cannot train these groups. Prodigy finds one learning rate for all groups."""
        record = OPTIMIZERS[self.name]
        if record.lr_bounds is None:
            return []
        # For such an optimizer `lr` is a factor, so a usual rate such as 1e-4 would stop the training.
        low, high = record.lr_bounds
        problems = [
            f"optim.groups.{name}.lr={group.lr:g}: under optim.name={self.name} it multiplies the learning rate "
            f"that {record.class_name} finds, and must be {low:g} to {high:g}; give 1"
            for name, group in groups.items()
            if not low <= group.lr <= high
        ]
        # Everything that determines the learning rate over time, as text, to compare groups and to report them.
        rates = {
            name: (
                f"lr {group.lr:g}, {group.schedule or self.schedule}, warmup_steps "
                f"{self.warmup_steps if group.warmup_steps is None else group.warmup_steps}"
            )
            for name, group in groups.items()
        }
        if not problems and len(set(rates.values())) > 1:
            summary = "; ".join(f"{name}: {rate}" for name, rate in rates.items())
            problems.append(
                f"optim.name={self.name} has one learning rate: give all groups the same lr, schedule and "
                f"warmup_steps, or take {DEFAULT_OPTIMIZER}; got {summary}"
            )
        return problems


class PreserveConfig(Section):
    """Options of differential output preservation.

    For captions without the trigger, the model learns to predict what it did before training.
    """

    trigger: str
    """The words in captions that stand for what is learned, such as `sks dog`."""
    class_words: tuple[str, ...]
    """The words that take their place, such as `dog`: for such captions the model learns to predict what it did before
    training. If there are several, each sample gets a random one each time."""
    weight: Positive = 1.0
    """Factor of that loss, beside the usual one."""

    @field_validator("class_words", mode="before")
    @classmethod
    def _wrap_single_word(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_words(self) -> "PreserveConfig":
        if not self.class_words or not all(word.strip() for word in (self.trigger, *self.class_words)):
            raise ValueError("trigger and class_words must not be empty")
        # Replacing the trigger would put it back into the caption.
        words_with_trigger = [word for word in self.class_words if self.trigger in word]
        if words_with_trigger:
            raise ValueError(
                f"class_words: {', '.join(map(repr, words_with_trigger))} contains the trigger {self.trigger!r}; "
                "give words without it"
            )
        return self

    def replace_trigger(self, caption: str) -> list[str]:
        """Copies of a caption, one per class word, with the trigger replaced by that word."""
        return [caption.replace(self.trigger, word) for word in self.class_words]


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
    """Checkpoints kept: the newest. Of older ones only the adapter stays."""
    keep_adapters: Annotated[int, Field(ge=0)] | None = None
    """Adapters kept of older checkpoints: the newest; null for all."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Checkpoints kept besides: those with the lowest eval loss at their step (validation loss, if there is
    `validation.data`), named in checkpoints/best.json. Needs validation.every."""
    stop_after: Count | None = None
    """Validations in a row without a new lowest loss after which the run ends, saved and with its adapter written. The
    loss is that of `keep_best`. Needs validation.every; null trains all `steps`."""
    resume: str = "none"
    """`none`; `auto` for the newest whole checkpoint of run.dir; or a checkpoint's path."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a moving average of what is trained (Diffusers' EMAModel, at first (1 + step) / (10 + step)), which
    is then what is validated and saved; null for none."""
    checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Part of each block that the backward pass computes again, to save memory: `none`; `selective`, all but
    attention; `full`, all. `auto`: the least that fits the device's free memory. No value depends on it."""
    context_parallel: Count = 1
    """Processes that share each sample's tokens, for videos too long for one GPU (CogVideoX). batch_size then counts
    per group of processes. Divides the number of processes, attention heads, text and video tokens."""
    offload: Literal["none", "group"] = "none"
    """`group`: frozen weights of the blocks live in host memory, and each block's come to the device when it is
    computed; by full checkpointing, in the backward pass again. No value depends on it."""
    compile: bool = False
    """torch.compile of the transformer's blocks, for each shape once; kept in the cache's folder. Values change in
    the last bits."""
    deterministic: bool = False
    """PyTorch's deterministic algorithms alone, so that a GPU too repeats itself bit for bit; slower, above all in
    attention's backward pass. An op that has none ends the run by its name. On a CPU runs repeat themselves anyway."""
    high_noise_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Under `model.part: both`: share of `steps` that the expert for high noise gets; null for a half."""
    guidance_scale: NonNegative | None = None
    """Value of the guidance embedding in training, for models that have one (FLUX.1-dev, FLUX.2-dev); null for 1, no
    guidance. Samples take theirs from `validation.guidance_scale`."""
    timesteps: TimestepsConfig | None = None
    """Noise levels of models that are trained by flow matching; null for the family's."""
    target: Literal["data", "guided"] = "data"
    """The target of the loss. `data`: the data. `guided`: the base's prediction for an empty caption, plus
    `guided_scale` times the data's difference from it. It is for checkpoints that guidance was distilled into, which
    training on the data takes out. About 1.3 times the compute."""
    guided_scale: Annotated[float, Field(gt=1)] | None = None
    """The guidance of `target: guided`: the one that was distilled; null for 3."""
    preserve: PreserveConfig | None = None
    """Also train each sample on its caption without the trigger, with the base's prediction as the target: a second
    loss, for twice the activations and 1.2 times more compute. Null for none. Prior preservation, with pictures that
    the base makes, is `generate` of `data.sources`."""
    vlb: bool | None = None
    """Models with a learned variance (DiT, Latte): train the variance too, by the variational bound; null for
    yes where the checkpoint has one."""

    @property
    def effective_guided_scale(self) -> float | None:
        """Guidance of the target: `guided_scale`, or 3 if it is not set; None with `target: data`."""
        if self.target == "data":
            return None
        return 3.0 if self.guided_scale is None else self.guided_scale

    @property
    def effective_high_noise_share(self) -> float:
        """Share of steps that train the high-noise expert: `high_noise_share`, or 0.5 if it is not set."""
        return 0.5 if self.high_noise_share is None else self.high_noise_share

    @property
    def effective_checkpointing(self) -> Literal["auto", "none", "selective", "full"]:
        """Gradient checkpointing mode in use: always `full` with `offload: group`, else the `checkpointing` option."""
        return "full" if self.offload == "group" else self.checkpointing

    @model_validator(mode="after")
    def _check_offload(self) -> "TrainConfig":
        # A compiled block has no separate call of attention whose output could be saved.
        if self.compile and self.checkpointing == "selective":
            raise ValueError("checkpointing=selective does not work with compile; use full, none or auto")
        if self.offload == "none":
            return self
        if self.checkpointing not in ("auto", "full"):
            raise ValueError(f"offload=group needs checkpointing=full or auto; got checkpointing={self.checkpointing}")
        # All weights train, so there are no frozen ones to move.
        if self.mode == "full":
            raise ValueError("offload=group does not apply to mode=full, which has no frozen weights; remove it")
        return self
