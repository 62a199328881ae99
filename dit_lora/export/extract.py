"""Writes the difference of two checkpoints, such as a fine-tune and its base, as a LoRA."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dit_lora.adapters.attach import find_adaptable_layers, find_tied_layers
from dit_lora.adapters.diffusers_format import DOWNSCALE_KEY, RUN_METADATA_FILE
from dit_lora.adapters.find_lora import get_public_name
from dit_lora.config.experts import EXPERT_NAMES
from dit_lora.config.recipe import ModelConfig
from dit_lora.config.records import RunMetadata, read_typed_json
from dit_lora.data.cache.digests import Digests
from dit_lora.environment.progress_bar import hide_progress_bars
from dit_lora.errors import CheckFailedError, DitLoraError, format_list
from dit_lora.export.base_weights import CheckpointLocation, StoredWeights, find_checkpoint
from dit_lora.export.export import MessageCallback, build_empty_model, write_expert_pair
from dit_lora.export.formats import ExportedAdapter, LoraFormat, write_exported_adapter
from dit_lora.export.low_rank import RankChoice, factor_weight_difference
from dit_lora.export.low_rank_result import LowRankResult, attach_lora_layers, get_rank_metadata, require_valid_rank
from dit_lora.export.weight_delta import collect_weight_updates
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.without_weights import config_only_model
from dit_lora.files import write_folder_atomically
from dit_lora.redact import redact_value
from dit_lora.training.tasks.diffusion.samples import make_progress_bar
from dit_lora.verify.locate import detect_family
from dit_lora.version import __version__


@dataclass(frozen=True)
class ExtractRequest:
    """Request for extracting a LoRA: the two checkpoints, the rank, and what to write."""

    tuned_model: str
    base_model: str
    output_dir: Path
    """The folder to write, which must not exist."""
    rank_choice: RankChoice
    export_format: LoraFormat = "diffusers"
    model: str | None = None
    """A pipeline with the checkpoints' configs, needed if neither of them is a pipeline's folder."""


def extract(request: ExtractRequest, say: MessageCallback = lambda _: None) -> list[LowRankResult]:
    """Write `tuned` minus `base` as a LoRA, read it back and compare it. Returns a report for each transformer.

    Only one tensor of each checkpoint is in memory at a time.

    Raises:
        DitLoraError: The checkpoints do not differ, or a LoRA of this rank cannot hold the difference.
    """
    hide_progress_bars()
    if request.output_dir.exists():
        raise DitLoraError(f"{request.output_dir} already exists; choose another folder, or remove it")
    # Either side may be a pipeline, a transformer's folder, a single file or a Hub id.
    tuned, base = find_checkpoint(request.tuned_model), find_checkpoint(request.base_model)
    model = _choose_pipeline(request, tuned, base)
    family = get_family(model.family)
    with config_only_model(model) as configs:
        # Two full pipelines of an expert family have two transformers to compare, anything else has one.
        opened = family.open(configs)
        if opened.info.expert_names and tuned.is_pipeline and base.is_pipeline:
            parts = tuple(opened.info.expert_names)
        else:
            # A full pipeline has every part, so only the other side decides.
            parts = tuple({side.part for side in (tuned, base) if not side.is_pipeline}) or ("transformer",)
            if len(parts) > 1:
                raise DitLoraError(f"{tuned.source} and {base.source} are of the two experts of a checkpoint")
        results = {}
        for part in parts:
            checkpoint = family.open(configs.model_copy(update={"part": part}))
            extracted = _extract_part(request, tuned, base, checkpoint, family)
            if extracted is not None:
                results[part] = extracted
        if not results:
            both = f"{request.tuned_model} and {request.base_model}"
            raise DitLoraError(f"{both} do not differ: there is nothing to extract")
        _write_adapters(request, {part: exported for part, (exported, _) in results.items()}, say)
    return [result for _, result in results.values()]


def _choose_pipeline(
    request: ExtractRequest, tuned_location: CheckpointLocation, base_location: CheckpointLocation
) -> ModelConfig:
    # Prefer the base's configs: the fine-tune must have the same architecture anyway.
    pipelines = [str(checkpoint.path) for checkpoint in (base_location, tuned_location) if checkpoint.is_pipeline]
    path = request.model or next(iter(pipelines), None)
    if path is None:
        raise DitLoraError(
            f"neither {request.tuned_model} nor {request.base_model} is a pipeline's folder; give --model, a folder "
            "or a Hub id with the configs of one"
        )
    # The family follows from the pipeline class in model_index.json.
    model = ModelConfig(family="", path=path)
    return model.model_copy(update={"family": detect_family(model)})


def _extract_part(
    request: ExtractRequest,
    tuned_location: CheckpointLocation,
    base_location: CheckpointLocation,
    checkpoint: Checkpoint,
    family: DiffusionFamily,
) -> tuple[ExportedAdapter, LowRankResult] | None:
    """One transformer's LoRA on a model without weights, and its report; None if nothing differs."""
    new_model = partial(build_empty_model, checkpoint.denoiser)
    # This model provides names and shapes, and later carries the adapter. It has no weights of its own.
    model = new_model()
    with (
        StoredWeights(tuned_location, checkpoint.denoiser, model) as tuned_weights,
        StoredWeights(base_location, checkpoint.denoiser, model) as base_weights,
    ):
        result = _compute_differences(tuned_weights, base_weights, model, request.rank_choice, checkpoint.info.part)
    # Identical transformers: with two experts, one may be untouched.
    if not result.layers and not result.excluded_energy:
        return None
    if not result.layers:
        summary = f"no layer of {request.tuned_model} that a LoRA could hold differs from {request.base_model}"
        raise DitLoraError(format_list(f"{summary}; these do", list(result.excluded_energy)))
    require_valid_rank(result.layers, request.rank_choice)
    layers = {layer.name: layer.factors for layer in result.layers}
    attach_lora_layers(model, layers, family, f"the difference of {request.tuned_model} and {request.base_model}")
    metadata = _build_metadata(request, tuned_location, base_location, checkpoint, family, result)
    return ExportedAdapter(model, metadata, family, checkpoint.info.pipeline_class, new_model), result


@torch.no_grad()
def _compute_differences(
    tuned_weights: StoredWeights, base_weights: StoredWeights, model: nn.Module, rank_choice: RankChoice, part: str
) -> LowRankResult:
    """Compare two checkpoints tensor by tensor, in fp64, on the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = find_adaptable_layers(model)
    # A weight that two modules share cannot get a LoRA.
    tied = find_tied_layers(model, names)
    adaptable = {f"{name}.weight" for name in names if name not in tied}
    layers, left_out = [], {}
    # Names and shapes must agree on both sides before any tensor is read.
    mismatches = [f"{name}: only in one of them" for name in tuned_weights.shapes.keys() ^ base_weights.shapes.keys()]
    mismatches += [
        f"{name}: {shape} and {base_weights.shapes[name]}"
        for name, shape in tuned_weights.shapes.items()
        if base_weights.shapes.get(name, shape) != shape
    ]
    if mismatches:
        raise DitLoraError(format_list("the two checkpoints have other tensors", sorted(mismatches)))
    for name in make_progress_bar("extracting", "tensor", quiet=False)(sorted(tuned_weights.shapes)):
        # Most tensors are identical in a fine-tune of few layers: skip them before the conversion to fp64.
        new, old = tuned_weights.read_tensor(name), base_weights.read_tensor(name)
        if torch.equal(new, old):
            continue
        difference = new.to(device).double() - old.to(device).double()
        if not torch.isfinite(difference).all():
            raise CheckFailedError(f"{name}: not finite in one of the checkpoints")
        if not difference.any():  # they only differ in dtype, or in the sign of zeros
            continue
        if name in adaptable:
            layers.append(factor_weight_difference(name.removesuffix(".weight"), difference, rank_choice))
        else:
            # Norms, biases and other tensors without a LoRA: report how much of the change they carry.
            left_out[name] = difference.square().sum().item()
    return LowRankResult(layers, left_out, part)


def _build_metadata(
    request: ExtractRequest,
    tuned_location: CheckpointLocation,
    base_location: CheckpointLocation,
    checkpoint: Checkpoint,
    family: DiffusionFamily,
    result: LowRankResult,
) -> dict[str, Any]:
    """Header metadata of an extracted LoRA: from the base, and on videos from the header of the tuned pipeline."""
    # A pipeline that dit-lora merged or trained has our header next to its files.
    record = tuned_location.path / RUN_METADATA_FILE
    recorded = dict(read_typed_json(record, RunMetadata)) if tuned_location.is_pipeline and record.is_file() else {}
    video_keys = ("video", "task", "reference_resolution", DOWNSCALE_KEY)
    metadata = {key: recorded[key] for key in video_keys if key in recorded}
    metadata |= {
        "version": __version__,
        "family": family.name,
        "base_model": get_public_name(request.model or base_location.source),
    }
    if base_location.is_pipeline:
        # These digests are never saved to the file.
        digests = Digests(request.output_dir.with_name(f".{request.output_dir.name}.digests"))
        # The digest lets `verify` recognise the base that the LoRA belongs to.
        metadata["transformer_digest"] = digests.hash_component(base_location.get_component_dir(checkpoint.info.part))
    if checkpoint.info.expert_names:
        metadata["part"] = checkpoint.info.part
    metadata["extracted"] = {
        "from": get_public_name(tuned_location.source),
        "layers": len(result.layers),
        "energy": result.energy_share,
        "of_all": result.total_energy_share,
        "left_out": len(result.excluded_energy),
    }
    return metadata


def _write_adapters(request: ExtractRequest, adapters: Mapping[str, ExportedAdapter], say: MessageCallback) -> None:
    """Write the extracted LoRA of each transformer, in a file or folder per expert if there are two."""
    # Paths and tokens are removed from the header, because it is published with the file.
    for adapter in adapters.values():
        adapter.metadata = redact_value(
            {**adapter.metadata, **get_rank_metadata(adapter.model), "exported": {"to": request.export_format}}
        )

    if len(adapters) == 1:
        (adapter,) = adapters.values()
        with write_folder_atomically(request.output_dir) as staged:
            expert = EXPERT_NAMES.get(adapter.metadata.get("part", ""))
            name = f"{request.output_dir.name}_{expert}" if expert else request.output_dir.name
            write_exported_adapter(request.export_format, adapter, staged, name)
    else:
        # Files are named after the experts, adapters are keyed by component.
        adapters_by_expert = {EXPERT_NAMES[part]: adapter for part, adapter in adapters.items()}

        def write_expert_adapter(expert: str, expert_dir: Path) -> None:
            write_exported_adapter(request.export_format, adapters_by_expert[expert], expert_dir, expert_dir.name)

        write_expert_pair(request.output_dir, write_expert_adapter, adapters_by_expert)
    for adapter in adapters.values():
        say(f"checked {len(collect_weight_updates(adapter.model))} layers: the written file gives the same update")
