"""The sections of a recipe as typed models, and checks across sections. `dit_lora.config.load` reads them."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dit_lora.config.chat import ChatConfig
from dit_lora.config.data import DataConfig
from dit_lora.config.lora import WEIGHT_INITS, LoraConfig
from dit_lora.config.optim import GroupsConfig, OptimConfig, TrainConfig
from dit_lora.config.recovery_settings import (
    MIN_SPIKE_WINDOW,
    LoopConfig,
    RecoveryAction,
    RecoveryConfig,
    find_actions_problem,
)
from dit_lora.config.section import Count, Positive, Section
from dit_lora.config.validation import ValidationConfig


class ModelConfig(Section):
    family: str
    """A name that `dit-lora recipes --families` lists, for instance `cogvideox`."""
    path: str
    """A local Diffusers folder, or a Hub id such as `THUDM/CogVideoX-5b`; what reads as a folder (`models/x`) is one,
    and `hub:OWNER/NAME` is always the Hub's."""
    part: Literal["transformer", "transformer_2", "both"] | None = None
    """Checkpoints with two experts (Wan 2.2 A14B): `transformer` trains the expert for high noise, `transformer_2` the
    one for low noise, `both` one after the other, each in its own folder below run.dir."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    task: Literal["t2v", "i2v", "ic_lora"] | None = None
    """The task to train, for checkpoints with several: videos from text, from a first image too (Wan 2.2 TI2V-5B), and
    from a reference clip (LTX-2, `ic_lora`); null for what its own pipeline does."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of frozen weights and compute. `auto`: bf16 where the device computes in it, fp32 on a CPU."""
    quantize: Literal["nf4", "int8", "fp8"] | None = None
    """Store the linear layers of the frozen blocks narrower, and compute in `dtype` all the same: `nf4` (4.5 bits a
    weight, needs bitsandbytes), `int8` or `fp8` (8). What `optim.groups` trains of the base is left as it is."""
    from_scratch: dict[str, Any] | None = None
    """Start from random weights: the checkpoint's transformer config with these values changed, `{}` for none
    changed. Needs `train.mode: full`."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _reject_fp16(cls, value: Any) -> Any:
        if value in ("fp16", "float16"):
            raise ValueError(
                "fp16 is not offered: bf16-trained checkpoints (CogVideoX-5B, T5) overflow its range of "
                "65504, and fp16 adapters (VideoChat2) turn NaN in AdamW, whose eps is 0 in it; use auto, bf16 or fp32"
            )
        return value


KernelMode = Literal["auto", "on", "off"]


class KernelsConfig(Section):
    """Options of the fused kernels.

    `auto` uses a kernel if the model and the machine support it and it equals the stock model on the run's own shapes.
    `on` requires it, also without a GPU, and refuses the run if it cannot be used. `off` never uses it.
    """

    lora_linear: KernelMode = "auto"
    """Adapters as one autograd function: the input is saved once, in its own dtype."""
    fp8: KernelMode = "off"
    """Products of adapters' frozen weights in fp8 inside of `lora_linear`, with a scale per row; two more bytes per
    weight. Adapters stay as they are. It rounds to 2^-4, so `auto` has to be asked for."""
    qk_norm_rope: KernelMode = "auto"
    """Norm and rotation of q and k in one pass."""
    ada_norm: KernelMode = "auto"
    """Gated residual, norm and modulation in one pass."""
    relu_linear_attention: KernelMode = "auto"
    """Sana's linear attention, with fp32 state."""
    silu_dwconv_glu: KernelMode = "auto"
    """Sana's convolution in the feed-forward, which keeps one activation of three."""
    liger: KernelMode = "auto"
    """Liger's RMSNorm, SwiGLU and rotation in language models of Transformers, if liger-kernel is installed."""
    finite_norm: KernelMode = "auto"
    """Gradient norms and their finiteness in one pass over all gradients."""
    attention: str = "auto"
    """`auto` for PyTorch's choice, or one of Diffusers' backends that train: native, _native_flash, flash,
    _flash_3_hub, ...; chat models: sdpa, eager, flash_attention_2 or flash_attention_3."""

    @field_validator("*", mode="before")
    @classmethod
    def _convert_yaml_booleans(cls, value: Any) -> Any:
        # YAML 1.1 reads a bare on and off as true and false.
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    def get_op_modes(self) -> dict[str, KernelMode]:
        """Modes (`auto`, `on`, `off`) of the fused kernels that replace parts of a model, by kernel name."""
        # These two are no replacement of a module: a choice of backend, and the norm of gradients.
        names = set(type(self).model_fields) - {"attention", "finite_norm"}
        return {name: getattr(self, name) for name in sorted(names)}


class GuardConfig(Section):
    on_nonfinite: tuple[RecoveryAction, ...] = RecoveryConfig.on_nonfinite
    """Recovery actions in order of preference: the first that fits the cause of a failed step and is below its limit.
    Without one, the run stops. `skip`: repeat the step without the sample, which returns in the next epoch; it does
    not fit a sample that would fail again if `quarantine` is listed too. `quarantine`: leave the sample out
    permanently. `fallback`: switch the kernel or attention backend off. `rollback`:
    restore a snapshot. `[stop]` stops at every failed step."""
    max_skips: Annotated[int, Field(ge=0)] = RecoveryConfig.max_skips
    """Maximum number of failed steps that a run may retry, skip or take without a quarantined sample."""
    max_rollbacks: Annotated[int, Field(ge=0)] = RecoveryConfig.max_rollbacks
    rollback_lr: Annotated[float, Field(gt=0, lt=1)] = RecoveryConfig.rollback_lr
    """Factor of all learning rates after a rollback, if an earlier rollback did not help or the diagnosis is that they
    are too high."""
    snapshot_every: Count = RecoveryConfig.snapshot_every
    """Steps between snapshots of adapter and optimizer in host memory."""
    monitor_every: Annotated[int, Field(ge=0)] = 50
    """Steps between statistics of every module in metrics.jsonl; 0 for none."""
    spike_threshold: Positive | None = None
    """Report losses (by timestep) and gradient norms this many MADs above their median; null for none."""
    spike_window: Annotated[int, Field(ge=MIN_SPIKE_WINDOW)] = LoopConfig.spike_window
    """Steps in that median."""
    adaptive_clip: bool = False
    """Clip gradient norms at `spike_threshold` too, where that is below `optim.clip`."""
    preflight: bool | Literal["anew"] = True
    """Check model, precision, attention, gradient flow and kernels before the first step. What depends on model,
    versions, device and shapes alone is remembered beside the cache; `anew` takes nothing from there. A short
    run repeats kernels less often unless the recipe sets this."""
    parity_every: Annotated[int, Field(ge=0)] = 500
    """Steps between comparisons of the fused kernels with the stock model, on the weights and a batch of then, and
    once more after the last step; 0 for none. What differs is off, and training goes back to the comparison before.
    The last comparison of a short run is smaller unless the recipe sets this."""
    gradient_every: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    """Steps between checks that the gradient is the slope of the loss, of which the first is in the first step; 0 for
    none. A check costs about 22 forward passes of a step in fp32, 66 in bf16; `auto` checks as often as 1 % of the
    steps pay for. A difference is reported, with its cause. One process, or DDP."""
    quarantine: str | None = None
    """A quarantine.jsonl of an earlier run, whose samples are left out from the start."""
    allow_extreme_update: bool = False
    """Let a result pass its verification whose update is more than ten times the weight that it is added to."""
    bundles: Annotated[int, Field(ge=0)] = RecoveryConfig.bundles
    """Maximum number of bundles for `dit-lora replay` that each process writes. Those that the run's folder has at the
    start count too."""
    bundle_mib: Positive = RecoveryConfig.bundle_mib
    """Maximum size of a bundle in MiB. A part that does not fit is left out and listed in bundle.json."""

    @property
    def recovery_config(self) -> RecoveryConfig:
        # The section has the same names, and more settings that this class does not need.
        names = (field.name for field in fields(RecoveryConfig))
        return RecoveryConfig(**{name: getattr(self, name) for name in names})

    @field_validator("on_nonfinite")
    @classmethod
    def _check_actions(cls, actions: tuple[RecoveryAction, ...]) -> tuple[RecoveryAction, ...]:
        if fault := find_actions_problem(actions):
            raise ValueError(fault)
        return actions

    @model_validator(mode="after")
    def _check_adaptive_clip(self) -> "GuardConfig":
        if self.adaptive_clip and self.spike_threshold is None:
            raise ValueError("adaptive_clip needs guard.spike_threshold, for instance 8")
        return self


class RunConfig(Section):
    dir: str
    """Everything that the run writes goes here."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that Accelerate logs to, beside metrics.jsonl."""
    allow_untested: bool = False
    """Run in spite of an untested or known-bad combination of versions."""


# The rule of huggingface_hub.utils.validate_repo_id, but the owner is required.
_REPO_ID = re.compile(r"\w[\w.-]*/\w[\w.-]{0,95}", re.ASCII)


def find_repo_id_problem(repo_id: str) -> str | None:
    """Why a text cannot be the name of a repository on the Hub; None if it can."""
    parts = repo_id.split("/")
    # The Hub refuses owners and names with these endings.
    ends = any(part.endswith((".", "-", ".git")) for part in parts)
    if _REPO_ID.fullmatch(repo_id) and not ends and "--" not in repo_id and ".." not in repo_id:
        return None
    return "a repository must be OWNER/NAME, of letters, digits and single . - _, such as me/kitten-lora"


class HubConfig(Section):
    """Options for pushing a run's result to the Hugging Face Hub: adapter, model card and samples.

    `dit-lora push` uploads the same files.
    """

    push: bool = False
    """Push when training has ended. Token and rights are checked before it starts."""
    repo_id: str | None = None
    """OWNER/NAME of the repository, which is made if it is not there."""
    private: bool = True
    """A repository that is made is private: nobody has looked at the result yet. `false` makes it public."""

    @field_validator("repo_id")
    @classmethod
    def _check_repo_id(cls, repo_id: str | None) -> str | None:
        problem = find_repo_id_problem(repo_id) if repo_id is not None else None
        if problem:
            raise ValueError(problem)
        return repo_id

    @model_validator(mode="after")
    def _require_repo_id(self) -> "HubConfig":
        if self.push and self.repo_id is None:
            raise ValueError("hub.push needs hub.repo_id: OWNER/NAME on the Hub, such as me/kitten-lora")
        return self


class Recipe(Section):
    """All settings of one training run, as read from a recipe's YAML file."""

    model: ModelConfig
    data: DataConfig
    chat: ChatConfig | None = None
    """Settings of chat models; by default all of their defaults."""
    lora: LoraConfig = LoraConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig
    validation: ValidationConfig = ValidationConfig()
    guard: GuardConfig = GuardConfig()
    kernels: KernelsConfig = KernelsConfig()
    run: RunConfig
    hub: HubConfig = HubConfig()

    @model_validator(mode="after")
    def _check_sections(self) -> "Recipe":
        # Images have no frame rate, and chat models need none.
        if self.chat is None and self.data.max_frames > 1 and self.data.fps is None:
            raise ValueError(
                "data.fps is missing: clips of several frames are resampled to it (chat models: give chat: {})"
            )
        # A question belongs to one image or video.
        media, prompts = self.validation.media, self.validation.prompts
        if media and len(media) != len(prompts):
            raise ValueError(
                f"validation.media needs one file for each prompt; got {len(media)} files, {len(prompts)} prompts"
            )
        if self.train.preserve is not None and self.train.mode == "full":
            raise ValueError(
                "train.preserve needs an adapter, and train.mode: full has none; remove it, or use "
                "data.sources.generate (prior preservation)"
            )
        if self.train.target == "guided" and self.train.mode == "full":
            raise ValueError("train.target: guided needs an adapter, and train.mode: full has none; remove it")
        if self.train.guided_scale is not None and self.train.target == "data":
            raise ValueError("train.guided_scale has no effect without train.target: guided; add it or remove this")
        for option, is_set in (
            ("train.preserve", self.train.preserve is not None),
            ("train.target: guided", self.train.target == "guided"),
        ):
            if is_set and self.train.context_parallel > 1:
                raise ValueError(f"{option} does not work with train.context_parallel; remove one of them")
        # A second checkpoint that makes the samples.
        second = self.validation.model is not None
        if second and not prompts:
            raise ValueError("validation.model has no effect without validation.prompts; give some")
        if second and any(source.generate for source in self.data.all_sources):
            raise ValueError(
                "data.sources.generate samples the base with the steps and guidance of validation, which are "
                "validation.model's; generate them in a run without it first"
            )
        if second and self.lora.init in WEIGHT_INITS:
            raise ValueError(
                f"validation.model: lora.init: {self.lora.init} starts from this base's weights, which the second "
                "model has not"
            )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> "Recipe":
        both, train = self.model.part == "both", self.train
        # Both are saved in PEFT's format, whose files have fixed names.
        if both and self.lora.kind in ("loha", "oft"):
            raise ValueError(f"lora.kind: {self.lora.kind} has one adapter a folder; train one expert")
        if train.high_noise_share is not None and not both:
            raise ValueError("train.high_noise_share applies only to model.part: both; remove it")
        # The checks below are for recipes that train both experts.
        if not both:
            return self
        if train.mode == "full":
            raise ValueError("model.part: both needs train.mode: lora; with full, train one expert at a time")
        if train.resume not in ("none", "auto"):
            hint = "a path belongs to one expert; use auto, or continue that expert's own config.yaml"
            raise ValueError(f"train.resume: under model.part: both, {hint}")
        if train.steps < 2:
            raise ValueError("train.steps must be at least 2 with model.part: both; got 1")
        if self.validation.other_expert is not None:
            raise ValueError(
                "validation.other_expert does not apply to model.part: both, which trains both experts; remove it"
            )
        return self

    @model_validator(mode="after")
    def _check_mode(self) -> "Recipe":
        # The defaults show which values the recipe has set itself.
        groups, usual = self.optim.groups, GroupsConfig()
        if self.train.mode == "lora":
            if self.model.from_scratch is not None:
                raise ValueError("model.from_scratch needs train.mode: full; a LoRA needs a trained base")
            if groups.adapter is None:
                if self.lora != LoraConfig():
                    raise ValueError("lora does not apply, because optim.groups.adapter is null; remove one of them")
                if not groups.get_configured_groups():
                    raise ValueError("optim.groups trains nothing; give adapter, connector or backbone")
                if groups.adapter_b:
                    raise ValueError("optim.groups: adapter_b needs adapter")
            return self
        # From here on `train.mode` is `full`, which has no adapter.
        if self.validation.model is not None:
            raise ValueError("validation.model does not apply to train.mode: full, which trains no adapter; remove it")
        if self.model.quantize is not None:
            raise ValueError("model.quantize does not apply to train.mode: full, which trains every weight; remove it")
        if self.lora != LoraConfig():
            raise ValueError("lora does not apply to train.mode: full; remove it")
        if groups.adapter != usual.adapter or groups.adapter_b:
            raise ValueError("optim.groups: train.mode: full has no adapter; give backbone")
        if groups.backbone is None:
            raise ValueError("optim.groups.backbone is missing: train.mode: full trains it")
        return self

    @model_validator(mode="after")
    def _check_fp8(self) -> "Recipe":
        # `auto` is checked too: it may turn fp8 on.
        if self.kernels.fp8 == "off":
            return self
        if self.model.quantize is not None:
            raise ValueError(
                f"kernels.fp8: {self.kernels.fp8}: the base is already quantised (model.quantize: "
                f"{self.model.quantize}); remove one of them"
            )
        if self.train.offload != "none":
            raise ValueError(
                f"kernels.fp8: {self.kernels.fp8}: it keeps every weight on the device, which train.offload: "
                f"{self.train.offload} is meant to avoid; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_deterministic(self) -> "Recipe":
        # PyTorch's setting has no effect on these packages, whose backward passes use atomic additions by default.
        if self.train.deterministic and re.search("flash_|^flash|xformers", self.kernels.attention):
            raise ValueError(
                f"train.deterministic: the backward pass of kernels.attention: {self.kernels.attention} adds in "
                "no fixed order; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_learning_rates(self) -> "Recipe":
        groups = self.optim.groups.get_configured_groups()
        if self.train.mode == "full":
            groups.pop("adapter", None)  # set by default, but mode `full` has no adapter
        problems = self.optim.find_learning_rate_problems(groups)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _check_eval_losses(self) -> "Recipe":
        validation = self.validation
        if validation.data is not None and not validation.eval_draws:
            raise ValueError("validation.data needs draws of noise: validation.eval_draws is 0")
        # Options that compare the losses of steps.
        for name in ("keep_best", "stop_after"):
            if not getattr(self.train, name):
                continue
            if self.chat is not None and validation.conversations is None:
                raise ValueError(f"train.{name} needs an eval loss: give validation.conversations")
            if self.chat is None and not validation.eval_draws:
                raise ValueError(f"train.{name} needs an eval loss: validation.eval_draws is 0")
        save, eval_steps = self.train.save_every, validation.every
        # A checkpoint is ranked by the eval loss of its own step, so saves and evaluations must coincide.
        if self.train.keep_best and (eval_steps is None or (save % eval_steps and eval_steps % save)):
            raise ValueError(
                "train.keep_best needs the eval loss of checkpoints: validation.every must divide "
                f"train.save_every or be a multiple of it; got {eval_steps} and {save}"
            )
        if self.train.stop_after and eval_steps is None:
            raise ValueError("train.stop_after counts validations during training: give validation.every")
        return self

    @property
    def has_distillation_safeguard(self) -> bool:
        """True if the recipe has something that keeps a distilled checkpoint's sampling: a frozen adapter that may
        undo the distillation in training, or a guided target."""
        return bool(self.lora.under) or self.train.target == "guided"

    @property
    def cache_dir(self) -> Path:
        return Path(self.data.cache) if self.data.cache else Path(self.run.dir).parent / "cache"
