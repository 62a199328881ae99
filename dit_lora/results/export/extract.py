"""Writes the difference of two checkpoints, such as a fine-tune and its base, as a LoRA."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dit_lora.adapters.attach import adaptable_layers, tied_layers
from dit_lora.adapters.diffusers_format import DOWNSCALE, PROVENANCE_FILE
from dit_lora.adapters.find_lora import public_name
from dit_lora.config.experts import EXPERTS
from dit_lora.config.recipe import ModelConfig
from dit_lora.config.records import Provenance, read_typed
from dit_lora.data.cache.digests import Digests
from dit_lora.errors import CheckFailedError, DitLoraError, listed
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.without_weights import configs_alone
from dit_lora.redact import redacted
from dit_lora.results.export.export import Say, aside, hollow_of, write_pair
from dit_lora.results.export.formats import Exported, LoraForm, write_form
from dit_lora.results.export.low_rank import RankChoice, factor_difference
from dit_lora.results.export.low_rank_result import (
    LowRankResult,
    attach_layers,
    ranks_of,
    require_size,
)
from dit_lora.results.export.stored_weights import CheckpointPlace, StoredWeights, find_place
from dit_lora.results.export.updates import updates_of
from dit_lora.results.source import family_of
from dit_lora.training.session.session import quiet_libraries
from dit_lora.training.tasks.diffusion.samples import bar
from dit_lora.version import __version__


@dataclass(frozen=True)
class ExtractRequest:
    """The two checkpoints, the rank, and what to write."""

    tuned: str
    base: str
    out: Path
    """The folder to write, which must not exist."""
    choice: RankChoice
    to: LoraForm = "diffusers"
    model: str | None = None
    """A pipeline with the checkpoints' configs, needed if neither of them is a pipeline's folder."""


def extract(request: ExtractRequest, say: Say = lambda _: None) -> list[LowRankResult]:
    """Write `tuned` minus `base` as a LoRA, read it back and compare it. Returns a report for each transformer.

    Only one tensor of each checkpoint is in memory at a time.

    Raises:
        DitLoraError: The checkpoints do not differ, or a LoRA of this rank cannot hold the difference.
    """
    quiet_libraries()
    if request.out.exists():
        raise DitLoraError(f"{request.out} exists already; give another folder, or remove it")
    # Either side may be a pipeline, a transformer's folder, a single file or a Hub id.
    tuned, base = find_place(request.tuned), find_place(request.base)
    model = _model(request, tuned, base)
    family = get_family(model.family)
    with configs_alone(model) as configs:
        # Two full pipelines of an expert family have two transformers to compare, anything else has one.
        opened = family.open(configs)
        are_pipelines = tuned.is_pipeline and base.is_pipeline
        parts = tuple(opened.parts) if opened.parts and are_pipelines else (_one_part(tuned, base),)
        results = {}
        for part in parts:
            checkpoint = family.open(configs.model_copy(update={"part": part}))
            extracted = _extracted(request, tuned, base, checkpoint, family)
            if extracted is not None:
                results[part] = extracted
        if not results:
            raise DitLoraError(
                f"{request.tuned} and {request.base} do not differ: there is nothing to extract"
            )
        _write(request, {part: exported for part, (exported, _) in results.items()}, say)
    return [result for _, result in results.values()]


def _model(request: ExtractRequest, tuned: CheckpointPlace, base: CheckpointPlace) -> ModelConfig:
    """The pipeline with the checkpoints' configs."""
    # Prefer the base's configs: the fine-tune must have the same architecture anyway.
    pipelines = [str(checkpoint.path) for checkpoint in (base, tuned) if checkpoint.is_pipeline]
    path = request.model or next(iter(pipelines), None)
    if path is None:
        raise DitLoraError(
            f"neither {request.tuned} nor {request.base} is a pipeline's folder; give --model, a folder or a Hub id "
            "with the configs of one"
        )
    # The family follows from the pipeline class in model_index.json.
    model = ModelConfig(family="", path=path)
    return model.model_copy(update={"family": family_of(model)})


def _one_part(tuned: CheckpointPlace, base: CheckpointPlace) -> str:
    """The transformer that both checkpoints are of, if at least one is not a full pipeline."""
    # A full pipeline has every part, so only the other side decides.
    parts = {checkpoint.part for checkpoint in (tuned, base) if not checkpoint.is_pipeline} or {
        "transformer"
    }
    if len(parts) > 1:
        raise DitLoraError(f"{tuned.given} and {base.given} are of the two experts of a checkpoint")
    return parts.pop()


def _extracted(
    request: ExtractRequest,
    tuned: CheckpointPlace,
    base: CheckpointPlace,
    checkpoint: Checkpoint,
    family: DiffusionFamily,
) -> tuple[Exported, LowRankResult] | None:
    """One transformer's LoRA on a model without weights, and its report; None if nothing differs."""
    new_model = partial(hollow_of, checkpoint)
    # This model provides names and shapes, and later carries the adapter. It has no weights of its own.
    model = new_model()
    with (
        StoredWeights(tuned, checkpoint, model) as tuned_weights,
        StoredWeights(base, checkpoint, model) as base_weights,
    ):
        result = _differences(tuned_weights, base_weights, model, request.choice, checkpoint.part)
    # Identical transformers: with two experts, one may be untouched.
    if not result.layers and not result.left_out:
        return None
    if not result.layers:
        summary = f"no layer of {request.tuned} that a LoRA could hold differs from {request.base}; these do"
        raise DitLoraError(listed(summary, list(result.left_out)))
    require_size(result.layers, request.choice)
    layers = {layer.name: layer.stored for layer in result.layers}
    attach_layers(model, layers, family, f"the difference of {request.tuned} and {request.base}")
    metadata = _made(request, tuned, base, checkpoint, family, result)
    return Exported(model, metadata, family, checkpoint.pipeline_class, new_model), result


@torch.no_grad()
def _differences(
    ours: StoredWeights, theirs: StoredWeights, model: nn.Module, choice: RankChoice, part: str
) -> LowRankResult:
    """Compare two checkpoints tensor by tensor, in fp64, on the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = adaptable_layers(model)
    # A weight that two modules share cannot get a LoRA.
    adaptable = {f"{name}.weight" for name in names}.difference(
        f"{name}.weight" for name in tied_layers(model, names)
    )
    layers, left_out = [], {}
    # Names and shapes must agree on both sides before any tensor is read.
    mismatches = [
        f"{name}: in one of them alone" for name in ours.shapes.keys() ^ theirs.shapes.keys()
    ]
    mismatches += [
        f"{name}: {shape} and {theirs.shapes[name]}"
        for name, shape in ours.shapes.items()
        if theirs.shapes.get(name, shape) != shape
    ]
    if mismatches:
        raise DitLoraError(listed("the two checkpoints have other tensors", sorted(mismatches)))
    for name in bar("extracting", "tensor", quiet=False)(sorted(ours.shapes)):
        # Most tensors are identical in a fine-tune of few layers: skip them before the conversion to fp64.
        new, old = ours.tensor(name), theirs.tensor(name)
        if torch.equal(new, old):
            continue
        difference = new.to(device).double() - old.to(device).double()
        if not torch.isfinite(difference).all():
            raise CheckFailedError(f"{name}: not finite in one of the checkpoints")
        if not difference.any():  # they only differ in dtype, or in the sign of zeros
            continue
        if name in adaptable:
            layers.append(factor_difference(name.removesuffix(".weight"), difference, choice))
        else:
            # Norms, biases and other tensors without a LoRA: report how much of the change they carry.
            left_out[name] = difference.square().sum().item()
    return LowRankResult(layers, left_out, part)


def _made(
    request: ExtractRequest,
    tuned: CheckpointPlace,
    base: CheckpointPlace,
    checkpoint: Checkpoint,
    family: DiffusionFamily,
    result: LowRankResult,
) -> dict[str, Any]:
    """Metadata: from the base, and on videos from the header of the tuned pipeline."""
    # A pipeline that dit-lora merged or trained has our header next to its files.
    record = tuned.path / PROVENANCE_FILE
    recorded = (
        dict(read_typed(record, Provenance)) if tuned.is_pipeline and record.is_file() else {}
    )
    metadata = {
        key: recorded[key]
        for key in ("video", "task", "reference_resolution", DOWNSCALE)
        if key in recorded
    }
    metadata |= {
        "version": __version__,
        "family": family.name,
        "base_model": public_name(request.model or base.given),
    }
    if base.is_pipeline:
        digests = Digests(request.out.with_name(f".{request.out.name}.digests"))  # never saved
        # The digest lets `verify` recognise the base that the LoRA belongs to.
        metadata["transformer_digest"] = digests.component(base.folder(checkpoint.part))
    if checkpoint.parts:
        metadata["part"] = checkpoint.part
    layers = {layer.name: layer.stored.rank for layer in result.layers}
    metadata["extracted"] = {
        "from": public_name(tuned.given),
        "layers": len(layers),
        "energy": result.energy,
        "of_all": result.of_all,
        "left_out": len(result.left_out),
    }
    return metadata


def _write(request: ExtractRequest, adapters: Mapping[str, Exported], say: Say) -> None:
    """Write the LoRA of each transformer, in a file or folder per expert if there are two."""
    # Paths and tokens are removed from the header, because it is published with the file.
    for adapter in adapters.values():
        adapter.made = redacted(
            {**adapter.made, **ranks_of(adapter.model), "exported": {"to": request.to}}
        )

    def write(adapter: Exported, own: Path) -> None:
        write_form(request.to, adapter, own, own.name)

    if len(adapters) == 1:
        (adapter,) = adapters.values()
        with aside(request.out) as staged:
            expert = EXPERTS.get(adapter.made.get("part", ""))
            name = f"{request.out.name}_{expert}" if expert else request.out.name
            write_form(request.to, adapter, staged, name)
    else:
        # Files are named after the experts, adapters are keyed by component.
        adapters_by_expert = {EXPERTS[part]: adapter for part, adapter in adapters.items()}
        write_pair(
            request.out, lambda name, own: write(adapters_by_expert[name], own), adapters_by_expert
        )
    for adapter in adapters.values():
        say(f"{len(updates_of(adapter.model))} layers, read back and compared: the same update")
