"""The parsers: each with a sound sample, and the reader of the library."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from dit_lora.adapters.diffusers_format import RUN_METADATA_KEY, read_run_metadata
from dit_lora.adapters.lora_file import read_lora
from dit_lora.adapters.patterns import read_peft_config
from dit_lora.config.data import DataConfig
from dit_lora.config.load import load_recipe
from dit_lora.config.records import RunFacts, read_typed_json
from dit_lora.data.cache.cache import TensorCache, encode_entry, make_entry_key
from dit_lora.data.cache.maintenance import verify_cache
from dit_lora.data.chat.annotations import read_conversations
from dit_lora.data.loading.quarantine import Quarantine, QuarantineRecord
from dit_lora.data.sources.scan import scan_sources
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.guard.repro_bundle import read_replay_bundle, write_replay_bundle
from dit_lora.report.guard_page import write_guard_report
from dit_lora.report.run.page import write_report
from dit_lora.training.checkpoints.files import (
    SavedState,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Parser:
    """A sound sample and its reader."""

    write: Callable[[Path], None]
    """Write a sound sample into an empty folder."""
    read: Callable[[Path], object]
    """Read it; the result is false if the reader noted damage and went on, as for a torn line or a bad sample."""
    cut_is_certain: bool = True
    """True if a file that is cut short cannot be sound."""
    required: tuple[str, ...] = ()
    """Keys of the sample's JSON whose value cannot be null."""


def _picture(size: int = 8) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (size, size), (200, 30, 30)).save(stream, "PNG")
    return stream.getvalue()


def _write_media(folder: Path) -> None:
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(_picture())


def _write_jsonl(folder: Path) -> None:
    _write_media(folder)
    rows = [{"file_name": name, "text": f"a disc, {name}"} for name in ("a.png", "b.png")]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_csv(folder: Path) -> None:
    _write_media(folder)
    (folder / "metadata.csv").write_text('file_name,text\na.png,"a disc, red"\nb.png,a square\n')


def _write_captions(folder: Path) -> None:
    _write_media(folder)
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(f"a disc, {name}, naïve\n", encoding="utf-8")


def _write_tar(folder: Path) -> None:
    with tarfile.open(folder / "0.tar", "w") as tar:
        for name, data in (("a.png", _picture()), ("a.txt", b"a disc"), ("b.png", _picture())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        data = json.dumps({"caption": "a square"}).encode()
        member = tarfile.TarInfo("b.json")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


def _write_dataset(folder: Path) -> None:
    import datasets

    rows = {"image": [{"bytes": _picture(), "path": None}] * 2, "text": ["a disc", "a square"]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder / "saved")


def _write_conversations(folder: Path) -> None:
    _write_media(folder)
    turns = [{"from": "human", "value": "<image>\nA disc?"}, {"from": "gpt", "value": "Yes."}]
    role = [{"role": "user", "content": "A disc?"}, {"role": "assistant", "content": "Yes."}]
    records = [{"image": "a.png", "conversations": turns}, {"messages": role}]
    (folder / "told.json").write_text(json.dumps(records))


def _write_recipe(folder: Path) -> None:
    shutil.copy(_ROOT / "recipes" / "smoke" / "cogvideox.yaml", folder / "recipe.yaml")
    (folder / "overrides").write_text("train.steps=3\nlora.rank=4\noptim.groups.adapter.lr=1e-4\n")


def _write_cache(folder: Path) -> None:
    facts = {"media": "abc", "frames": 9}
    cache = TensorCache(folder / "videos")
    entry = {"mean": torch.randn(4, 3), "logvar": torch.zeros(2).bfloat16()}
    cache.write_entries([encode_entry(make_entry_key(facts), entry, sample="a.mp4", facts=facts)])


def _write_checkpoint(folder: Path) -> None:
    state = SavedState({"w": torch.ones(2, 2)}, {"w/exp_avg": torch.zeros(2, 2)})
    save_checkpoint(folder, 3, state, {"lora.rank": 4}, keep=1)


_EVENT = {
    "step": 3,
    "kind": "loss",
    "verdict": {"cause": "sample", "words": "NaN in a.png", "module": None, "op": "sum"},
    "sample_ids": ["a.png"],
    "action": "skip",
}


def _write_bundle(folder: Path) -> None:
    facts = {
        "event": _EVENT,
        "recipe": {},
        "replay": {"step": 3, "micro_step": 0, "rank": 0, "ids": ["a"], "draws": [1], "faults": {}},
        "packages": {"torch": "2.13"},
        "switched_off": [],
        "start_peak": 1.0,
        "dtype": "float32",
        "transformer_digest": "00",
    }
    tensors = {"x": torch.ones(2)}
    write_replay_bundle(folder, facts, tensors, tensors, limit_mib=1)


def _write_run(folder: Path) -> None:
    config = {"model": {"family": "cogvideox", "path": "a/b"}, "train": {"steps": 4}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    line = {"loss": 1.5, "grad_norm": 0.5, "seconds": 0.1, "lr_groups": {"adapter": 1e-3}}
    modules = {"blocks.0": {"rms": 1.0, "grad": 0.5}}
    lines = [{"step": step, **line, "modules": modules} for step in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    (folder / "eval_loss.jsonl").write_text('{"step": 0, "eval_loss": 2.0}\n')
    (folder / "events.jsonl").write_text(json.dumps(_EVENT) + "\n")
    (folder / "quarantine.jsonl").write_text('{"sample_id": "a", "reason": "nan", "step": 3, "run": "r"}\n')
    for name, value in _RECORDS.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    answers = folder / "samples" / "step_000000" / "answers.json"
    answers.parent.mkdir(parents=True)
    answers.write_text(json.dumps([{"prompt": "A disc?", "answer": "Yes.", "media": "a.png"}]))
    (answers.parent / "prompt_00.png").write_bytes(_picture())


_RECORDS: Mapping[str, Any] = {
    "status": {"state": "finished", "recipe": "a.yaml"},
    "environment": {"device": "cpu", "packages": {"torch": "2"}},
    "data": {"samples": 2, "rejected": {"a": "torn"}, "rejected_count": 1, "buckets": None},
    "audit": {"totals": {"samples": 2}, "codes": {"short": 1}, "samples": []},
    "verification": {"passed": True, "checks": {"keys": {"passed": True, "words": "ok"}}},
    "phases": {
        "stages": {"before": 1.0},
        "phases": [{"name": "loading", "stage": "before", "seconds": 0.5, "count": 1}],
    },
    "facts": {
        "data": {
            **{"kind": "images", "datasets": [], "caption_prefix": "a disc", "left_out": 0},
            **{"clips": 2, "samples": 2, "seconds": None},
        },
        "pipeline": {
            **{"class": "CogVideoXPipeline", "module": "diffusers", "loads_lora": True},
            **{"condition": "prompt", "label": None, "labels_as_tensor": False},
            **{"from_image": False, "arguments": {"guidance_scale": 6.0}, "output": "frames"},
            **{"seed": 0, "fps": 8, "dtype": "torch.bfloat16", "in_fp32": []},
        },
    },
}


def _write_facts(folder: Path) -> None:
    (folder / "facts.json").write_text(json.dumps(_RECORDS["facts"]))


def _write_guard(folder: Path) -> None:
    start = {
        **{"id": "00", "started": "2026", "script": "a.py", "loop": "plain PyTorch"},
        **{"device": "cpu", "versions": {"torch": "2"}, "taken": 3, "lost": 1},
        **{"switched_off": [], "ended": True, "ranks": 1},
    }
    (folder / "guard.json").write_text(json.dumps({"format": 1, "starts": [start]}))
    (folder / "events.jsonl").write_text(json.dumps({**_EVENT, "guard": "00"}) + "\n")
    line = {"guard": "00", "step": 1, "modules": {"blocks.0": {"rms": 1.0}}}
    (folder / "statistics.jsonl").write_text(json.dumps(line) + "\n")


def _write_quarantine(folder: Path) -> None:
    records = [QuarantineRecord(name, 0, None, 3, "nan", "it has NaN") for name in ("a.png", "b.png")]
    quarantine = Quarantine(folder / "quarantine.jsonl")
    quarantine.add(records)
    quarantine.save()


def _tiny_transformer() -> Any:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=8,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
    )


def _write_lora(folder: Path) -> None:
    name = "transformer.transformer_blocks.0.attn1.to_q"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(2, 16),
        f"{name}.lora_B.weight": torch.ones(16, 2),
    }
    config = {
        "transformer.r": 2,
        "transformer.lora_alpha": 2,
        "transformer.target_modules": ["to_q"],
    }
    metadata = {"family": "cogvideox", "rank": 2, "alpha": 2, "index": {}, "video": {"fps": 8}}
    header = {RUN_METADATA_KEY: json.dumps(metadata), "lora_adapter_metadata": json.dumps(config)}
    save_file(tensors, folder / "pytorch_lora_weights.safetensors", metadata=header)


def _write_peft(folder: Path) -> None:
    config = {
        **{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["to_q"]},
        **{"rank_pattern": {"to_q": 4}, "alpha_pattern": {}, "use_rslora": False},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _write_tokenizer(folder: Path) -> None:
    from dit_lora.families.tiny.chat_text import build_byte_tokenizer

    build_byte_tokenizer(("<|im_start|>", "<|im_end|>"), "<|im_end|>").save_pretrained(folder)


def _write_config(folder: Path) -> None:
    config = {
        **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 16},
        **{"intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6},
        **{"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "dtype": "bfloat16"},
    }
    (folder / "config.json").write_text(json.dumps(config))


def _scan(folder: Path) -> bool:
    result = scan_sources(DataConfig(path=str(folder), height=32, width=32), folder.with_name("tars"))
    return not result.problems


def _scan_dataset(folder: Path) -> bool:
    result = scan_sources(DataConfig(path=str(folder / "saved"), height=32, width=32))
    return not result.problems


def _conversations(folder: Path) -> bool:
    result = read_conversations(DataConfig(path=str(folder / "told.json"), height=32, width=32))
    return not result.problems


def _recipe(folder: Path) -> object:
    overrides = (folder / "overrides").read_bytes().decode("utf-8", errors="surrogateescape")
    return load_recipe(folder / "recipe.yaml", overrides.splitlines())


def _cache(folder: Path) -> bool:
    cache = TensorCache(folder / "videos")
    faults = [cache.read(entry.key, cache.get_spec(entry.key))[1] for entry in list(cache.iter_entries())]
    checked = verify_cache(cache)
    return bool(faults) and not any(faults) and not checked.problems


def _checkpoint(folder: Path) -> object:
    path = find_checkpoint("auto", folder)
    return path is not None and load_checkpoint(path, {"lora.rank": 4})


def _lora(folder: Path) -> object:
    from diffusers import CogVideoXPipeline

    from dit_lora.adapters.layer_names import LayerNames

    file = folder / "pytorch_lora_weights.safetensors"
    read_run_metadata(file)
    return read_lora(file, _MODEL, LayerNames(), CogVideoXPipeline)


def _tokenizer(folder: Path) -> object:
    from transformers import AutoTokenizer

    return load_pretrained(AutoTokenizer, folder)


def _config(folder: Path) -> object:
    from transformers import AutoConfig

    return load_pretrained(AutoConfig, folder)


_MODEL = _tiny_transformer()
PARSERS: Mapping[str, Parser] = {
    "lora": Parser(_write_lora, _lora),
    "peft": Parser(_write_peft, lambda f: read_peft_config(f / "adapter_config.json")),
    "jsonl": Parser(_write_jsonl, _scan, False),
    "csv": Parser(_write_csv, _scan, False),
    "captions": Parser(_write_captions, _scan, False),
    "tar": Parser(_write_tar, _scan, False),
    "dataset": Parser(_write_dataset, _scan_dataset, False),
    "conversations": Parser(_write_conversations, _conversations, False),
    "recipe": Parser(_write_recipe, _recipe, False),
    "cache": Parser(_write_cache, _cache),
    "checkpoint": Parser(_write_checkpoint, _checkpoint),
    "bundle": Parser(
        _write_bundle,
        read_replay_bundle,
        required=("event", "replay", "packages", "switched_off", "start_peak"),
    ),
    "facts": Parser(
        _write_facts,
        lambda f: read_typed_json(f / "facts.json", RunFacts),
        required=("class", "module", "dtype", "arguments", "seed", "output", "in_fp32"),
    ),
    "run": Parser(_write_run, write_report, False),
    "guard": Parser(_write_guard, write_guard_report, False),
    "quarantine": Parser(_write_quarantine, lambda f: Quarantine.load(f / "quarantine.jsonl"), False),
    "tokenizer": Parser(_write_tokenizer, _tokenizer, False),
    "config": Parser(_write_config, _config),
}
