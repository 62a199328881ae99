"""Converts VideoChat2's released .pth files and a language model's folder to one checkpoint folder.

    convert_videochat2(
        Path("videochat2-mistral"),
        llm=Path("Mistral-7B-Instruct-v0.2"),
        vision=Path("umt_l16_qformer.pth"),
        stages=[Path("videochat2_mistral_7b_stage2.pth"), Path("videochat2_mistral_7b_stage3.pth")],
        qformer_tokenizer=Path("bert-base-uncased"),
    )

Values are those of video_chat2/configs/config_mistral.json and its siblings, which only differ in the language model.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError, format_list
from dit_lora.files import write_folder_atomically, write_json
from dit_lora.models.videochat2.configuration import VideoChat2Config
from dit_lora.models.videochat2.gather import TensorOnDisk, TensorSources, check_tensor_sources, collect_tensor_sources
from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration
from dit_lora.models.videochat2.released import (
    MODEL_TYPES,
    PROMPT_FORMATS,
    ReleasedWeightsFile,
    find_language_model,
    is_instruction_tuned,
    read_released_weights,
)
from dit_lora.models.videochat2.tokenizer import load_tokenizer

# Names of tensors, folders and files in the converted checkpoint.
EXTRA_QUERIES = "model.extra_query_tokens"
QFORMER_TOKENIZER = "qformer_tokenizer"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_FOLDER = "adapter"
"""Folder name of a LoRA that is kept separate."""
LORA_ALPHA = 32.0  # from config_7b_stage3.py; the released files do not record it
QUERY_STD = 0.02  # BERT's initializer_range, with which init_Qformer draws the other queries
SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True)
class ConversionReport:
    """Report of a checkpoint conversion: what happened to every tensor."""

    path: Path
    tensors: Mapping[str, int]
    """File to the number of our tensors that came from it."""
    unused: Mapping[str, tuple[str, ...]]
    """Reasons to the names of released tensors that are not needed."""
    lora_report: str
    """Text on what was done with the LoRA; empty if there is none."""
    initialized: tuple[str, ...]
    """Names of our tensors that no file has and that were initialized randomly."""
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Lines of text that report what a conversion did with every tensor."""
        return [
            f"{self.path}: {sum(self.tensors.values())} tensors",
            *(f"  {count} of {file}" for file, count in self.tensors.items()),
            *([f"  {self.lora_report}"] if self.lora_report else []),
            *(f"  drawn, as no file has it: {name}, N(0, {QUERY_STD})" for name in self.initialized),
            *(f"  not needed, {len(names)}: {reason}" for reason, names in self.unused.items()),
            *(f"  {note}" for note in self.notes),
        ]


def convert_videochat2(
    output_folder: Path,
    *,
    llm: Path,
    vision: Path | None,
    stages: Sequence[Path],
    qformer_tokenizer: Path,
    legacy: bool | None = None,
    keep_adapter: bool = False,
    lora_alpha: float = LORA_ALPHA,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str], None] | None = None,
) -> ConversionReport:
    """Write `output_folder` with every tensor of the files converted or accounted for.

    Dtypes are those of the files. At most one shard is in memory. After an error or interruption, `output_folder` does
    not exist.

    Args:
        output_folder: A folder that must not exist.
        llm: The language model's folder.
        vision: Stage 1's umt_l16_qformer.pth.
        stages: Files of later stages, which override earlier ones in this order.
        qformer_tokenizer: Folder of the Q-Former's tokenizer.
        legacy: Keep the released arithmetic (`VideoChat2Config.legacy`). None: if a file of stage 3 or later is given.
        keep_adapter: Write the LoRA of stage 3 or later to `out/adapter` in PEFT's format. False: merge it into the
            language model in fp32, rounded once to the dtype of its weights.
        lora_alpha: Alpha of that LoRA.
        config: Replaces values of VideoChat2Config, for other sizes.
        seed: Seed for tensors that no file has.
        shard_bytes: Maximum size of a shard.
        progress: Called with a line of text after each shard.

    Raises:
        DitLoraError: Lists every tensor that is unknown, missing, of another shape or not finite.
    """
    _check_paths(output_folder, llm, vision, stages, qformer_tokenizer)
    # Zip files are memory-mapped, so values are read only when a shard is written.
    released = [read_released_weights(path) for path in stages]
    files = [read_released_weights(vision), *released] if vision else released
    # Fail early: all configs and tokenizers are checked before tensors are collected.
    tokenizer, bert_tokenizer = _load_tokenizers(llm, qformer_tokenizer)
    kind = _require_language_model(released)
    text_config, notes = _read_text_config(llm, kind, tokenizer)
    if legacy is None:
        legacy = any(is_instruction_tuned(file.tensors) for file in released)
    values = {"prompt_format": PROMPT_FORMATS[kind], "legacy": legacy, "text_config": text_config, **(config or {})}
    # Overrides that set other keys of qformer_config leave the vocabulary size as it is.
    values["qformer_config"] = {"vocab_size": len(bert_tokenizer), **values.get("qformer_config", {})}
    ours = VideoChat2Config(**values)
    # The model only tells which tensors are expected, and their shapes.
    with torch.device("meta"):
        model = VideoChat2ForConditionalGeneration(ours)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if ours.tie_word_embeddings:
        # A tied head is the embedding, and is not stored.
        del expected["lm_head.weight"]
    # Released files have blocks of the vision encoder that the model does not build.
    blocks = len(model.model.vision_encoder.encoder.blocks)
    # Stage 1 comes first, so that later stages override it.
    sources = collect_tensor_sources(llm, files, blocks=blocks, use_text=ours.qformer_config["use_text"])
    fresh = _initialize_extra_queries(sources, expected, seed)
    check_tensor_sources(sources, expected)
    # After the check, every LoRA matrix fits its weight.
    adapter = _LanguageModelLora(sources, lora_alpha)
    with write_folder_atomically(output_folder) as folder:
        if keep_adapter:
            adapter.save(folder / ADAPTER_FOLDER)
        else:
            adapter.merge()
        _write_shards(folder, sources, list(expected), shard_bytes, progress)
        ours.architectures = [type(model).__name__]
        ours.save_pretrained(folder)
        _write_tokenizers(folder, llm, tokenizer, bert_tokenizer)
    notes = (*notes, f"legacy: {ours.legacy}; prompt format: {ours.prompt_format}")
    counts = Counter(sources.weights[name].file.name for name in expected)
    unused = {reason: tuple(names) for reason, names in sources.unused.items()}
    return ConversionReport(output_folder, counts, unused, adapter.report, fresh, notes)


def _check_paths(
    output_folder: Path, llm: Path, vision: Path | None, stages: Sequence[Path], qformer_tokenizer: Path
) -> None:
    # Collect all problems, so that one run shows them together.
    problems = [f"{output_folder} already exists; choose another folder"] if output_folder.exists() else []
    problems += [
        f"{folder} is not a folder with a {content}"
        for folder, content in ((llm, "language model"), (qformer_tokenizer, "tokenizer"))
        if not folder.is_dir()
    ]
    problems += [f"no file {path}" for path in [*([vision] if vision else []), *stages] if not path.is_file()]
    if not stages:
        problems.append("give a file of stage 2 or later, which has the projection to the language model")
    if problems:
        raise DitLoraError(format_list("cannot convert VideoChat2:", problems))


def _load_tokenizers(llm: Path, qformer_tokenizer: Path) -> tuple[Any, Any]:
    """Load the language model's tokenizer, with the original's padding, and the Q-Former's with [DEC] (blip2.py)."""
    try:
        tokenizer = load_tokenizer(llm)
        bert_tokenizer = load_pretrained(AutoTokenizer, qformer_tokenizer, truncation_side="left")
    except (ValueError, OSError) as error:
        raise DitLoraError(f"cannot load a tokenizer of {llm} or {qformer_tokenizer}: {error}") from error
    # Llama and Mistral have no padding token.
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if bert_tokenizer.bos_token != "[DEC]":
        bert_tokenizer.add_special_tokens({"bos_token": "[DEC]"})
    return tokenizer, bert_tokenizer


def _require_language_model(files: Sequence[ReleasedWeightsFile]) -> str:
    """Kind of the language model that all files belong to: `mistral`, `llama` or `phi`.

    Raises `DitLoraError` if they differ.
    """
    by_file = {file.path: find_language_model(file.tensors) for file in files}
    # Files without a language model do not count.
    kinds = {kind for kind in by_file.values() if kind}
    if len(kinds) == 1:
        return kinds.pop()
    message = f"the files must be of one language model ({', '.join(f'{k}_proj' for k in PROMPT_FORMATS)}):"
    raise DitLoraError(format_list(message, [f"{path}: {kind or 'of none'}" for path, kind in by_file.items()]))


def _read_text_config(llm: Path, kind: str, tokenizer: Any) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """The language model's config, with BOS taken from its tokenizer (old LLaMA folders disagree), and notes."""
    try:
        text_config = load_pretrained(AutoConfig, llm)
    except (ValueError, OSError) as error:
        raise DitLoraError(f"cannot read the language model's config in {llm}: {error}") from error
    if text_config.model_type != MODEL_TYPES[kind]:
        raise DitLoraError(
            f"the released files are of a {MODEL_TYPES[kind]} language model ({kind}_proj); {llm} is a "
            f"{text_config.model_type}"
        )
    # The name would record the path of the folder.
    text_config.name_or_path = ""
    stated, actual = text_config.bos_token_id, tokenizer.bos_token_id
    text_config.bos_token_id = actual
    return text_config, () if stated == actual else (f"bos_token_id {stated} -> {actual}, the tokenizer's",)


def _initialize_extra_queries(
    sources: TensorSources, expected: Mapping[str, tuple[int, ...]], seed: int
) -> tuple[str, ...]:
    """Initialize the `extra_query_tokens` if no file has them. Returns the names of the initialized tensors."""
    if EXTRA_QUERIES in sources.weights:
        return ()
    # A separate generator, so that the values depend only on the seed.
    queries = QUERY_STD * torch.randn(expected[EXTRA_QUERIES], generator=torch.Generator().manual_seed(seed))
    sources.weights[EXTRA_QUERIES] = TensorOnDisk(Path("(drawn)"), tuple(queries.shape), lambda: queries)
    return (EXTRA_QUERIES,)


class _LanguageModelLora:
    """The LoRA of the language model found in the released files, at scale alpha / rank."""

    def __init__(self, sources: TensorSources, alpha: float) -> None:
        self.sources, self.alpha, self.report = sources, alpha, ""
        ranks = {lora["A"].shape[0] for lora in sources.lora.values()}
        if len(ranks) > 1:
            raise DitLoraError(f"the LoRA's layers are of one rank in every release; got {sorted(ranks)}")
        # 0 without LoRA, and then no scale is computed.
        self.rank = ranks.pop() if ranks else 0
        self.update_square_sum = self.rounding_square_sum = 0.0

    def merge(self) -> None:
        """Merge a LoRA into the language model: W + alpha / rank * B A.

        The sum is computed in fp32 and rounded once, when the tensor is read.
        """
        for module in self.sources.lora:
            name = f"{module}.weight"
            # Merging is delayed until the shard with this tensor is written.
            base = self.sources.weights[name]
            self.sources.weights[name] = TensorOnDisk(base.file, base.shape, partial(self._merge_weight, module, base))

    def _merge_weight(self, module: str, base: TensorOnDisk) -> torch.Tensor:
        """Merge one layer's LoRA into its weight and return it.

        Also updates the report with the rounding error so far.
        """
        lora, weight = self.sources.lora[module], base.read()
        update = self.alpha / self.rank * (lora["B"].read().float() @ lora["A"].read().float())
        exact = weight.float() + update
        merged = exact.to(weight.dtype)
        # Sums of squares over all layers, in fp64, for the relative error of the rounding.
        self.update_square_sum += float(update.square().sum(dtype=torch.float64))
        self.rounding_square_sum += float((merged.float() - exact).square().sum(dtype=torch.float64))
        relative_error = (self.rounding_square_sum / self.update_square_sum) ** 0.5 if self.update_square_sum else 0.0
        self.report = (
            f"LoRA of {len(self.sources.lora)} layers merged at scale {self.alpha / self.rank:g} "
            f"(alpha {self.alpha:g}, rank {self.rank}); "
            f"rounding to {str(merged.dtype).removeprefix('torch.')} is off by {relative_error:.2%} of the update"
        )
        return merged

    def save(self, folder: Path) -> None:
        """Write a converted LoRA in PEFT's format: adapter_config.json and adapter_model.safetensors."""
        if not self.sources.lora:
            raise DitLoraError("keep_adapter needs a file of stage 3 or later, which has a LoRA; these have none")
        tensors = {}
        for module, lora in self.sources.lora.items():
            # PEFT's names, as save_pretrained writes them.
            tensors[f"base_model.model.{module}.lora_A.weight"] = lora["A"].read().contiguous()
            tensors[f"base_model.model.{module}.lora_B.weight"] = lora["B"].read().contiguous()
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            target_modules=sorted(self.sources.lora),
            task_type="CAUSAL_LM",
            inference_mode=True,
        ).save_pretrained(str(folder))
        self.report = (
            f"LoRA of {len(self.sources.lora)} layers kept in {ADAPTER_FOLDER}/ "
            f"(alpha {self.alpha:g}, rank {self.rank})"
        )


def _write_tokenizers(folder: Path, llm: Path, tokenizer: Any, qformer_tokenizer: Any) -> None:
    """Write both tokenizers and the language model's generation config."""
    tokenizer.save_pretrained(folder)
    qformer_tokenizer.save_pretrained(folder / QFORMER_TOKENIZER)
    if (llm / GENERATION_CONFIG).is_file():
        shutil.copyfile(llm / GENERATION_CONFIG, folder / GENERATION_CONFIG)


def _write_shards(
    folder: Path,
    sources: TensorSources,
    names: Sequence[str],
    shard_bytes: int,
    progress: Callable[[str], None] | None,
) -> None:
    """Write the tensors in shards as Transformers does. Raises `DitLoraError` after the last if any is not finite."""
    # Names of the tensors in each shard.
    shards: list[list[str]] = []
    written = size = 0
    bad: list[str] = []
    for tensors in _iter_shards(sources, names, shard_bytes):
        bad += [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        save_file(tensors, folder / _shard_name(len(shards)), metadata={"format": "pt"})
        shards.append(list(tensors))
        written += len(tensors)
        size += sum(tensor.nbytes for tensor in tensors.values())
        # Otherwise the next shard would be read while this one is still in memory.
        del tensors
        if progress is not None:
            progress(f"{written} of {len(names)} tensors, {size / 2**30:.2f} GiB")
    if bad:
        offenders = [f"{sources.weights[name].file.name}: {name}" for name in bad]
        raise DitLoraError(format_list("these tensors are not finite:", offenders))
    # A single file needs no index.
    if len(shards) == 1:
        (folder / _shard_name(0)).rename(folder / "model.safetensors")
        return
    # The final names contain the number of shards, which is known only now.
    weight_map = {}
    for number, shard in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / _shard_name(number)).rename(folder / final)
        weight_map.update(dict.fromkeys(shard, final))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def _shard_name(number: int) -> str:
    """Temporary file name of a shard; the final name contains the number of shards, which is not known yet."""
    return f"shard-{number}.safetensors"


def _iter_shards(sources: TensorSources, names: Sequence[str], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield tensors in groups of up to `shard_bytes`, or a single larger one.

    Each group is read when requested.
    """
    tensors: dict[str, torch.Tensor] = {}
    size = 0
    for name in names:
        tensor = sources.weights[name].read().contiguous()
        # The tensor would exceed the limit: it starts the next shard.
        if tensors and size + tensor.nbytes > shard_bytes:
            yield tensors
            tensors, size = {}, 0
        tensors[name] = tensor
        size += tensor.nbytes
    yield tensors
