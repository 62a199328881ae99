"""Types of the JSON in run folders, bundles, checkpoints and adapters, and the reader that validates it.

These files may come from strangers. A damaged or hostile file gives a one-line error that names the file and the
field, and code that uses the result can rely on its types. Unknown keys are kept, because newer versions write more.
`NotRequired` keys are written only since some version, or only for some models.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import AllowInfNan, ConfigDict, Field, Strict, StringConstraints, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from dit_lora.files import read_regular_file
from dit_lora.parsing import ParseError, parse_json
from dit_lora.terminal import make_one_line

T = TypeVar("T")

Finite = Annotated[float, AllowInfNan(False)]
Number = Annotated[int, Strict(), Field(ge=-(2**63), le=2**63 - 1)] | Finite
"""A finite number; integers stay integers."""
Int64 = Annotated[int, Strict(), Field(ge=-(2**63), le=2**63 - 1)]
"""Integers of tensors, seeds and steps have 64 bits, while JSON's have any size."""
Count = Annotated[int, Strict(), Field(ge=0, le=2**63 - 1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
"""A Python identifier: the name of a class, an argument or a component."""
Module = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=200)]
# For example torch.bfloat16 or torch.float8_e4m3fn. The text is put into generated code.
Dtype = Annotated[str, StringConstraints(pattern=r"^torch\.(float|bfloat)[0-9]{1,2}(_[a-z0-9]+)?$")]


class _JsonRecord(TypedDict):
    """A JSON object. Unknown keys are kept, and values are not converted."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]


class Manifest(TypedDict):
    """manifest.json of a training checkpoint."""

    sha256: dict[str, str]


class CheckpointState(_JsonRecord):
    """state.json of a training checkpoint."""

    step: Count
    identity: dict[str, Any]
    guard: dict[str, Any]
    place: NotRequired[dict[str, Any]]


class Status(_JsonRecord):
    """status.json of a run."""

    state: NotRequired[str]


class VerifiedFiles(_JsonRecord):
    """The keys of verification.json that are read; earlier versions have no digests."""

    files: NotRequired[dict[str, str]]
    """Hex SHA-256 by path relative to the run's folder."""
    passed: NotRequired[bool]


class Answer(_JsonRecord):
    """A chat model's answer to one validation prompt, as stored in answers.json."""

    prompt: NotRequired[str]
    media: NotRequired[str | None]
    answer: NotRequired[str]


class FrozenAdapterRecord(_JsonRecord):
    """A frozen adapter that was active while a result was trained."""

    name: str
    scale: Number
    in_samples: bool


class NamedFile(_JsonRecord):
    name: str


class ViewingRecord(_JsonRecord):
    """How frames of media are chosen for a chat model: the fields of `Viewing`."""


class Video(_JsonRecord):
    """Shape of the training samples: number of frames, height and width in pixels, and frames per second."""

    frames: NotRequired[Count | None]
    height: NotRequired[Count | None]
    width: NotRequired[Count | None]
    fps: NotRequired[Number | None]


class RunMetadata(_JsonRecord):
    """The run's own entry in an adapter's header; empty for an adapter of another program."""

    family: NotRequired[str]
    part: NotRequired[Literal["transformer", "transformer_2"]]
    base_model: NotRequired[str | None]
    revision: NotRequired[str | None]
    transformer_digest: NotRequired[str]
    dtype: NotRequired[str]
    kind: NotRequired[str]
    rank: NotRequired[Int64]
    alpha: NotRequired[Number]
    block_size: NotRequired[Int64]
    dropout: NotRequired[Number]
    rslora: NotRequired[bool]
    quantize: NotRequired[str | None]
    index: NotRequired[dict[str, Any] | None]
    video: NotRequired[Video]
    viewing: NotRequired[ViewingRecord]
    system: NotRequired[str]
    task: NotRequired[str | None]
    under: NotRequired[list[FrozenAdapterRecord]]
    continued: NotRequired[NamedFile]
    samples_from: NotRequired[str]
    output: NotRequired[dict[str, Any] | str]
    seed: NotRequired[Int64]
    steps: NotRequired[Int64]
    reference_resolution: NotRequired[Int64 | None]


class AdapterConfig(_JsonRecord):
    """The keys of PEFT's adapter config that are read."""

    peft_type: NotRequired[str | None]
    base_model_name_or_path: NotRequired[str | None]
    r: NotRequired[Int64]
    lora_alpha: NotRequired[Number]
    alpha: NotRequired[Number]
    target_modules: NotRequired[list[str] | str | None]
    exclude_modules: NotRequired[list[str] | str | None]
    layers_pattern: NotRequired[list[str] | str | None]
    rank_pattern: NotRequired[dict[str, Int64] | None]
    alpha_pattern: NotRequired[dict[str, Number] | None]
    use_rslora: NotRequired[bool]
    use_dora: NotRequired[bool]
    modules_to_save: NotRequired[list[str] | None]


class Replay(_JsonRecord):
    """Position of a failed micro-batch in a run, as stored in a replay bundle."""

    step: Count
    micro_step: Count
    rank: Count
    ids: list[Any]
    draws: NotRequired[list[Int64]]
    faults: NotRequired[dict[str, Any]]


class EventRecord(_JsonRecord):
    kind: str


_Class = TypedDict("_Class", {"class": Name})


class CalledModel(_Class, _JsonRecord):
    """The model of an external training loop: its class, and "name shape" for each parameter."""

    parameters: list[Annotated[str, StringConstraints(pattern=r"^\S.* \S+$")]]


class BundleFacts(_JsonRecord):
    """bundle.json. A run's bundle has `recipe` and `dtype`; an external loop's has `call` and `model`.

    The bundle of a wrong gradient has `micro_batches`; an external loop's also has `calls` in place of `call`, and
    `dtype` is the lowest precision of its forward pass.
    """

    format: Int64
    left_out: list[str]
    event: EventRecord
    replay: Replay
    packages: dict[str, str]
    switched_off: list[str]
    start_peak: Number
    recipe: NotRequired[dict[str, Any]]
    dtype: NotRequired[str]
    transformer_digest: NotRequired[str]
    call: NotRequired[dict[str, Any]]
    calls: NotRequired[list[dict[str, Any]]]
    model: NotRequired[CalledModel]
    micro_batches: NotRequired[list[Replay]]


class PipelineFacts(_Class, _JsonRecord):
    """The entry of facts.json about a pipeline, from which the model card's code is generated."""

    module: Module
    loads_lora: bool
    is_modular: NotRequired[bool]
    has_guider: NotRequired[bool]
    condition: Literal["prompt", "class_labels"]
    label: list[Int64] | None
    labels_as_tensor: bool
    from_image: bool
    to_image: NotRequired[bool]
    references: NotRequired[Annotated[Count, Field(le=64)]]
    reference_clips: NotRequired[bool]
    reference_resolution: NotRequired[Int64 | None]
    arguments: dict[Name, bool | Int64 | Finite | str | None]
    output: Literal["frames", "images"]
    seed: Int64
    fps: Number | None
    dtype: Dtype
    in_fp32: list[Name]


class ModelFacts(_Class, _JsonRecord):
    """The entry of facts.json about a chat model's class."""

    module: Module
    library: str


class NumberSummary(TypedDict):
    """Summary of a list of numbers in facts.json."""

    least: Number
    median: Number
    most: Number
    sum: Number


class ClipDataFacts(_JsonRecord):
    """The entry of facts.json about clips or images."""

    kind: Literal["images", "clips"]
    datasets: list[str]
    left_out: Count
    clips: Count
    samples: Count
    seconds: NumberSummary | None
    """Lengths of the clips in seconds; None for images."""
    shapes: NotRequired[dict[str, Count]]
    caption_words: NotRequired[NumberSummary]
    distinct_captions: NotRequired[Count]
    caption_prefix: NotRequired[str | None]
    references: NotRequired[dict[str, Count]]
    """Number of clips by their number of references."""
    masked: NotRequired[Count]
    classes: NotRequired[Count]


class ConversationDataFacts(_JsonRecord):
    """The entry of facts.json about conversations."""

    kind: Literal["conversations"]
    datasets: list[str]
    left_out: Count
    samples: Count
    by_media: dict[Literal["image", "video", "text"], Count]
    answer_tokens: NumberSummary
    seconds: NumberSummary | None


class ChatTemplateFile(_JsonRecord):
    """chat_template.json of older chat checkpoints."""

    chat_template: str


class WeightMap(_JsonRecord):
    """The index file of a model that is split into several files."""

    weight_map: dict[str, str]


class GroupInCard(_JsonRecord):
    """One parameter group of config.yaml, as far as the model card shows it."""

    lr: NotRequired[Number]


class OptimInCard(_JsonRecord):
    """`optim` of config.yaml, as far as the model card shows it."""

    name: str
    schedule: str
    warmup_steps: Count
    groups: dict[str, GroupInCard | None]


class TrainInCard(_JsonRecord):
    """`train` of config.yaml, as far as the model card shows it."""

    batch_size: Count
    accumulate: Count
    seed: Int64
    ema: NotRequired[Number | None]


class DataInCard(_JsonRecord):
    """`data` of config.yaml, as far as the model card shows it."""

    caption_dropout: Number
    mask_floor: NotRequired[Number]
    sources: NotRequired[list[dict[str, Any]] | None]
    reference_folders: NotRequired[list[str] | None]


class LoraInCard(_JsonRecord):
    """`lora` of config.yaml, as far as a pushed copy changes it."""

    init: NotRequired[str]
    under: NotRequired[list[dict[str, Any]] | None]


class ValidationInCard(_JsonRecord):
    """`validation` of config.yaml, as far as a pushed copy changes it and the card shows it."""

    prompts: NotRequired[list[Any] | None]
    images: NotRequired[list[Any] | None]
    last_images: NotRequired[list[Any] | None]
    media: NotRequired[list[Any] | None]
    references: NotRequired[list[list[str] | str] | None]
    model: NotRequired[str | None]


class ConfigInCard(_JsonRecord):
    """config.yaml of a run, as far as the model card shows it."""

    model: dict[str, Any]
    data: DataInCard
    optim: OptimInCard
    train: TrainInCard
    lora: NotRequired[LoraInCard | None]
    validation: NotRequired[ValidationInCard | None]


class CheckInCard(_JsonRecord):
    """One check in verification.json."""

    passed: NotRequired[bool]
    words: NotRequired[str]


class VerificationInCard(_JsonRecord):
    """verification.json, as far as the model card shows it."""

    checks: dict[str, CheckInCard]


class EnvironmentInCard(_JsonRecord):
    """environment.json, as far as the model card shows it."""

    processes: NotRequired[Count]
    packages: NotRequired[dict[str, str] | None]
    devices: NotRequired[list[dict[str, Any]] | None]


class RunFacts(_JsonRecord):
    """facts.json of a run."""

    data: Annotated[ClipDataFacts | ConversationDataFacts, Field(discriminator="kind")]
    pipeline: NotRequired[PipelineFacts]
    model: NotRequired[ModelFacts]


def read_typed_json(path: Path, value_type: type[T]) -> T:
    """Read a JSON file and validate it as this type. The file must be a regular one.

    Raises `OSError` if it cannot be read, and `ParseError`, which names the file and the field, if it is not JSON of
    this type, has a key twice, or is not UTF-8.
    """
    return parse_typed_json(read_regular_file(path), value_type, str(path))


def parse_typed_json(text: str | bytes, value_type: type[T], description: str) -> T:
    """Parse a JSON text and validate it as this type. `description` names the text in the `ParseError`."""
    try:
        # Duplicate keys: two readers could take different values from such a file.
        value = parse_json(text, unique=True)
    except ParseError as error:
        raise ParseError(f"{description} is not valid JSON: {error}") from error
    return validate_value(value, value_type, description)


def validate_value(value: Any, value_type: type[T], description: str) -> T:
    """Validate a parsed value as this type; raises `ParseError` with the first problem."""
    try:
        return TypeAdapter(value_type).validate_python(value)
    except ValidationError as error:
        # The first problem is enough: the file is refused as a whole.
        problem = error.errors(include_url=False)[0]
        # Shortened and escaped, because names and values come from the file.
        field = ".".join(make_one_line(part)[:80] for part in problem["loc"])
        got = repr(problem["input"])[:80] if problem["type"] != "missing" else "nothing"
        # No field if the value itself has the wrong type.
        location = f"{field}: " if field else ""
        raise ParseError(f"{description} is damaged: {location}{make_one_line(problem['msg'])}; got {got}") from error
