"""Collect what of a run is published, and refuse runs that are not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from dit_lora.adapters.diffusers_format import (
    ADAPTER_FILE,
    BASE_FILE,
    PROVENANCE_FILE,
    read_provenance,
    require_sound,
)
from dit_lora.adapters.own_files import INDEX, own_files, require_inside
from dit_lora.adapters.peft_format import CHAT_ADAPTER_FILE
from dit_lora.config.experts import EXPERTS
from dit_lora.config.records import Answer, Facts, Provenance, read_typed, typed
from dit_lora.config.yaml_parsing import read_yaml
from dit_lora.errors import CheckFailedError, DitLoraError, listed
from dit_lora.files import read_inside, require_regular
from dit_lora.hub.cleaning import clean_config, clean_json
from dit_lora.parsing import ParseError
from dit_lora.redact import redacted, redacted_words
from dit_lora.report.run.files import RunFiles, RunReader
from dit_lora.report.run.page import texts_of
from dit_lora.results.experts import pair_file, runs_of
from dit_lora.results.verified_files import require_as_verified
from dit_lora.training.tasks.facts import FACTS_FILE

CARD = "README.md"
SAMPLES = "samples/"
VERIFICATION = "verification.json"
OURS = (ADAPTER_FILE, CHAT_ADAPTER_FILE, "adapter_config.json", BASE_FILE)
"""The files that an adapter may consist of, but for experts'."""


@dataclass(frozen=True)
class CardSample:
    """The model's outputs for one validation prompt, as files of the repository or as answers."""

    prompt: str
    before: str | None = None
    after: str | None = None
    is_text: bool = False


@dataclass(frozen=True)
class Contents:
    """A run as it is published; `files` are paths or bytes by their place in the repository, without the card."""

    run: RunFiles
    facts: Mapping[str, Any]
    made: Mapping[str, Any]
    """The provenance in the result's header."""
    kind: str
    """`lora`, `peft` or `pipeline`."""
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    shown: tuple[CardSample, ...] = ()
    experts: tuple["Contents", ...] = ()
    """Each expert's own, where both were trained: high noise first."""

    @property
    def expert(self) -> str | None:
        """The name of the expert that was trained; None where there is one transformer."""
        return EXPERTS.get(self.made.get("part", ""))

    @property
    def base(self) -> str | None:
        """The Hub id of the base model; None where it was a folder."""
        name = str(self.made.get("base_model") or "")
        return name if "/" in name else None


def collect(run_dir: Path) -> Contents:
    """Return everything that a push of the run uploads but its card; of a run of both experts, what both are.

    Raises `DitLoraError` for a folder without a run or a run without a result, with the command that goes on, and
    `CheckFailedError` for a result that is not sound or did not pass its verification.
    """
    runs = runs_of(run_dir)
    if len(runs) > 1:
        return _joined(run_dir, [collect(run) for run in runs])
    require_regular(run_dir)
    run = RunReader(run_dir).read("finished")
    result, kind = _result(run)
    _require_verified(run)
    main = result / {"lora": ADAPTER_FILE, "peft": CHAT_ADAPTER_FILE}.get(kind, PROVENANCE_FILE)
    if kind == "peft" and not main.is_file():
        main = result / BASE_FILE  # base weights alone have trained
    _require_sound(run_dir, result, kind)
    made = redacted(read_typed(main, Provenance) if kind == "pipeline" else read_provenance(main))
    files = {_placed(name, made, kind): content for name, content in _result_files(result, kind)}
    shown = _shown(run, files)
    facts = _facts(run)
    require_inside(run.folder, [path for path in files.values() if isinstance(path, Path)])
    base = str(made.get("base_model") or "path/to/base")
    datasets = facts["data"]["datasets"]
    files["config.yaml"] = clean_config(run.config, base, datasets).encode()
    if run.verification:
        # Its paths are those in the run's folder; the Hub has digests of its own.
        shown_record = {name: one for name, one in run.verification.items() if name != "files"}
        record = {**shown_record, "adapter": _placed(main.name, made, kind), "base_model": base}
        files[VERIFICATION] = clean_json(record).encode()
    told = ("config", "environment", "events", "quarantine", "status")
    public = replace(run, **{name: redacted(getattr(run, name)) for name in told})
    return Contents(public, facts, made, kind, files, tuple(shown))


def _joined(run_dir: Path, experts: Sequence[Contents]) -> Contents:
    """Return what is published of both experts' runs; samples are the last one's, which are made with both."""
    both = [one for one in experts if BASE_FILE in one.files]
    if both:
        folders = ", ".join(str(one.run.folder) for one in both)
        raise DitLoraError(
            f"{run_dir} is not pushed as one: base weights trained too, and both experts' have one name; "
            f"push the runs "
            f"of each to a repository of its own: {folders}"
        )
    last = experts[-1]
    files = {name: one for name, one in last.files.items() if name.startswith(SAMPLES)}
    for contents in experts:
        own = {name: one for name, one in contents.files.items() if not name.startswith(SAMPLES)}
        files |= {
            f"{contents.expert}/{name}" if name == VERIFICATION else name: one
            for name, one in own.items()
        }
    base, datasets = str(last.made.get("base_model")), last.facts["data"]["datasets"]
    files["config.yaml"] = clean_config(read_yaml(run_dir / "config.yaml"), base, datasets).encode()
    return replace(last, files=files, experts=tuple(experts))


def _result(run: RunFiles) -> tuple[Path, str]:
    folder = run.folder
    if (folder / "model" / "model_index.json").is_file():
        return folder / "model", "pipeline"
    adapter = folder / "adapter"
    if (adapter / ADAPTER_FILE).is_file():
        return adapter, "lora"
    if (adapter / CHAT_ADAPTER_FILE).is_file() or (adapter / BASE_FILE).is_file():
        return adapter, "peft"
    full = run.config.get("train", {}).get("mode") == "full"
    what = "model/model_index.json" if full else f"adapter/{ADAPTER_FILE}"
    raise DitLoraError(
        f"{folder} has no result yet: no {what}; it is at step {run.done:,} of {run.asked or 0:,}. Go on with: "
        f"accelerate launch recipes/lora.py {folder}/config.yaml train.resume=auto"
    )


def _require_verified(run: RunFiles) -> None:
    if (run.folder / VERIFICATION).exists() and run.verification.get("passed") is not True:
        checks = run.verification.get("checks") or {}
        failed = [
            f"{name}: {one.get('words', '')}"
            for name, one in checks.items()
            if not one.get("passed")
        ]
        raise CheckFailedError(
            listed(
                f"{run.folder} is not pushed: its result did not pass its verification ({VERIFICATION}). "
                f"`dit-lora verify {run.folder}` looks at it again; a run that goes on by train.resume=auto writes "
                "and verifies its result anew",
                failed,
            )
        )
    require_as_verified(run.folder, f"{run.folder} is not pushed")


def _require_sound(run_dir: Path, result: Path, kind: str) -> None:
    """Raise `CheckFailedError` for a result that is not sound: files may have changed since they were verified."""
    folder = result
    if kind == "pipeline":
        folder = result / read_typed(result / PROVENANCE_FILE, Provenance).get(
            "part", "transformer"
        )
    try:
        for file in sorted(folder.glob("*.safetensors")):
            tensors = load_file(file)
            adapter = {} if kind == "pipeline" or file.name == BASE_FILE else tensors
            require_sound(adapter, {} if adapter else tensors)
    except (CheckFailedError, OSError, SafetensorError) as error:
        words = str(error).removeprefix("refused to save: ")
        raise CheckFailedError(
            f"{run_dir} is not pushed: {file.relative_to(run_dir)}: {words}"
        ) from error


def _facts(run: RunFiles) -> dict[str, Any]:
    file = run.folder / FACTS_FILE
    try:
        facts = typed(read_inside(run.folder, file), Facts, FACTS_FILE)
        if ("pipeline" in facts) == ("model" in facts):
            raise ParseError(f"{FACTS_FILE} is damaged: it must have `pipeline` or `model`")
        public: dict[str, Any] = redacted(facts)
        return public
    except (OSError, ValueError) as error:
        raise DitLoraError(
            f"{run.folder} is not pushed: {FACTS_FILE}, which the model card is written from, "
            f"cannot be used: {error}. "
            f"Write it anew with: accelerate launch recipes/lora.py {run.folder}/config.yaml train.resume=auto"
        ) from error


def _placed(name: str, made: Mapping[str, Any], kind: str) -> str:
    """Return a file's name in the repository; the adapters of two experts get different names."""
    is_experts = kind == "lora" and name == ADAPTER_FILE and "part" in made
    return pair_file(EXPERTS[made["part"]]) if is_experts else name


def _result_files(result: Path, kind: str) -> Iterator[tuple[str, Path | bytes]]:
    """Yield the result's files by their place in the repository; configs as others may read them."""
    wanted = [*own_files(result), PROVENANCE_FILE] if kind == "pipeline" else OURS
    for name in sorted(wanted):
        path = result / name
        if not path.is_file():
            continue
        is_config = name.endswith(("config.json", INDEX, PROVENANCE_FILE))
        values = read_typed(path, dict[str, Any]) if is_config else {}
        public = {key: one for key, one in values.items() if key != "_name_or_path"}
        yield name, path if redacted(public) == values else clean_json(public).encode()


def _shown(run: RunFiles, files: dict[str, Path | bytes]) -> list[CardSample]:
    """Return what was made of the validation prompts, before and after training, and add sample files to `files`."""
    validation = run.config.get("validation") or {}
    prompts = [redacted_words(one) for one in texts_of(validation)]
    steps = sorted((run.folder / "samples").glob("step_*"))
    if not steps:
        return []
    ends = {"after": steps[-1]} | ({"before": steps[0]} if len(steps) > 1 else {})
    if (steps[-1] / "answers.json").is_file():
        return _answers(run.folder, ends)
    shown = []
    for index, prompt in enumerate(prompts):
        places: dict[str, str] = {}
        for when, folder in ends.items():
            for path in sorted(folder.glob(f"prompt_{index:02d}.*")):
                if not path.is_file():
                    continue
                places[when] = f"{SAMPLES}{when}_{index:02d}{path.suffix}"
                files[places[when]] = path
        if "after" in places:
            shown.append(CardSample(prompt, places.get("before"), places["after"]))
    return shown


def _answers(run_dir: Path, ends: Mapping[str, Path]) -> list[CardSample]:
    said: dict[str, list[dict[str, Any]]] = {"before": []}
    for when, folder in ends.items():
        file = folder / "answers.json"
        require_inside(run_dir, [file])
        said[when] = redacted(read_typed(file, list[Answer])) if file.is_file() else []
    return [
        CardSample(
            str(one.get("prompt", "")),
            str(said["before"][index].get("answer", "")) if index < len(said["before"]) else None,
            str(one.get("answer", "")),
            is_text=True,
        )
        for index, one in enumerate(said["after"])
    ]
