"""Writes an adapter, or a weighted sum of several, in the formats that other programs read."""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.changed_weight import get_weight_changes
from dit_lora.adapters.diffusers_format import DOWNSCALE_KEY, get_base_weights
from dit_lora.config.experts import EXPERT_NAMES
from dit_lora.config.lora import PEFT_ONLY_KINDS
from dit_lora.config.recipe import ModelConfig
from dit_lora.environment.progress_bar import hide_progress_bars
from dit_lora.errors import DitLoraError, format_list
from dit_lora.export.formats import ExportedAdapter, LoraFormat, write_exported_adapter
from dit_lora.export.low_rank import RankChoice
from dit_lora.export.low_rank_result import LowRankResult
from dit_lora.export.lower_rank import lower_rank
from dit_lora.export.merge_chat import merge_adapter
from dit_lora.export.merge_pipeline import find_widest_dtype, require_merged_weights, write_merged_pipeline
from dit_lora.export.meta_model import (
    combine_adapters,
    load_lora_file,
    load_lora_state,
    replace_weights_with_zeros,
)
from dit_lora.export.non_lora import find_non_lora_kind, load_non_lora_adapter
from dit_lora.export.weight_delta import collect_weight_updates, require_same_updates, sum_lora_updates
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint, Denoiser
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.without_weights import build_from_configs, config_only_model
from dit_lora.files import write_folder_atomically
from dit_lora.training.tasks.chat.answerer import find_origin
from dit_lora.training.tasks.diffusion.samples import make_progress_bar
from dit_lora.verify.expert_pair import find_expert_results
from dit_lora.verify.locate import ADAPTER_FILENAMES, TrainedResultLocation, find_result_source, is_chat_result

ExportFormat = LoraFormat | Literal["merged"]
MessageCallback = Callable[[str], None]

# Header keys that describe the base model and the videos. A sum keeps those that all of its adapters share.
MODEL_METADATA_KEYS = (
    *("version", "family", "base_model", "revision", "transformer_digest", "index", "video"),
    *("task", "reference_resolution", DOWNSCALE_KEY),
)
# Header keys that describe one training run. A sum records them for each of its adapters.
_TRAINING_METADATA_KEYS = ("rank", "alpha", "steps", "ema", "seed", "dtype", "quantize")


@dataclass(frozen=True)
class ExportRequest:
    """Request for an export: which adapters, in which format, and where."""

    targets: tuple[Path, ...]
    """Folders of runs or adapters, or adapters' files."""
    export_format: ExportFormat
    output_dir: Path
    """The folder to write, which must not exist."""
    weights: tuple[float, ...] = ()
    """One weight per target. Empty: 1 for all."""
    model: str | None = None
    """The base checkpoint; None for the run's, or the Hub id recorded in the adapter."""
    rank: RankChoice | None = None
    """The new, lower rank of the adapter or of the sum; None to keep it."""


def choose_default_format(target: Path, model: str | None) -> ExportFormat:
    """The format for `target` if none is given: Diffusers', or PEFT's for kinds that Diffusers cannot load.

    A chat model's adapter is in PEFT's format already, so its export is the whole checkpoint. `model` is the base
    checkpoint, or None. Raises `DitLoraError` if there is no adapter.
    """
    if is_chat_result(target, model):
        return "merged"
    source = find_adapter(find_expert_results(target)[0])
    return "peft" if find_non_lora_kind(source.file) in PEFT_ONLY_KINDS else "diffusers"


def export(request: ExportRequest, say: MessageCallback = lambda _: None) -> Path:
    """Write the adapter in the requested format, read it back and compare it. Returns the folder `request.out`.

    The folder gets its name after the comparison; nothing is left after a failure.

    Raises:
        DitLoraError: The adapter cannot be exported like this.
        CheckFailedError: What was read back differs from the adapter.
    """
    export_and_report(request, say)
    return request.output_dir


def export_and_report(request: ExportRequest, say: MessageCallback = lambda _: None) -> list[LowRankResult]:
    """Export an adapter as requested.

    Returns the folder and, if `request.rank` is set, a report for each transformer on what that rank keeps.
    """
    hide_progress_bars()
    if request.rank is not None and request.export_format == "merged":
        raise DitLoraError("--rank does not apply to a merged checkpoint; remove it")
    if request.output_dir.exists():
        raise DitLoraError(f"{request.output_dir} already exists; choose another folder, or remove it")
    # Check the weights before anything is loaded.
    weights = _check_weights(request)
    if is_chat_result(request.targets[0], request.model):
        _export_chat(request, say)
        return []
    # Each target resolves to one result, or to two for a run of both experts.
    experts = [find_expert_results(target) for target in request.targets]
    if any(len(targets) > 1 for targets in experts):
        return _export_expert_pair(request, experts, say)
    sources = [find_adapter(target) for (target,) in experts]
    _require_same_base(sources)
    base = sources[0].resolve_base(request.model)
    with config_only_model(base) as configs, write_folder_atomically(request.output_dir) as staged:
        # Entries of model_index.json that training replaced, such as the pipeline's class.
        index = sources[0].metadata.get("index") or {}
        family = get_family(base.family)
        checkpoint = family.open(configs, index=index)
        adapter = _load_adapters(sources, weights, family, checkpoint)
        results = []
        if request.rank is not None:
            name = " + ".join(str(source.file) for source in sources)
            adapter, result = lower_rank(adapter, request.rank, name, checkpoint.info.part)
            results.append(result)
        # Where ComfyUI ignores a family's alpha, alpha / rank is multiplied into B.
        folding_formats = ("folded",) if adapter.family.comfyui.reads_alpha else ("folded", "comfyui")
        folds = request.export_format in folding_formats
        adapter.metadata = _build_header(adapter.metadata, request.export_format, sources, weights, folds_alpha=folds)
        if request.export_format == "merged":
            _export_merged(adapter, base, index, staged, say)
        else:
            # An adapter of one expert gets the expert's name in its file name, so that loaders can tell the two apart.
            expert = EXPERT_NAMES.get(adapter.metadata.get("part", ""))
            name = f"{request.output_dir.name}_{expert}" if expert else request.output_dir.name
            write_exported_adapter(request.export_format, adapter, staged, name)
        count = len(get_weight_changes(adapter.model, ADAPTER_NAME))
        say(f"checked {count} layers: the written file gives the same update")
    return results


def _export_expert_pair(
    request: ExportRequest, expert_targets: Sequence[tuple[Path, ...]], say: MessageCallback
) -> list[LowRankResult]:
    """Export adapters of both experts of a checkpoint: one file each, or one pipeline with both merged."""
    # Every target must have both experts: a sum pairs them expert by expert.
    single_expert = [str(t) for t, paths in zip(request.targets, expert_targets, strict=True) if len(paths) == 1]
    if single_expert:
        summary = "adapters of both experts can only be added to others of both; these are of one"
        raise DitLoraError(format_list(summary, single_expert))
    # Transpose: from (high, low) per target to all targets' results per expert.
    parts = dict(zip(EXPERT_NAMES.values(), zip(*expert_targets, strict=True), strict=True))
    if request.export_format != "merged":
        results: list[LowRankResult] = []

        def write_expert_adapter(expert: str, expert_dir: Path) -> None:
            expert_request = replace(request, targets=parts[expert], output_dir=expert_dir)
            results.extend(export_and_report(expert_request, say))

        write_expert_pair(request.output_dir, write_expert_adapter)
        return results
    with write_folder_atomically(request.output_dir) as staged:
        model = request.model
        for name, targets in parts.items():
            merged_dir = staged / f"{request.output_dir.name}_{name}"
            export(replace(request, targets=targets, output_dir=merged_dir, model=model), say)
            model = str(merged_dir)  # the second expert is merged into the result of the first
        # The folders sort as ..._high_noise, ..._low_noise. The second holds both merged experts.
        first_folder, second_folder = sorted(staged.iterdir())
        shutil.rmtree(first_folder)
        for path in second_folder.iterdir():
            path.replace(staged / path.name)
        second_folder.rmdir()
    return []


def write_expert_pair(
    output_dir: Path,
    write_expert_adapter: Callable[[str, Path], object],
    experts: Iterable[str] = EXPERT_NAMES.values(),
) -> Path:
    """Call `write_expert_adapter` to fill a folder for each expert.

    A folder with one file is replaced by a file with the expert's name.
    """
    with write_folder_atomically(output_dir) as staged:
        for name in experts:
            folder = staged / f"{output_dir.name}_{name}"
            write_expert_adapter(name, folder)
            files = list(folder.iterdir())
            if len(files) == 1:  # neither a config nor base weights
                files[0].replace(folder.with_suffix(".safetensors"))
                folder.rmdir()
    return output_dir


def find_adapter(target: Path) -> TrainedResultLocation:
    """The diffusion adapter at a path. Raises `DitLoraError` if there is none."""
    if not target.exists():
        raise DitLoraError(f"{target} does not exist; give the folder of a run or an adapter")
    source = find_result_source(target, ADAPTER_FILENAMES)
    if source.is_pipeline:
        raise DitLoraError(
            f"{source.file} is a whole pipeline, so there is nothing to export; load it in Diffusers with "
            "from_pretrained"
        )
    return source


def _check_weights(request: ExportRequest) -> list[float]:
    """One weight for each target. Raises `DitLoraError` for a wrong number of weights, zero, NaN or Inf."""
    # Without --weight, every adapter counts fully.
    targets, weights = len(request.targets), list(request.weights)
    if not weights:
        return [1.0] * targets
    if len(weights) != targets:
        counts = f"{targets} adapters and {len(weights)} weights"
        raise DitLoraError(f"{counts}; give --weight once for each adapter, in order")
    if any(not math.isfinite(weight) or weight == 0 for weight in weights):
        raise DitLoraError(f"--weight must not be 0; got {weights}")
    return weights


def _require_same_base(sources: Sequence[TrainedResultLocation]) -> None:
    """Raise `DitLoraError` unless all adapters are of one family and, if recorded, of the same transformer."""
    # A header may lack either value, so only recorded ones are compared.
    for key, noun in (("family", "families"), ("transformer_digest", "base models")):
        if len({source.metadata[key] for source in sources if source.metadata.get(key)}) > 1:
            lines = [
                f"{source.file}: {source.metadata.get('family')}, trained on {source.metadata.get('base_model')} "
                f"(transformer {str(source.metadata.get('transformer_digest'))[:12]})"
                for source in sources
            ]
            raise DitLoraError(format_list(f"these adapters are of different {noun}", lines))


def _load_adapters(
    sources: Sequence[TrainedResultLocation], weights: Sequence[float], family: DiffusionFamily, checkpoint: Checkpoint
) -> ExportedAdapter:
    """Load adapters on models without weights. Several, or a weighted one, are replaced by their weighted sum."""
    new_model, pipeline_class = partial(build_empty_model, checkpoint.denoiser), checkpoint.info.pipeline_class
    models = []
    # Only LoRAs can be combined: concatenating their factors adds their products.
    not_lora = [f"{source.file}: {kind}" for source in sources if (kind := find_non_lora_kind(source.file))]
    if not_lora and (len(sources) > 1 or weights[0] != 1):
        raise DitLoraError(format_list("only LoRAs can be weighted and added up; these are not LoRAs", not_lora))
    for source in sources:
        models.append(new_model())
        if not_lora:
            load_non_lora_adapter(models[-1], source.file)
        else:
            load_lora_file(models[-1], source.file, pipeline_class, family.comfyui)
    # A single adapter at weight 1 stays as it is, with its metadata.
    if len(sources) == 1 and weights[0] == 1:
        return ExportedAdapter(models[0], sources[0].metadata, family, pipeline_class, new_model)
    # Base weights that were trained too cannot be added: they replace those of the base.
    counts = [(source.file, len(get_base_weights(model))) for source, model in zip(sources, models, strict=True)]
    with_weights = [f"{file}: {count} base weights" for file, count in counts if count]
    if with_weights:
        summary = "adapters with base weights that trained too cannot be weighted or added"
        raise DitLoraError(format_list(summary, with_weights))
    # The combined adapter gets alpha = rank, because each weight and scale is folded into the factors.
    state, config = combine_adapters(models, weights, new_model())
    total = new_model()
    load_lora_state(total, state, config.to_dict(), "the sum of the adapters")
    parts = [collect_weight_updates(m, weight=w) for m, w in zip(models, weights, strict=True)]
    # Ranks are concatenated, so the factors differ: compare the products B A.
    require_same_updates(sum_lora_updates(parts), collect_weight_updates(total), "the sum of the adapters")
    return ExportedAdapter(total, _collect_shared_metadata(sources, config.r), family, pipeline_class, new_model)


def build_empty_model(denoiser: Denoiser) -> Any:
    """Build a model of this checkpoint without weights; its configs are enough."""
    # Sums and scales need no base weights, only the names and shapes of the architecture.
    with torch.device("meta"), build_from_configs():
        model = denoiser.load_transformer(torch.float32)
    return replace_weights_with_zeros(model)


def _collect_shared_metadata(sources: Sequence[TrainedResultLocation], rank: int) -> dict[str, Any]:
    """Header metadata about the model and its videos that is equal in all adapters to merge.

    Entries about their training are left out.
    """
    # A key stays only if every adapter has the same value for it.
    first_metadata, *other_metadata = (source.metadata for source in sources)
    shared = {
        key: first_metadata[key]
        for key in MODEL_METADATA_KEYS
        if key in first_metadata and all(metadata.get(key) == first_metadata[key] for metadata in other_metadata)
    }
    return {**shared, "rank": rank, "alpha": rank}


def _build_header(
    metadata: Mapping[str, Any],
    export_format: ExportFormat,
    sources: Sequence[TrainedResultLocation],
    weights: Sequence[float],
    *,
    folds_alpha: bool,
) -> dict[str, Any]:
    """Header metadata of an exported adapter.

    It is that of the adapter, a record of this export, and what `verify` compares.

    `folds_alpha` is True if the format has alpha / rank folded into B.
    """
    record: dict[str, Any] = {"to": export_format}
    header = dict(metadata)
    if len(sources) > 1 or weights[0] != 1:
        record["combination"] = "cat"
        record["adapters"] = [
            {"weight": weight, **{key: source.metadata.get(key) for key in _TRAINING_METADATA_KEYS}}
            for source, weight in zip(sources, weights, strict=True)
        ]
    # The file now scales by 1, so the header's alpha must equal the rank. The trained alpha stays in the record.
    if folds_alpha and {"rank", "alpha"} <= metadata.keys():
        record["alpha"], header["alpha"] = metadata["alpha"], metadata["rank"]
    if export_format == "merged" and "output" in metadata:
        # A merged file no longer contains the base to compare with.
        header["output"] = {k: v for k, v in metadata["output"].items() if k not in ("base", "louder")}
    return {**header, "exported": record}


def _export_merged(
    adapter: ExportedAdapter, model: ModelConfig, index: Mapping[str, Any], staging_dir: Path, say: MessageCallback
) -> None:
    # Open the checkpoint again, this time with its weights: until here only its configs were needed.
    checkpoint = adapter.family.open(model, index=index)
    base, source = checkpoint.path, checkpoint.path / checkpoint.info.part
    changes = get_weight_changes(adapter.model, ADAPTER_NAME)
    weights = get_base_weights(adapter.model)
    dtype = find_widest_dtype(source)
    say(f"merging {len(changes)} layers into {base.name}, {str(dtype).removeprefix('torch.')}")
    write_merged_pipeline(
        base,
        staging_dir,
        changes,
        weights,
        transformer_config_changes=checkpoint.info.transformer_config_changes(),
        model_index_changes=checkpoint.info.model_index_changes(),
        training_metadata=adapter.metadata,
        part=checkpoint.info.part,
        progress=make_progress_bar("merging", "tensor", quiet=False),
    )
    # Compare the files, not the tensors in memory: the folder only gets its name after this.
    say("reading it back")
    merged = model.model_copy(update={"path": str(staging_dir), "revision": None})
    require_merged_weights(source, adapter.family.open(merged).denoiser.load_transformer(dtype), changes, weights)


def _export_chat(request: ExportRequest, say: MessageCallback) -> Path:
    """Merge a chat model's adapter into its checkpoint, the only export that chat models have."""
    target = request.targets[0]
    if request.rank is not None:
        raise DitLoraError(f"{target} is of a chat model; --rank takes adapters of diffusion models")
    if len(request.targets) > 1 or request.weights:
        raise DitLoraError("several adapters, and --weight, are for diffusion models; give one adapter")
    if request.export_format == "peft":
        raise DitLoraError(f"{target} is an adapter of a chat model, which is already in PEFT's format")
    if request.export_format != "merged":
        raise DitLoraError(
            f"--to {request.export_format} is for diffusion models; a chat model's adapter is in PEFT's format, and "
            "--to merged writes the whole checkpoint"
        )
    # PEFT's format is a folder: config and weights are separate files.
    target = target.parent if target.is_file() else target
    origin = find_origin(target, request.model)
    if origin.adapter is None:
        raise DitLoraError(f"{target} is neither an adapter nor a run with one, so there is nothing to merge")
    base = get_family(origin.model.family).open(origin.model)
    return merge_adapter(origin.adapter, base.path, request.output_dir, model_class=base.model_class, on_progress=say)
