"""Recipes: typed, overridable, and every mistake is named at once."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dit_lora.config.load import build_recipe_schema, dump_recipe, load_recipe, parse_recipe
from dit_lora.errors import DitLoraError


@pytest.fixture
def values() -> dict[str, Any]:
    return {
        "model": {"family": "cogvideox", "path": "x"},
        "data": {"path": "clips", "frames": 9, "height": 32, "width": 48, "fps": 8},
        "train": {"steps": 3},
        "run": {"dir": "runs/a"},
    }


def test_every_mistake_is_listed_with_the_nearest_known_key(values: dict[str, Any]) -> None:
    values["train"] = {"steps": "many", "batchsize": 2, "lr": 1}
    values["lorra"] = {}
    values["x\nerror: y"] = 1
    values["optim"] = {"groups": {"adaptr": {"lr": 1e-4}}}
    del values["run"]
    with pytest.raises(DitLoraError) as error:
        parse_recipe(values, "r.yaml")
    message = str(error.value)
    assert "train.batchsize: unknown key; did you mean train.batch_size?" in message
    assert "train.lr: unknown key; did you mean optim.groups.adapter.lr?" in message
    assert "lorra: unknown key; did you mean lora?" in message
    assert r"x\nerror: y: unknown key" in message
    assert "optim.groups.adaptr: unknown key; did you mean optim.groups.adapter?" in message
    assert "train.steps" in message
    assert "got 'many'" in message
    assert "run: missing" in message


def test_overrides_win_and_create_sections(values: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(values))
    recipe = load_recipe(path, ["train.steps=20", "optim.groups.connector.lr=1e-5", "lora.targets=[to_q, to_k]"])
    assert recipe.train.steps == 20
    assert recipe.optim.groups.connector is not None
    assert recipe.optim.groups.connector.lr == 1e-5  # YAML 1.1 reads 1e-5 as a string
    assert recipe.lora.targets == ("to_q", "to_k")


@pytest.mark.parametrize(
    ("section", "key", "text"),
    [
        ("validation", "prompts", "a kitten, in the snow"),
        ("run", "trackers", "wandb"),
        ("guard", "on_nonfinite", "skip"),
        ("lora", "targets", "to_q"),
    ],
)
def test_one_text_is_a_list_of_one(values: dict[str, Any], section: str, key: str, text: str) -> None:
    values[section] = values.get(section, {}) | {key: text}
    assert getattr(getattr(parse_recipe(values, "r.yaml"), section), key) == (text,)


def test_one_text_is_still_checked_and_no_list_of_other_things(values: dict[str, Any]) -> None:
    values["run"] |= {"trackers": "wanb"}
    values["optim"] = {"betas": "0.9"}
    with pytest.raises(DitLoraError) as error:
        parse_recipe(values, "r.yaml")
    assert "run.trackers.0: Input should be 'tensorboard', 'wandb' or 'trackio'; got 'wanb'" in str(error.value)
    assert "optim.betas: Input should be a valid tuple; got '0.9'" in str(error.value)


def test_keys_of_an_earlier_version_are_read_with_a_note(values: dict[str, Any], tmp_path: Path) -> None:
    values["validation"] = {"held_out_clips": 3, "held_out_draws": 2}
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(values))
    # An override comes later than the file, whichever of the two names each uses.
    recipe = load_recipe(path, ["validation.eval_draws=5"])
    assert (recipe.validation.eval_clips, recipe.validation.eval_draws) == (3, 5)
    assert recipe.validation.notes == [
        "validation.held_out_draws is now validation.eval_draws; the old key works until version 0.3",
        "validation.held_out_clips is now validation.eval_clips; the old key works until version 0.3",
    ]
    # So it does over a file that has both names.
    path.write_text(yaml.safe_dump({**values, "validation": {"eval_draws": 1, "held_out_draws": 2}}, sort_keys=False))
    assert load_recipe(path).validation.eval_draws == 2
    assert load_recipe(path, ["validation.eval_draws=3"]).validation.eval_draws == 3
    written = parse_recipe(yaml.safe_load(dump_recipe(recipe)), "written.yaml")
    assert (written.validation.eval_clips, written.validation.notes) == (3, [])
    values["validation"] = {"eval_draws": 2}
    assert parse_recipe(values, "r.yaml").validation.notes == []
    values["validation"] = {"held_out_draws": -1}
    with pytest.raises(DitLoraError, match=r"validation\.eval_draws: "):
        parse_recipe(values, "r.yaml")


@pytest.mark.parametrize("override", ["train.steps", "=3", "train..steps=3", "train.steps=[1"])
def test_a_malformed_override_is_refused(values: dict[str, Any], tmp_path: Path, override: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(DitLoraError, match=r"override|not valid YAML"):
        load_recipe(path, [override])


def test_the_resolved_recipe_reads_back_equal(values: dict[str, Any], tmp_path: Path) -> None:
    recipe = parse_recipe(values, "r")
    path = tmp_path / "config.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("train: {steps: 1}\ntrain: {steps: 2}\n")
    with pytest.raises(DitLoraError, match="given twice: train"):
        load_recipe(path)


def test_yaml_cannot_make_python_objects(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(DitLoraError, match="not valid YAML"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no recipe .*r.yaml; see dit-lora recipes"),
        ("- a\n", "must contain sections"),
        ("", "must contain"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "r.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DitLoraError, match=message):
        load_recipe(path)


def test_fp16_is_refused_with_the_reason(values: dict[str, Any]) -> None:
    values["model"]["dtype"] = "fp16"
    with pytest.raises(DitLoraError, match=r"model\.dtype: fp16 is not offered.*65504"):
        parse_recipe(values, "r")


@pytest.mark.parametrize("eps", [1e-46, 1e-40])
def test_an_eps_that_is_lost_in_fp32_is_refused(values: dict[str, Any], eps: float) -> None:
    values["optim"] = {"eps": eps}
    with pytest.raises(DitLoraError, match=r"optim\.eps: is too small: in fp32 1e-4\d rounds to 0"):
        parse_recipe(values, "r")
    values["optim"] = {"eps": 1.2e-38}
    assert parse_recipe(values, "r").optim.eps == 1.2e-38


def test_adapter_groups_take_no_patterns(values: dict[str, Any]) -> None:
    values["optim"] = {"groups": {"adapter": {"lr": 1e-4, "modules": ["to_q"]}}}
    with pytest.raises(DitLoraError, match=r"lora\.targets chooses"):
        parse_recipe(values, "r")


def test_recipes_are_frozen(values: dict[str, Any]) -> None:
    recipe = parse_recipe(values, "r")
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 7  # type: ignore[misc]


def test_the_schema_for_editors_describes_keys_and_refuses_unknown_ones() -> None:
    schema = build_recipe_schema()
    json.dumps(schema)
    train = schema["$defs"]["TrainConfig"]
    assert train["additionalProperties"] is False
    assert "Micro-steps" in train["properties"]["accumulate"]["description"]


def test_the_schema_for_editors_takes_a_single_text_where_the_loader_does(values: dict[str, Any]) -> None:
    sections = build_recipe_schema()["$defs"]
    trackers = sections["RunConfig"]["properties"]["trackers"]
    assert [choice["type"] for choice in trackers["anyOf"]] == ["array", "string"]
    assert trackers["anyOf"][1]["enum"] == trackers["anyOf"][0]["items"]["enum"]
    classes = sections["DataConfig"]["properties"]["classes"]
    assert [choice["type"] for choice in classes["anyOf"]] == ["array", "string", "null"]
    recipe = parse_recipe({**values, "run": {"dir": "runs/a", "trackers": "wandb"}}, "r")
    assert recipe.run.trackers == ("wandb",)
    # Lists of lists and of numbers are not converted.
    assert sections["ValidationConfig"]["properties"]["references"]["type"] == "array"
    assert "string" not in json.dumps(sections["BucketsConfig"]["properties"]["frames"]["anyOf"])


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        ({"on_nonfinite": []}, "give at least one action and none twice"),
        ({"on_nonfinite": ["skip", "skip"]}, "give at least one action and none twice"),
        ({"on_nonfinite": ["ignore"]}, "'skip', 'quarantine', 'fallback', 'rollback' or 'stop'"),
        ({"adaptive_clip": True}, "adaptive_clip needs guard.spike_threshold"),
        ({"rollback_lr": 1.0}, "less than 1"),
        ({"spike_window": 19}, "greater than or equal to 20"),
        ({"monitor_every": -1}, "greater than or equal to 0"),
        ({"max_skips": True}, "should be a number, not true"),
        ({"spike_threshold": False}, "should be a number, not false"),
    ],
)
def test_a_guard_that_cannot_work_is_refused(values: dict[str, Any], guard: dict[str, Any], words: str) -> None:
    with pytest.raises(DitLoraError, match="guard") as error:
        parse_recipe({**values, "guard": guard}, "r")
    assert words in str(error.value)


def test_the_guard_goes_on_by_default_and_stops_at_once_where_told_to(values: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(values))
    actions = load_recipe(path).guard.on_nonfinite
    assert actions == ("skip", "quarantine", "fallback", "rollback", "stop")
    assert load_recipe(path, ["guard.on_nonfinite=[stop]"]).guard.on_nonfinite == ("stop",)


FULL = {"optim": {"groups": {"backbone": {"lr": 1e-4}}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"fps": None}}, "fps is missing"),
        ({"data": {"flip": True}}, "flip applies only to images"),
        ({"model": {"from_scratch": {}}}, "model.from_scratch needs train.mode: full"),
        ({"train": {"mode": "full"}}, "optim.groups.backbone is missing"),
        ({**FULL, "train": {"mode": "full"}, "lora": {"rank": 8}}, "lora does not apply"),
        (
            {
                "train": {"mode": "full"},
                "optim": {"groups": {"backbone": {"lr": 1e-4}, "adapter": {"lr": 1e-5}}},
            },
            "train.mode: full has no adapter",
        ),
        *[
            (
                {"train": {"deterministic": True}, "kernels": {"attention": name}},
                f"the backward pass of kernels.attention: {name} adds in no fixed order",
            )
            for name in ("flash", "_flash_3_hub", "flash_4_hub", "xformers", "flash_attention_2")
        ],
    ],
)
def test_values_that_contradict_each_other_are_refused(
    values: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    for section, section_values in change.items():
        values[section] = {**values.get(section, {}), **section_values}
    with pytest.raises(DitLoraError) as error:
        parse_recipe(values, "r")
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["auto", "native", "_native_flash", "sdpa"])
def test_pytorchs_own_attention_may_be_deterministic(values: dict[str, Any], name: str) -> None:
    values["train"]["deterministic"] = True
    values["kernels"] = {"attention": name}
    assert parse_recipe(values, "r").train.deterministic


def test_a_full_recipe_and_one_of_images_read_back_equal(values: dict[str, Any], tmp_path: Path) -> None:
    values |= FULL
    values["train"]["mode"] = "full"
    values["model"]["from_scratch"] = {"num_layers": 2}
    values["data"] = {"path": "images", "height": 32, "width": 32, "flip": True}
    recipe = parse_recipe(values, "r")
    path = tmp_path / "config.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe
    assert recipe.data.frames == 1
    assert "\nlora:" not in path.read_text()
    assert "adapter:" not in path.read_text()


def test_what_a_recipe_contradicts_as_a_whole_is_said_without_the_whole_recipe(
    values: dict[str, Any],
) -> None:
    values["validation"] = {"prompts": ["a", "b"], "media": ["one.mp4"]}
    with pytest.raises(DitLoraError) as error:
        parse_recipe(values, "test")
    assert str(error.value).endswith("\n  - validation.media needs one file for each prompt; got 1 files, 2 prompts")
