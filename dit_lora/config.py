"""Typed recipes: YAML values, `key.path=value` overrides, unknown keys refused by name."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dit_lora.errors import DitLoraError, listed

Schedule = Literal["constant", "linear", "cosine"]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


def _types(annotation: Any) -> Iterator[Any]:
    """The plain types of `Annotated` and optional ones."""
    yield annotation
    for part in get_args(annotation):
        yield from _types(part)


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_by_yes_or_no(cls, value: Any, info: ValidationInfo) -> Any:
        types = list(_types(cls.model_fields[info.field_name or ""].annotation))
        if isinstance(value, bool) and bool not in types and (int in types or float in types):
            raise ValueError(f"Input should be a number, not {str(value).lower()}")
        return value


class ModelConfig(Section):
    family: str
    """A name that `dit-lora families` lists, for instance `cogvideox`."""
    path: str
    """A local Diffusers folder, or a Hub id such as `THUDM/CogVideoX-5b`."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Frozen weights and compute. `auto`: bf16 where the device computes in it, fp32 on a CPU."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _explain_fp16(cls, value: Any) -> Any:
        if value in ("fp16", "float16"):
            raise ValueError(
                "fp16 is not offered: bf16-trained checkpoints (CogVideoX-5B, T5) overflow its range of "
                "65504 and the loss turns NaN; use auto, bf16 or fp32"
            )
        return value


class DataConfig(Section):
    path: str
    """A folder: metadata.jsonl, metadata.csv, prompts.txt + videos.txt, or clips each with a .txt."""
    caption_column: str | None = None
    """Column of the caption in metadata files; by default the one present of text, caption, prompt."""
    frames: Count
    """Frames per clip."""
    height: Count
    """Pixels."""
    width: Count
    """Pixels."""
    fps: Positive
    """Clips are resampled to this rate by their time stamps."""
    caption_dropout: Probability = 0.0
    """Share of samples trained with an empty caption, for classifier-free guidance."""
    cache: str | None = None
    """Folder of encoded clips and captions, shared by runs; by default `cache` beside the run's folder."""
    workers: Annotated[int, Field(ge=0)] = 2
    """Processes that read the cache ahead of the training step."""


class LoraConfig(Section):
    rank: Count = 64
    alpha: Count | None = None
    """The update is scaled by alpha / rank; by default alpha = rank."""
    dropout: Decay = 0.0
    targets: tuple[str, ...] | None = None
    """Names of linear layers, as PEFT matches them; by default the family's."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How A starts; B starts at zero. `kaiming` is PEFT's default."""


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
    adapter: GroupConfig = GroupConfig(lr=1e-4)
    """LoRA matrices: both, or only A where `adapter_b` is given."""
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


class TrainConfig(Section):
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
    checkpointing: Literal["none", "full"] = "full"
    """Gradient checkpointing: `full` recomputes each block in the backward pass and saves memory."""


class ValidationConfig(Section):
    prompts: tuple[str, ...] = ()
    """Videos are sampled for these at the same seed, before and after training."""
    every: Count | None = None
    """Steps between samples during training; by default only before and after."""
    inference_steps: Count = 50
    guidance_scale: Annotated[float, Field(ge=1)] = 6.0
    seed: Annotated[int, Field(ge=0)] = 0
    held_out_draws: Annotated[int, Field(ge=0)] = 4
    """Noise and timestep draws per clip, never trained on, for the held-out loss; 0 turns it off."""
    held_out_clips: Count = 16
    """Clips in the held-out loss."""


Rung = Literal["skip", "quarantine", "fallback", "rollback", "stop"]


class LadderConfig(Section):
    """What may be done about a step that tripped."""

    on_nonfinite: tuple[Rung, ...] = ("skip", "quarantine", "fallback", "rollback", "stop")
    """What may be done about a step that tripped, in order of preference; the first that fits its cause
    and has budget left is taken, and the run stops where none does. `skip`: take the step again, once without
    the sample. `quarantine`: leave the sample out for good. `fallback`: switch the kernel or attention
    backend off. `rollback`: go back to a snapshot. `[stop]` never goes on."""
    max_skips: Annotated[int, Field(ge=0)] = 10
    """Tripped steps that skip and quarantine may answer in one run; then it stops."""
    max_rollbacks: Annotated[int, Field(ge=0)] = 2
    rollback_lr: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Learning rates are multiplied by this when a rollback did not help the first time, or when the
    verdict is that they are too high."""
    snapshot_every: Count = 50
    """Steps between snapshots of adapter and optimizer in host memory."""

    @field_validator("on_nonfinite")
    @classmethod
    def _a_ladder(cls, rungs: tuple[Rung, ...]) -> tuple[Rung, ...]:
        if not rungs or len(set(rungs)) != len(rungs):
            raise ValueError("name each rung once, and at least one; [stop] stops at every fault")
        return rungs


class GuardConfig(LadderConfig):
    monitor_every: Annotated[int, Field(ge=0)] = 50
    """Steps between statistics of every module in metrics.jsonl; 0 for none."""
    spike_threshold: Positive | None = None
    """Report losses (by timestep) and gradient norms this many MADs above their median; null for none."""
    spike_window: Annotated[int, Field(ge=20)] = 200
    """Steps in that median."""
    adaptive_clip: bool = False
    """Clip gradient norms at `spike_threshold` too, where that is below `optim.clip`."""
    preflight: bool = True
    """Check model, precision, attention and gradient flow before the first step; a result is remembered."""
    quarantine: str | None = None
    """A quarantine.jsonl of an earlier run, whose samples are left out from the start."""
    bundles: Annotated[int, Field(ge=0)] = 5
    """Events of which a bundle for `dit-lora replay` is kept, per process."""
    bundle_mib: Positive = 512
    """Largest size of one bundle; what does not fit is left out, and said."""

    @model_validator(mode="after")
    def _clip_needs_a_threshold(self) -> "GuardConfig":
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


class Recipe(Section):
    """One training run, whole."""

    model: ModelConfig
    data: DataConfig
    lora: LoraConfig = LoraConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig
    validation: ValidationConfig = ValidationConfig()
    guard: GuardConfig = GuardConfig()
    run: RunConfig

    @property
    def cache_dir(self) -> Path:
        return Path(self.data.cache) if self.data.cache else Path(self.run.dir).parent / "cache"


class _UniqueKeyLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses a key given twice, where YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"given twice: {', '.join(twice)}", node.start_mark
            )
        return super().construct_mapping(node, deep)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file with `key.path=value` overrides applied, checked as a whole.

    Every unknown key, missing key and wrong type is listed in one `DitLoraError`.
    """
    path = Path(path)
    try:
        values = yaml.load(
            path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader
        )  # a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise DitLoraError(f"cannot read the recipe {path}: {error}") from error
    except yaml.YAMLError as error:
        raise DitLoraError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise DitLoraError(f"{path} must hold sections such as model: and data:; got {values!r}")
    for override in overrides:
        _apply_override(values, override)
    return parse_recipe(values, source=str(path))


def parse_recipe(values: dict[str, Any], source: str) -> Recipe:
    """A checked `Recipe` from plain values; `source` names them in errors."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise DitLoraError(
            listed(f"{source}: correct these values", list(_problems(error)))
        ) from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load_recipe` reads back to an equal one."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors."""
    return Recipe.model_json_schema()


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise DitLoraError(
            f"an override reads key.path=value, for instance train.steps=20; got {override!r}"
        )
    *parents, leaf = key.split(".")
    section = values
    for parent in parents:
        if not isinstance(section.get(parent), dict):
            section[parent] = {}  # absent, or null in the YAML
        section = section[parent]
    try:
        section[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DitLoraError(f"the value of {key} is not valid YAML: {text!r}") from error


def _problems(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            yield f"{name}: unknown key{_suggestion(problem['loc'])}"
        elif problem["type"] == "missing":
            yield f"{name}: missing"
        else:
            yield f"{name}: {problem['msg'].removeprefix('Value error, ')}; got {problem['input']!r}"


def _suggestion(location: tuple[int | str, ...]) -> str:
    """The same key elsewhere in the recipe, else the nearest one in the same section."""
    known = list(_key_paths(Recipe))
    parent = [str(part) for part in location[:-1]]
    siblings = [path[-1] for path in known if path[:-1] == parent]
    elsewhere = [".".join(path) for path in known if path[-1] == str(location[-1])]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    near = difflib.get_close_matches(str(location[-1]), siblings, n=1)
    if near:
        return f"; did you mean {'.'.join([*parent, near[0]])}?"
    return f"; known here: {', '.join(siblings)}"


def _key_paths(section: type[BaseModel], parent: tuple[str, ...] = ()) -> Iterator[list[str]]:
    for name, field in section.model_fields.items():
        yield [*parent, name]
        for option in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from _key_paths(option, (*parent, name))
