"""Modular pipelines from a folder: nothing that the index names is imported or fetched, and nothing is left out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AnimaModularPipeline

from dit_lora.adapters.own_files import list_checkpoint_files
from dit_lora.environment.pipeline_index import MODULAR_INDEX_FILE, copy_index, find_index_file, set_component_source
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError

HERE: dict[str, Any] = {"text_encoder": None, "text_conditioner": None, "vae": None}


@pytest.fixture
def folder(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoints["anima"], tmp_path / "model"))


def index_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / MODULAR_INDEX_FILE).read_text()))


def test_components_are_those_of_the_folder_whatever_the_index_says(folder: Path) -> None:
    """The index names another repository, and a class that is defined in that repository's files."""
    index = set_component_source(index_of(folder), "somebody/theirs")
    index["transformer"][:2] = ["evil", "Transformer"]
    index["transformer"][2]["type_hint"] = ["evil", "Transformer"]
    (folder / MODULAR_INDEX_FILE).write_text(json.dumps(index))
    (folder / "transformer" / "evil.py").write_text("raise SystemExit('ran')")
    dtypes = {"transformer": torch.bfloat16, "default": torch.float32}
    pipeline = load_pretrained(AnimaModularPipeline, folder, dtype=dtypes)
    assert {name for name, part in pipeline.components.items() if part is None} == set()
    assert (pipeline.transformer.dtype, pipeline.vae.dtype) == (torch.bfloat16, torch.float32)


def test_a_component_is_replaced_left_out_or_missed(folder: Path) -> None:
    transformer = load_pretrained(AnimaModularPipeline, folder, **HERE).transformer
    pipeline = load_pretrained(AnimaModularPipeline, folder, **HERE, transformer=transformer, no_such_part=None)
    assert pipeline.transformer is transformer
    assert pipeline.vae is None
    with pytest.raises(DitLoraError, match="have no component no_such_part"):
        load_pretrained(AnimaModularPipeline, folder, **HERE, no_such_part=transformer)
    shutil.rmtree(folder / "t5_tokenizer")
    with pytest.raises(DitLoraError, match="has no folder t5_tokenizer"):
        load_pretrained(AnimaModularPipeline, folder, **HERE)
    (folder / "transformer" / "config.json").write_text("{}")
    with pytest.raises(DitLoraError, match=r"cannot load .*transformer"):
        load_pretrained(AnimaModularPipeline, folder, **HERE, t5_tokenizer=None)


def test_code_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "text_encoder" / "evil.py").write_text("raise SystemExit('ran')")
    config = folder / "text_encoder" / "config.json"
    auto_map = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "auto_map": auto_map, "model_type": "evil"}))
    (folder / "modular_config.json").write_text(json.dumps({"auto_map": {"ModularPipelineBlocks": "evil.Blocks"}}))
    pipeline = load_pretrained(AnimaModularPipeline, folder)
    # Classes are those that the blocks name, and so are the blocks.
    assert type(pipeline.text_encoder).__name__ == "Qwen3Model"
    assert type(pipeline.blocks).__name__ == "AnimaAutoBlocks"


def test_a_copy_is_loaded_from_its_own_folder(folder: Path, tmp_path: Path) -> None:
    """A copied index that named the base's repository would bring back the base's weights."""
    (folder / MODULAR_INDEX_FILE).write_text(json.dumps(set_component_source(index_of(folder), "somebody/base")))
    copy_index(folder, tmp_path, {"trained": 2.0})
    copied = index_of(tmp_path)
    assert copied.pop("trained") == 2.0
    sources = {entry[2]["pretrained_model_name_or_path"] for entry in copied.values() if isinstance(entry, list)}
    assert sources == {None}
    assert find_index_file(tmp_path) == tmp_path / MODULAR_INDEX_FILE
    # A stock pipeline's index counts before a modular one.
    (tmp_path / "model_index.json").write_text("{}")
    assert find_index_file(tmp_path) == tmp_path / "model_index.json"


def test_the_files_of_a_modular_checkpoint_are_those_of_its_components(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text("{}")
    files = list_checkpoint_files(folder)
    assert MODULAR_INDEX_FILE in files
    assert {name.partition("/")[0] for name in files} == {
        MODULAR_INDEX_FILE,
        *("scheduler", "t5_tokenizer", "text_conditioner", "text_encoder", "tokenizer", "transformer", "vae"),
    }
