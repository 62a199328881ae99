"""Classes of a DiT: their rows, new ones behind the null row, and what a run makes of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiTPipeline
from PIL import Image
from safetensors.torch import load_file

import dit_lora
from dit_lora.adapters.diffusers_format import (
    ADAPTER_FILE,
    BASE_FILE,
    read_run_metadata,
)
from dit_lora.adapters.load import load_adapter
from dit_lora.commands.sample import SampleRequest, write_samples
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.synthetic.clips import write_class_folders
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.dit import classes
from dit_lora.families.dit.classes import LABEL_TABLE_NAME, ClassTable
from dit_lora.families.dit.classes import DiTPipeline as ClassPipeline
from dit_lora.families.dit.tiny import build_tiny_checkpoint

Main = Callable[[list[str]], None]
Values = dict[str, Any]
TABLES = "transformer_blocks.*.norm1.emb.class_embedder.*"
NEW = ("blue disc", "blue square", "green disc", "green square", "red disc", "red square")


@pytest.fixture
def tiny(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["dit-tiny"]


def test_names_have_the_stock_pipelines_rows(tiny: Path, tmp_path: Path) -> None:
    """Every synonym; the last of equal names."""
    path = Path(shutil.copytree(tiny, tmp_path / "cranes"))
    index = json.loads((path / "model_index.json").read_text())
    index["id2label"] |= {"134": "crane", "517": "crane"}
    (path / "model_index.json").write_text(json.dumps(index))
    table = get_family("dit").open(ModelConfig(family="dit", path=str(path))).info.trained_classes
    labels = DiTPipeline.from_pretrained(path).labels
    assert len(labels) > 1000
    assert {name: table.find_label_row(name) for name in labels} == labels
    assert table.find_label_row("crane") == 517
    assert table.find_label_row("tabby, tabby cat") == table.find_label_row("tabby cat, tabby") == 281


def test_a_number_is_a_row_where_no_class_has_one_for_a_name() -> None:
    table = ClassTable(1002, {0: "tench", 1001: "red dog"})
    assert [table.find_label_row(name) for name in ("0", "999", "1001", "1002")] == [0, 999, 1001, 1002]
    assert table.find_label_row("1000") is None  # the null row
    assert table.find_label_row("1003") is None
    assert table.find_label_row("") == 1000
    digits = ClassTable.from_names(["0", "1", "8", "9"])
    assert [digits.find_label_row(name) for name in ("8", "2", "")] == [2, None, 4]


@pytest.mark.parametrize(
    ("count", "new", "null", "rows"),
    [
        (1000, 2, 1000, [1001, 1002]),
        (6, 2, 8, [6, 7]),
        (999, 3, 1000, [999, 1001, 1002]),
        (1003, 1, 1000, [1004]),
    ],
)
def test_new_classes_go_behind_the_old_and_around_the_null_row(
    count: int, new: int, null: int, rows: list[int]
) -> None:
    """No old class moves; the null row keeps its weights, and the new classes start as it."""
    old = ClassTable(count, {})
    table = old.append_new_classes([f"new {i}" for i in range(new)])
    assert table.null_label_row == null
    assert [table.find_label_row(f"new {i}") for i in range(new)] == rows
    weight = torch.randn(count + 1, 3, generator=torch.Generator().manual_seed(0))
    grown = table.expand_label_weight(weight, old)
    assert len(grown) == count + new + 1
    assert torch.equal(grown[old.rows()], weight[old.rows()])
    for row in (null, *rows):
        assert torch.equal(grown[row], weight[old.null_label_row])


def test_a_small_table_is_guided_with_its_own_null_row(tmp_path: Path) -> None:
    """The stock pipeline asks for row 1000, which is not there."""
    build_tiny_checkpoint("dit-tiny", tmp_path / "small", num_classes=6)
    checkpoint = get_family("dit").open(ModelConfig(family="dit", path=str(tmp_path / "small")))
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    assert type(pipeline) is classes.DiTPipeline
    pipeline.set_progress_bar_config(disable=True)
    recorded_labels: list[torch.Tensor] = []
    pipeline.transformer.transformer_blocks[0].norm1.emb.class_embedder.register_forward_hook(
        lambda _m, args, _o: recorded_labels.append(args[0])
    )
    ask = {"class_labels": [2, 5], "guidance_scale": 3.0, "num_inference_steps": 2}
    pipeline(**ask, output_type="np")
    assert recorded_labels
    assert all(labels.tolist() == [2, 5, 6, 6] for labels in recorded_labels)
    stock = DiTPipeline.from_pretrained(tmp_path / "small")
    with pytest.raises(IndexError):
        stock(**ask)
    pipeline.save_pretrained(tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "model_index.json").read_text())
    assert index["_class_name"] == "DiTPipeline"


@pytest.fixture
def values(tiny: Path, tmp_path: Path) -> Values:
    """A LoRA on six classes that the checkpoint has not."""
    write_class_folders(tmp_path / "images", images=12, height=32, width=32)
    connector = {"lr": 1e-2, "weight_decay": 0, "modules": [TABLES]}
    return {
        "model": {"family": "dit", "path": str(tiny)},
        "data": {"path": str(tmp_path / "images"), "height": 32, "width": 32, "workers": 0},
        "lora": {"rank": 4},
        "optim": {"groups": {"adapter": {"lr": 1e-3}, "connector": connector}},
        "train": {"steps": 4, "batch_size": 4, "checkpointing": "none"},
        "validation": {"eval_draws": 0, "prompts": ["red disc"], "inference_steps": 2},
        "run": {"dir": str(tmp_path / "run")},
    }


def opened(values: Values) -> Any:
    recipe = parse_recipe(values, source="test")
    return get_family("dit").open(recipe.model, recipe)


def test_new_classes_need_rows_that_train_and_do_not_decay(values: Values) -> None:
    assert opened(values).info.trained_classes.count == 1006
    groups = values["optim"]["groups"]
    connector = groups.pop("connector")
    with pytest.raises(DitLoraError, match=r"give optim.groups.connector .* they are\n  - blue disc"):
        opened(values)
    groups["connector"] = {**connector, "modules": ["proj_out_1.*"]}
    with pytest.raises(DitLoraError, match="their rows of the label tables must train"):
        opened(values)
    groups["connector"] = {"lr": 1e-3, "modules": [TABLES]}  # optim.weight_decay applies
    with pytest.raises(DitLoraError, match=r"a weight decay of 0.0001, which would wear off"):
        opened(values)
    values["optim"]["weight_decay"] = 0
    assert opened(values).info.trained_classes.find_label_row("red disc") == 1005


def test_known_classes_need_no_new_rows(values: Values, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder / ("tabby_cat" if number == 0 else str(number)))
    del values["optim"]["groups"]["connector"]
    values["validation"]["prompts"] = ["goldfish"]
    checkpoint = opened(values)
    assert checkpoint.info.trained_classes.count == 1000
    assert checkpoint.info.model_index_changes() == {}
    labels = checkpoint.encoders.load_text_encoder(torch.float32, torch.device("cpu"))(["tabby cat", "3", ""])
    assert labels["class_labels"].tolist() == [281, 3, 1000]
    assert labels["class_labels"].dtype is torch.int64


def test_a_label_outside_the_table_is_refused(values: Values) -> None:
    """A class of the data that `data.classes` has not."""
    values["data"]["classes"] = [name for name in NEW if name != "green disc"]
    checkpoint = opened(values)
    assert checkpoint.info.trained_classes.count == 1005
    encode = checkpoint.encoders.load_text_encoder(torch.float32, torch.device("cpu"))
    with pytest.raises(DitLoraError, match=r"dit-tiny has no class 'green disc'; it has"):
        encode(["red disc", "green disc"])


def run(values: Values, main: Main, tmp_path: Path, name: str) -> Path:
    values["run"]["dir"] = str(tmp_path / name)
    values["data"]["cache"] = str(tmp_path / "cache")
    recipe = tmp_path / f"{name}.yaml"
    recipe.write_text(json.dumps(values))  # YAML too
    main([str(recipe)])
    return tmp_path / name


def first_new_row(folder: Path, name: str) -> int:
    """As the run's own header has it."""
    labels = read_run_metadata(folder / "adapter" / ADAPTER_FILE)["index"]["id2label"]
    return next(int(row) for row, value in labels.items() if value == name)


def test_new_rows_train_others_stay_and_samples_know_their_names(
    values: Values, lora_main: Main, tiny: Path, tmp_path: Path
) -> None:
    """From the run's adapter, with nothing else given."""
    folder = run(values, lora_main, tmp_path, "lora")
    weights = load_file(folder / "adapter" / BASE_FILE)
    stored = load_file(tiny / "transformer" / "diffusion_pytorch_model.safetensors")
    assert set(weights) == {LABEL_TABLE_NAME.format(0), LABEL_TABLE_NAME.format(1)}
    for name, table in weights.items():
        assert len(table) == 1007
        assert torch.equal(table[:1001], stored[name])
        moved = (table[1001:] - stored[name][1000]).abs().amax(1)
        assert (moved > 1e-3).all()

    first_path, second = write_samples(SampleRequest(folder, ("red disc", "goldfish"), inference_steps=2))
    assert first_path.read_bytes() != second.read_bytes()
    with pytest.raises(DitLoraError, match="has no class 'red dog'"):
        write_samples(SampleRequest(folder, ("red dog",), inference_steps=2))
    validated = folder / "samples" / "step_000004" / "prompt_00.png"
    assert validated.is_file()

    pipeline: Any = DiTPipeline.from_pretrained(tiny)  # the stock table, of 1001 rows
    load_adapter(pipeline, folder / "adapter")
    table = pipeline.transformer.transformer_blocks[1].norm1.emb.class_embedder.embedding_table
    assert torch.equal(table.weight, weights[LABEL_TABLE_NAME.format(1)])
    pipeline([1003], num_inference_steps=2)
    assert pipeline.get_label_ids(["red disc"]) == [first_new_row(folder, "red disc")]
    assert pipeline.labels["goldfish"] < 1000


def test_weight_decay_alone_would_move_rows_without_a_gradient() -> None:
    """Why it is refused."""
    table = torch.nn.Embedding(3, 2)
    before = table.weight.detach().clone()
    for decay, moves in ((0.0, False), (0.1, True)):
        optimizer = torch.optim.AdamW(table.parameters(), lr=0.1, weight_decay=decay, fused=True)
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert bool((table.weight[[0, 2]] != before[[0, 2]]).any()) is moves


def test_a_whole_model_with_new_classes_loads_in_the_stock_pipeline(
    values: Values, lora_main: Main, tiny: Path, tmp_path: Path
) -> None:
    """Mode full on a checkpoint of 1000 classes: DiTPipeline's null row stays where it was."""
    del values["lora"]
    values["optim"] = {"groups": {"backbone": {"lr": 1e-3}}, "weight_decay": 0}
    values["train"] |= {"mode": "full", "ema": 0.9}
    folder = run(values, lora_main, tmp_path, "full")
    pipeline: Any = DiTPipeline.from_pretrained(folder / "model")
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.transformer.config.num_embeds_ada_norm == 1006
    assert {name: pipeline.labels[name] for name in NEW} == {name: 1001 + number for number, name in enumerate(NEW)}
    assert pipeline.labels["tabby cat"] == 281
    (image,) = pipeline([pipeline.labels["red disc"]], num_inference_steps=2).images
    assert image.size == (32, 32)
    reopened = get_family("dit").open(ModelConfig(family="dit", path=str(folder / "model")))
    assert reopened.info.trained_classes.find_label_row("red disc") == 1005
    assert reopened.info.trained_classes.null_label_row == 1000


def test_classes_of_a_model_from_scratch_are_the_datas_and_a_lora_adds_one(
    values: Values, lora_main: Main, tmp_path: Path
) -> None:
    """Then the table has a null row of its own, which moves behind the new class with its weights."""
    connector, lora = values["optim"]["groups"]["connector"], values.pop("lora")
    values["model"]["from_scratch"] = {}
    values["optim"] = {"groups": {"backbone": {"lr": 1e-3}}, "weight_decay": 0}
    values["train"] |= {"mode": "full"}
    model = run(values, lora_main, tmp_path, "scratch") / "model"
    assert DiTPipeline.from_pretrained(model).labels == {n: i for i, n in enumerate(NEW)}

    images = tmp_path / "images"
    for path in sorted(images.iterdir()):
        if path.name != "red_disc":
            shutil.rmtree(path)
    (images / "red_disc").rename(images / "mauve_blob")
    values |= {
        "model": {"family": "dit", "path": str(model)},
        "lora": lora,
        "optim": {"groups": {"adapter": {"lr": 1e-3}, "connector": connector}},
    }
    values["train"] |= {"mode": "lora"}
    values["validation"]["prompts"] = ["mauve blob", "blue disc"]
    adapter = run(values, lora_main, tmp_path, "added") / "adapter"
    stored = load_file(model / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, table in load_file(adapter / BASE_FILE).items():
        assert torch.equal(table[:6], stored[name][:6])
        assert torch.equal(table[7], stored[name][6])
        assert not torch.equal(table[6], stored[name][6])
    request = SampleRequest(tmp_path / "added", ("mauve blob",), inference_steps=2, guidance_scale=3.0)
    (written,) = write_samples(request)

    pipeline: Any = ClassPipeline.from_pretrained(model)  # and the same by hand
    pipeline.set_progress_bar_config(disable=True)
    dit_lora.load_adapter(pipeline, str(adapter))
    rows = pipeline.get_label_ids(["mauve blob"])
    images = pipeline(
        rows,
        num_inference_steps=2,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    expected = (images[0] * 255).round().astype("uint8")
    assert np.array_equal(expected, np.array(Image.open(written)))
