"""VideoChat2's released files become a folder that loads and runs; every tensor that does not fit is reported."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer
from videochat2_release import (
    BLOCKS,
    CONFIG,
    EXTRA,
    QFORMER,
    QUERIES,
    STAGE_1_ONLY,
    TEXT,
    VOCAB,
    World,
)

from dit_lora.families.videochat2.tiny import build_bert_tokenizer
from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration


@pytest.fixture
def world(tmp_path: Path) -> World:
    new_world = World(tmp_path)
    new_world.write()
    return new_world


def test_every_tensor_gets_where_it_belongs(world: World) -> None:
    """Later files over earlier ones; LoRA as W + 2 B A; and the model computes what it does with these weights."""
    report = world.convert()
    expected = world.expected(world.stage1, world.stage2, world.stage3)
    for name, a in world.stage3.items():
        if ".lora_A." in name:
            b = world.stage3[name.replace("lora_A", "lora_B")]
            module = name.removeprefix("mistral_model.base_model.model.").split(".lora_A")[0]
            module = module.replace("model.", "model.language_model.", 1)
            expected[f"{module}.weight"] = expected[f"{module}.weight"] + 2 * (b @ a)
    converted = load_file(world.folder / "out" / "model.safetensors")
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], expected[name]) for name in converted)
    assert "11 layers merged at scale 2" in report.lora_report
    assert not report.initialized

    model = opened(world)
    assert model.config.legacy
    reference = VideoChat2ForConditionalGeneration(model.config).eval()
    reference.load_state_dict(expected, strict=True)
    assert torch.equal(model(**inputs(model)).logits, reference(**inputs(model)).logits)


def opened(world: World) -> Any:
    return VideoChat2ForConditionalGeneration.from_pretrained(world.folder / "out", dtype=torch.float32).eval()


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Two rows with different pictures, instructions and words."""
    generator = torch.Generator().manual_seed(9)
    media, num_queries = model.config.media_token_id, QUERIES + EXTRA
    ids = torch.randint(3, VOCAB, (2, 4 + num_queries), generator=generator)
    ids[:, 0] = 1
    ids[0, 2 : 2 + num_queries] = ids[1, 1 : 1 + num_queries] = media
    return {
        "input_ids": ids,
        "pixel_values": torch.randn((2, 2, 3, 16, 16), generator=generator),
        "instruction_ids": torch.randint(5, 60, (2, 7), generator=generator),
        "instruction_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
    }


def test_what_is_not_needed_is_named_with_its_reason(world: World) -> None:
    report = world.convert()
    unused = {name for names in report.unused.values() for name in names}
    dropped_block = {n for n in world.stage1 if f"blocks.{BLOCKS}." in n}
    assert unused == {
        *(f"umt_l16_qformer.pth: {name}" for name in STAGE_1_ONLY | dict.fromkeys(dropped_block)),
        *(
            f"{file}: qformer.bert.embeddings.position_ids"
            for file in ("umt_l16_qformer.pth", "stage2.pth", "stage3.pth")
        ),
        "stage3.pth: epoch",
        "stage3.pth: scaler",
    }
    assert "  not needed, 7: the captioning head of stage 1" in report.lines()
    assert sum(report.tensors.values()) == len(load_file(world.folder / "out/model.safetensors"))


@pytest.mark.parametrize(("llm", "prompt"), [("llama", "vicuna"), ("phi", "phi3")])
def test_other_language_models_are_known_by_their_names(llm: str, prompt: str, tmp_path: Path) -> None:
    world = World(tmp_path, llm)
    world.write()
    report = world.convert(progress=None)
    layer = next(name for name in world.stage3 if ".lora_A." in name)
    b = world.stage3[layer.replace("lora_A", "lora_B")]
    name = layer.split("base_model.model.")[1].split(".lora_A")[0] + ".weight"
    converted = load_file(tmp_path / "out" / "model.safetensors")
    merged = converted[name.replace("model.", "model.language_model.", 1)]
    assert torch.equal(merged, world.base[name] + 2 * (b @ world.stage3[layer]))
    assert torch.equal(converted["model.projection.bias"], world.stage3[f"{llm}_proj.bias"])
    assert opened(world).config.prompt_format == prompt
    assert f"prompt format: {prompt}" in report.lines()[-1]


def test_stage_2_alone_is_not_legacy_and_takes_text_from_stage_1(world: World) -> None:
    del world.stage2["extra_query_tokens"]
    world.write()
    report = world.convert(stages=[world.folder / "stage2.pth"], seed=4)
    converted = load_file(world.folder / "out" / "model.safetensors")
    expected = world.expected(world.stage1, world.stage2)
    extra = converted.pop("model.extra_query_tokens")
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], expected[name]) for name in converted)
    assert report.initialized == ("model.extra_query_tokens",)
    assert extra.shape == (1, EXTRA, QFORMER)
    assert 0.01 < float(extra.std()) < 0.03
    assert not opened(world).config.legacy
    assert report.lora_report == ""


def test_legacy_is_the_callers_to_say(world: World) -> None:
    world.convert(legacy=False)
    assert not opened(world).config.legacy


def test_a_kept_adapter_computes_what_a_merged_one_does(world: World) -> None:
    report = world.convert(keep_adapter=True)
    assert "11 layers kept in adapter/" in report.lora_report
    converted = load_file(world.folder / "out" / "model.safetensors")
    assert torch.equal(converted["lm_head.weight"], world.base["lm_head.weight"])
    model = opened(world)
    plain = model(**inputs(model)).logits
    adapted: Any = PeftModel.from_pretrained(model, str(world.folder / "out" / "adapter"))
    with_adapter = adapted(**inputs(model)).logits
    (world.folder / "out").rename(world.folder / "kept")
    world.convert()
    merged = opened(world)
    assert not torch.allclose(plain, with_adapter, atol=1e-2)
    torch.testing.assert_close(merged(**inputs(merged)).logits, with_adapter, atol=1e-4, rtol=1e-4)


def test_bf16_weights_are_rounded_once(tmp_path: Path) -> None:
    world = World(tmp_path, dtype=torch.bfloat16)
    world.write()
    report = world.convert()
    converted = load_file(tmp_path / "out" / "model.safetensors")
    before = "mistral_model.base_model.model.lm_head.lora_"
    a, b = (world.stage3[f"{before}{half}.default.weight"] for half in "AB")
    exact = world.base["lm_head.weight"].float() + 2 * (b @ a)
    head = converted["lm_head.weight"]
    assert head.dtype == torch.bfloat16
    assert torch.equal(head, exact.bfloat16())
    # The base in bf16, then the update in bf16, then their sum: three roundings.
    assert not torch.equal(head, world.base["lm_head.weight"] + (2 * (b @ a)).bfloat16())
    assert (head != world.base["lm_head.weight"]).any()
    assert converted["model.projection.weight"].dtype == torch.float32
    assert re.search(r"rounding to bfloat16 is off by 0\.\d\d% of the update", report.lora_report)


def test_shards_are_read_as_one(world: World) -> None:
    lines: list[str] = []
    world.convert(shard_bytes=60_000, progress=lines.append)
    files = sorted((world.folder / "out").glob("model-*-of-*.safetensors"))
    assert len(files) == len(lines) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 80_000 or len(load_file(file)) == 1 for file in files)
    sharded = opened(world).state_dict()
    (world.folder / "out").rename(world.folder / "sharded")
    world.convert()
    unsharded = opened(world).state_dict()
    assert all(torch.equal(sharded[name], tensor) for name, tensor in unsharded.items())


def test_old_folders_of_pickles_are_read(world: World) -> None:
    """As apply_delta leaves a Vicuna: two .bin files, an index, and the buffers of that time."""
    (world.folder / "llm" / "model.safetensors").unlink()
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    names = list(world.base)
    shards = {"a.bin": names[:5], "b.bin": names[5:]}
    for file, part in shards.items():
        tensors = {name: world.base[name] for name in part} | (buffers if file == "a.bin" else {})
        torch.save(tensors, world.folder / "llm" / file)
    index = {name: file for file, part in shards.items() for name in part}
    text = '{"weight_map": ' + str(index).replace("'", '"') + "}"
    (world.folder / "llm" / "pytorch_model.bin.index.json").write_text(text)
    report = world.convert(keep_adapter=True)
    converted = load_file(world.folder / "out" / "model.safetensors")
    assert torch.equal(converted["lm_head.weight"], world.base["lm_head.weight"])
    assert any("inv_freq" in name for names in report.unused.values() for name in names)


def test_a_trained_language_model_replaces_the_folders(world: World) -> None:
    """Stage 4 can train it whole (freeze_llm): its weights come by PEFT's names, and the LoRA goes on them."""
    query = "mistral_model.base_model.model.model.layers.0.self_attn.q_proj"
    world.stage3[f"{query}.base_layer.weight"] = torch.randn(TEXT, TEXT)
    world.stage3["mistral_model.base_model.model.model.norm.weight"] = torch.randn(TEXT)
    world.write()
    world.convert()
    converted = load_file(world.folder / "out" / "model.safetensors")
    a, b = (world.stage3[f"{query}.lora_{half}.default.weight"] for half in "AB")
    assert torch.equal(
        converted["model.language_model.layers.0.self_attn.q_proj.weight"],
        world.stage3[f"{query}.base_layer.weight"] + 2 * (b @ a),
    )
    norm = world.stage3["mistral_model.base_model.model.model.norm.weight"]
    assert torch.equal(converted["model.language_model.norm.weight"], norm)


def test_a_qformer_that_reads_no_text_needs_no_stage_1(world: World) -> None:
    qformer = {**CONFIG["qformer_config"], "use_text": False}
    report = world.convert(config={**CONFIG, "qformer_config": qformer}, vision=None)
    names = report.unused["the Q-Former of this config reads no text"]
    halves = ("embeddings.word", "embeddings.position_embeddings", "intermediate.", "output.dense")
    text = {
        name for name in world.stage3 if name not in world.stage2 and name.startswith("qformer") and "lora" not in name
    }
    assert set(names) == {f"stage3.pth: {name}" for name in text}
    assert all(any(half in name for name in names) for half in halves)
    assert not opened(world).model.qformer.use_text


def test_the_language_models_folder_is_completed(world: World) -> None:
    """Old LLaMA configs name another BOS than their tokenizer, and none of the three has a padding token."""
    folder = world.folder / "llm"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": 0}))
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    del tokenizer_config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    report = world.convert()
    assert "bos_token_id 0 -> 1, the tokenizer's" in report.notes
    output_folder = world.folder / "out"
    assert opened(world).config.text_config.bos_token_id == 1
    assert AutoTokenizer.from_pretrained(output_folder).pad_token == "</s>"
    assert json.loads((output_folder / "generation_config.json").read_text())["eos_token_id"] == [
        2,
        7,
    ]
    assert str(world.folder) not in (output_folder / "config.json").read_text()


def test_plain_bert_gets_the_decoder_token(world: World) -> None:
    tokenizer = build_bert_tokenizer()
    plain = type(tokenizer)(vocab={t: i for t, i in tokenizer.get_vocab().items() if t != "[DEC]"})
    plain.save_pretrained(world.folder / "plain")
    world.convert(qformer_tokenizer=world.folder / "plain")
    saved = AutoTokenizer.from_pretrained(world.folder / "out" / "qformer_tokenizer")
    assert saved.bos_token_id == len(plain) == len(saved) - 1
    assert saved.truncation_side == "left"
