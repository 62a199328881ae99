"""A tiny checkpoint under test with its family, encoded batches of it, and its transformer with an adapter."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import ModularPipeline

from dit_lora.adapters.attach import attach_lora, is_lora_b
from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint, Sampling, TextEncoder
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.references import EditTextEncoder
from dit_lora.training.tasks.diffusion.cache_plan import DecodedSample
from family_cases import CASES
from family_cases.case import Case

CPU = torch.device("cpu")
# Of each variant's first case.
TAKES = {case.variant: case.takes for case in reversed(CASES)}
EVERY = {case.name: case for case in CASES}


class Subject(NamedTuple):
    case: Case
    family: DiffusionFamily
    checkpoint: Checkpoint
    path: Path


def open_subject(case: Case, path: Path) -> Subject:
    family = get_family(case.family)
    opened_checkpoint = family.open(ModelConfig(family=case.family, path=str(path), **case.model))
    opened_checkpoint = opened_checkpoint.copy_with_training_metadata(
        {"reference_resolution": case.reference_resolution}
    )
    return Subject(case, family, opened_checkpoint, path)


def stock_pipeline(subject: Subject) -> Any:
    """The checkpoint in its pipeline, as Diffusers loads it."""
    components = {**dict.fromkeys(subject.case.without), **subject.checkpoint.info.pipeline_components()}
    pipeline_class = subject.checkpoint.info.pipeline_class
    if issubclass(pipeline_class, ModularPipeline):
        pipeline: Any = ModularPipeline.from_pretrained(str(subject.path))
        pipeline.load_components()
        return pipeline
    return pipeline_class.from_pretrained(subject.path, **components)


def changed(tiny: Path, out: Path, file: str, **values: Any) -> Path:
    """A copy of a checkpoint with other values in one of its JSON files."""
    path = Path(shutil.copytree(tiny, out)) / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return out


def pixels_of(shape: VideoShape, generator: torch.Generator) -> torch.Tensor:
    size = (shape.frames, 3, shape.height, shape.width)
    return torch.randint(0, 256, size, generator=generator).to(torch.uint8)


def encoded_text(
    subject: Subject,
    encode: TextEncoder,
    caption: str,
    references: Sequence[torch.Tensor],
    shape: VideoShape,
) -> dict[str, torch.Tensor]:
    """One caption's tensors without the batch, encoded with its references where the model does so."""
    takes = subject.checkpoint.info.reference_spec
    if takes is not None and takes.is_encoded_with_caption:
        assert isinstance(encode, EditTextEncoder)
        embeddings = encode.encode_with_references(caption, references, shape)
    else:
        embeddings = encode([caption])
    return {name: tensor[0] for name, tensor in embeddings.items()}


_ENCODED: dict[tuple[str, Path, VideoShape, int], dict[str, torch.Tensor]] = {}


def encoded_batch(subject: Subject, shape: VideoShape | None = None, size: int = 3) -> dict[str, torch.Tensor]:
    """A batch whose rows differ in pixels and caption. Encoded once; each caller has tensors of its own."""
    shape = shape or subject.case.native
    key = (subject.case.name, subject.path, shape, size)
    if key not in _ENCODED:
        _ENCODED[key] = _encode(subject, shape, size)
    return {name: tensor.clone() for name, tensor in _ENCODED[key].items()}


def _encode(subject: Subject, shape: VideoShape, size: int) -> dict[str, torch.Tensor]:
    checkpoint, generator = subject.checkpoint, torch.Generator().manual_seed(0)
    takes, sizes = checkpoint.info.reference_spec, subject.case.references
    encode_video = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    if takes is not None:
        encoded = tuple(takes.encoded_shape(image_size.height, image_size.width, shape) for image_size in sizes)
        shape = replace(shape, references=encoded)
    rows = []
    for caption in subject.case.captions[:size]:
        sample = DecodedSample(
            pixels_of(shape, generator),
            references=tuple(pixels_of(image_size, generator) for image_size in sizes),
        )
        text = encoded_text(subject, encode_text, caption, sample.references, shape)
        rows.append({**sample.encode_sample(encode_video, shape), **text})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def two_samples(checkpoint: Any, shape: VideoShape) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The samples of a prompt as text and as cached tensors with those of "", and the batch sizes of the calls."""
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    sampling = Sampling(shape, inference_steps=2, guidance_scale=4.5, seed=3)
    full = checkpoint.sampler.pipeline(torch.float32)
    cached = checkpoint.sampler.pipeline(torch.float32, full.transformer, text=False)
    batches: list[int] = []
    for pipeline in (full, cached):
        pipeline.set_progress_bar_config(disable=True)
    full.transformer.register_forward_pre_hook(
        lambda _m, _args, kwargs: batches.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    from_text = checkpoint.sampler.generate(full, checkpoint.sampler.prompt_kwargs("a cat"), sampling)
    seen_batches = list(batches)
    conditions = checkpoint.sampler.prompt_kwargs(encode(["a cat"]), encode([""]))
    return from_text, checkpoint.sampler.generate(cached, conditions, sampling), seen_batches


def adapted(subject: Subject, *, alpha: int = 7, trained: bool = True) -> torch.nn.Module:
    transformer = subject.checkpoint.denoiser.load_transformer(torch.float32)
    attach_lora(
        transformer,
        LoraConfig(rank=4, alpha=alpha),
        subject.checkpoint.info.lora_targets(subject.family.lora_targets),
        seed=0,
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if trained and is_lora_b(name):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return transformer
