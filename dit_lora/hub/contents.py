"""Collects the files of a run to publish, and rejects runs that are incomplete or damaged."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dit_lora.adapters.diffusers_format import (
    ADAPTER_FILE,
    BASE_FILE,
    RUN_METADATA_FILE,
    read_run_metadata,
    require_valid_tensors,
)
from dit_lora.adapters.own_files import list_checkpoint_files, require_paths_inside_checkpoint
from dit_lora.adapters.peft_format import CHAT_ADAPTER_FILE
from dit_lora.config.experts import EXPERT_NAMES, find_expert_runs
from dit_lora.config.records import (
    Answer,
    ConfigInCard,
    EnvironmentInCard,
    RunFacts,
    RunMetadata,
    VerificationInCard,
    parse_typed_json,
    read_typed_json,
    validate_value,
)
from dit_lora.config.yaml_parsing import read_yaml
from dit_lora.environment.pipeline_index import INDEX_FILES, find_index_file
from dit_lora.environment.safetensors_files import UnreadableFileError, read_tensors
from dit_lora.errors import CheckFailedError, DitLoraError, format_list
from dit_lora.files import read_file_inside_folder, require_regular_files
from dit_lora.hub.cleaning import redact_json, redact_recipe
from dit_lora.parsing import ParseError
from dit_lora.redact import redact_model_text, redact_value
from dit_lora.report.run.files import RunFiles, RunReader
from dit_lora.report.run.page import get_sample_prompts
from dit_lora.training.tasks.facts import FACTS_FILE
from dit_lora.verify.expert_pair import format_expert_filename
from dit_lora.verify.verified_files import require_result_unchanged

CARD_FILE = "README.md"
SAMPLES_PREFIX = "samples/"
VERIFICATION_FILE = "verification.json"
ADAPTER_FILES = (ADAPTER_FILE, CHAT_ADAPTER_FILE, "adapter_config.json", BASE_FILE)
"""File names that an adapter may consist of. Experts' files have other names."""


@dataclass(frozen=True)
class CardSample:
    """The model's outputs for one validation prompt: files in the repository, or answers."""

    prompt: str
    before: str | None = None
    after: str | None = None
    is_text: bool = False


@dataclass(frozen=True)
class PublishedContents:
    """A run in its published form. `files` are paths or bytes by path in the repository, without the card."""

    run: RunFiles
    facts: Mapping[str, Any]
    metadata: Mapping[str, Any]
    """The training metadata in the result's header."""
    kind: str
    """`lora`, `peft` or `pipeline`."""
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    card_samples: tuple[CardSample, ...] = ()
    experts: tuple["PublishedContents", ...] = ()
    """The contents of each expert's run if both were trained, high noise first."""

    @property
    def expert(self) -> str | None:
        """Name of the expert that was trained; None if the model has one transformer."""
        return EXPERT_NAMES.get(self.metadata.get("part", ""))

    @property
    def base(self) -> str | None:
        """Hub id of the run's base model; None if it was a local folder."""
        name = str(self.metadata.get("base_model") or "")
        return name if "/" in name else None


def collect_contents(run_dir: Path) -> PublishedContents:
    """Collect everything that a push of the run uploads, except its card. Works for a run of both experts too.

    Raises:
        DitLoraError: The folder is not a run, or has no result yet; with the command that continues.
        CheckFailedError: The result is damaged, or did not pass its verification.
    """
    runs = find_expert_runs(run_dir)
    if len(runs) > 1:
        return _collect_expert_contents(run_dir, [collect_contents(run) for run in runs])
    require_regular_files(run_dir)
    # The state is not shown on the card, so it need not be derived.
    run = RunReader(run_dir).read("finished")
    # The card shows values of these records. Each call raises for missing keys or wrong types.
    message_prefix = f"{run.folder} is not pushed"
    validate_value(run.config, ConfigInCard, f"{message_prefix}: config.yaml")
    validate_value(run.environment, EnvironmentInCard, f"{message_prefix}: environment.json")
    if run.verification:
        validate_value(run.verification, VerificationInCard, f"{message_prefix}: {VERIFICATION_FILE}")
    result, kind = _find_run_result(run)
    _require_verified(run)
    # The file with the training metadata.
    main = result / {"lora": ADAPTER_FILE, "peft": CHAT_ADAPTER_FILE}.get(kind, RUN_METADATA_FILE)
    if kind == "peft" and not main.is_file():
        main = result / BASE_FILE  # only base weights were trained
    _require_valid_result(run_dir, result, kind)
    metadata = redact_value(read_typed_json(main, RunMetadata) if kind == "pipeline" else read_run_metadata(main))
    files = {_get_repository_name(name, metadata, kind): content for name, content in _list_result_files(result, kind)}
    samples = _collect_samples(run, files)
    facts = _read_facts(run)
    # A link could publish a file from outside the run.
    require_paths_inside_checkpoint(run.folder, [path for path in files.values() if isinstance(path, Path)])
    base = str(metadata.get("base_model") or "path/to/base")
    datasets = facts["data"]["datasets"]
    files["config.yaml"] = redact_recipe(run.config, base, datasets).encode()
    if run.verification:
        # The digests are by path in the run's folder, and the Hub has its own.
        shown_record = {name: value for name, value in run.verification.items() if name != "files"}
        record = {**shown_record, "adapter": _get_repository_name(main.name, metadata, kind), "base_model": base}
        files[VERIFICATION_FILE] = redact_json(record).encode()
    redacted_fields = ("config", "environment", "events", "quarantine", "status")
    # The card is written from this copy.
    public = replace(run, **{name: redact_value(getattr(run, name)) for name in redacted_fields})
    return PublishedContents(public, facts, metadata, kind, files, tuple(samples))


def _collect_expert_contents(run_dir: Path, experts: Sequence[PublishedContents]) -> PublishedContents:
    """Contents to publish for a run of both experts.

    The samples are those of the last run, which are made with both.
    """
    # Adapters get the expert's name, but base weights have one fixed name.
    with_base_weights = [item for item in experts if BASE_FILE in item.files]
    if with_base_weights:
        folders = ", ".join(str(item.run.folder) for item in with_base_weights)
        raise DitLoraError(
            f"{run_dir} is not pushed as one: base weights trained too, and both experts' have one name; "
            f"push the runs of each to a repository of its own: {folders}"
        )
    last_expert = experts[-1]
    files = {name: item for name, item in last_expert.files.items() if name.startswith(SAMPLES_PREFIX)}
    for contents in experts:
        for name, item in contents.files.items():
            # Verifications have one name in both runs: put each in its expert's folder.
            if name == VERIFICATION_FILE:
                files[f"{contents.expert}/{name}"] = item
            elif not name.startswith(SAMPLES_PREFIX):
                files[name] = item
    base, datasets = str(last_expert.metadata.get("base_model")), last_expert.facts["data"]["datasets"]
    files["config.yaml"] = redact_recipe(read_yaml(run_dir / "config.yaml"), base, datasets).encode()
    return replace(last_expert, files=files, experts=tuple(experts))


def _find_run_result(run: RunFiles) -> tuple[Path, str]:
    """Folder and kind of the run's result. Raises `DitLoraError` if the run has no result yet."""
    folder = run.folder
    if find_index_file(folder / "model"):
        return folder / "model", "pipeline"
    adapter = folder / "adapter"
    if (adapter / ADAPTER_FILE).is_file():
        return adapter, "lora"
    if (adapter / CHAT_ADAPTER_FILE).is_file() or (adapter / BASE_FILE).is_file():
        return adapter, "peft"
    # Name the file that the run would have written.
    full = run.config.get("train", {}).get("mode") == "full"
    path = "model/model_index.json" if full else f"adapter/{ADAPTER_FILE}"
    raise DitLoraError(
        f"{folder} has no result yet (no {path}); it is at step {run.num_steps_taken:,} of "
        f"{run.max_steps or 0:,}. To continue: dit-lora train {folder}/config.yaml "
        "train.resume=auto"
    )


def _require_verified(run: RunFiles) -> None:
    """Raise `CheckFailedError` if the result failed its verification, or changed since."""
    if (run.folder / VERIFICATION_FILE).exists() and run.verification.get("passed") is not True:
        checks = run.verification.get("checks") or {}
        failed = [f"{name}: {check.get('words', '')}" for name, check in checks.items() if not check.get("passed")]
        raise CheckFailedError(
            format_list(
                f"{run.folder} is not pushed: its result did not pass its verification ({VERIFICATION_FILE}). "
                f"check it again with `dit-lora verify {run.folder}`, or continue the run with train.resume=auto, "
                "which writes and verifies its result again",
                failed,
            )
        )
    require_result_unchanged(run.folder, f"{run.folder} is not pushed")


def _require_valid_result(run_dir: Path, result: Path, kind: str) -> None:
    """Raise `CheckFailedError` if a result file has NaN or Inf, or an adapter has no effect.

    Files may have changed since verified.
    """
    folder = result
    if kind == "pipeline":
        folder = result / read_typed_json(result / RUN_METADATA_FILE, RunMetadata).get("part", "transformer")
    try:
        # An adapter must have an effect; base weights only have to be finite.
        for file in sorted(folder.glob("*.safetensors")):
            tensors = read_tensors(file)
            adapter = {} if kind == "pipeline" or file.name == BASE_FILE else tensors
            require_valid_tensors(adapter, {} if adapter else tensors)
    except (CheckFailedError, UnreadableFileError) as error:
        message = str(error).removeprefix("cannot save: ")
        raise CheckFailedError(f"{run_dir} is not pushed: {file.relative_to(run_dir)}: {message}") from error


def _read_facts(run: RunFiles) -> dict[str, Any]:
    """Facts about data and model that the model card is written from.

    Raises `DitLoraError` if the file is unusable.
    """
    file = run.folder / FACTS_FILE
    try:
        facts = parse_typed_json(read_file_inside_folder(run.folder, file), RunFacts, FACTS_FILE)
        # Exactly one of the two: diffusion models have a pipeline, chat models a model.
        if ("pipeline" in facts) == ("model" in facts):
            raise ParseError(f"{FACTS_FILE} is damaged: it must have `pipeline` or `model`")
        public: dict[str, Any] = redact_value(facts)
        return public
    except (OSError, ValueError) as error:
        raise DitLoraError(
            f"{run.folder} is not pushed: {FACTS_FILE}, which the model card is written from, cannot be used: "
            f"{error}. To write it again: dit-lora train {run.folder}/config.yaml "
            "train.resume=auto"
        ) from error


def _get_repository_name(name: str, metadata: Mapping[str, Any], kind: str) -> str:
    """Name that a result file gets in the Hub repository. The adapters of two experts get different names."""
    is_experts = kind == "lora" and name == ADAPTER_FILE and "part" in metadata
    return format_expert_filename(EXPERT_NAMES[metadata["part"]]) if is_experts else name


def _list_result_files(result: Path, kind: str) -> Iterator[tuple[str, Path | bytes]]:
    """Yield the result's files with their names in the repository; configs without private values."""
    # A pipeline has many files, an adapter only known ones.
    names = [*list_checkpoint_files(result), RUN_METADATA_FILE] if kind == "pipeline" else ADAPTER_FILES
    for name in sorted(names):
        path = result / name
        if not path.is_file():
            continue
        is_config = name.endswith(("config.json", *INDEX_FILES, RUN_METADATA_FILE))
        values = read_typed_json(path, dict[str, Any]) if is_config else {}
        # `_name_or_path` is the path of a folder on the machine that trained.
        public = {key: value for key, value in values.items() if key != "_name_or_path"}
        yield name, path if redact_value(public) == values else redact_json(public).encode()


def _collect_samples(run: RunFiles, files: dict[str, Path | bytes]) -> list[CardSample]:
    """Outputs for the validation prompts before and after training. Adds the sample files to `files`."""
    validation = run.config.get("validation") or {}
    prompts = [redact_model_text(text) for text in get_sample_prompts(validation)]
    steps = sorted((run.folder / "samples").glob("step_*"))
    if not steps:
        return []
    # Samples of the first and the last step; with only one step there is nothing to compare.
    ends = {"after": steps[-1]} | ({"before": steps[0]} if len(steps) > 1 else {})
    if (steps[-1] / "answers.json").is_file():
        return _collect_chat_answers(run.folder, ends)
    card_samples = []
    for index, prompt in enumerate(prompts):
        paths: dict[str, str] = {}
        for stage, folder in ends.items():
            for path in sorted(folder.glob(f"prompt_{index:02d}.*")):
                if not path.is_file():
                    continue
                paths[stage] = f"{SAMPLES_PREFIX}{stage}_{index:02d}{path.suffix}"
                files[paths[stage]] = path
        if "after" in paths:
            card_samples.append(CardSample(prompt, paths.get("before"), paths["after"]))
    return card_samples


def _collect_chat_answers(run_dir: Path, step_folders: Mapping[str, Path]) -> list[CardSample]:
    answers: dict[str, list[dict[str, Any]]] = {"before": []}
    for stage, folder in step_folders.items():
        file = folder / "answers.json"
        require_paths_inside_checkpoint(run_dir, [file])
        answers[stage] = redact_value(read_typed_json(file, list[Answer])) if file.is_file() else []
    return [
        CardSample(
            str(answer.get("prompt", "")),
            str(answers["before"][index].get("answer", "")) if index < len(answers["before"]) else None,
            str(answer.get("answer", "")),
            is_text=True,
        )
        for index, answer in enumerate(answers["after"])
    ]
