"""What ships beside the code: every recipe can be described, and written into a folder where its header is true."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.config import catalog
from dit_lora.config.catalog import (
    PackagedRecipe,
    find_packaged_files_root,
    find_recipe,
    list_recipe_names,
    write_run_folder,
)
from dit_lora.config.load import build_recipe_schema, load_recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_default_recipes

ROOT = Path(__file__).parents[3]
TASKS = {
    "text-to-video",
    "image-to-image",
    "image-to-video",
    "video-to-video",
    "text-to-image",
    "class-to-image",
    "class-to-video",
    "video chat",
}


def test_a_checkout_names_every_recipe_where_it_lies() -> None:
    assert find_packaged_files_root() == ROOT
    paths = [path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*.yaml")]
    assert sorted(list_recipe_names()) == sorted(path.with_suffix("").as_posix() for path in paths)
    assert len(paths) >= 35
    assert list_recipe_names()[0] == "demo/moon"
    assert list_recipe_names()[1].startswith("smoke/")


def test_every_family_has_a_default_of_its_own() -> None:
    for family, name in get_default_recipes().items():
        record = PackagedRecipe.from_name(family, get_default_recipes()).to_json_entry(get_default_recipes())
        assert (record["name"], record["family"], record["default"]) == (name, family, True)


@pytest.mark.parametrize("name", list_recipe_names())
def test_a_recipe_in_a_folder_of_its_own_is_the_same_and_its_header_is_true_there(name: str, tmp_path: Path) -> None:
    recipe = PackagedRecipe.from_name(name)
    run_folder = write_run_folder(recipe, tmp_path / "run", recipe.accelerate_config)
    assert [path.name for path in run_folder] == [
        recipe.file_name,
        "lora.py",
        f"{recipe.accelerate_config}.yaml",
        "schema.json",
    ]
    assert load_recipe(run_folder[0]) == load_recipe(ROOT / "recipes" / f"{name}.yaml")
    header = run_folder[0].read_text().split("\nmodel:")[0]
    assert header.startswith("# yaml-language-server: $schema=schema.json\n")
    assert not re.search(r"recipes/|accelerate_configs/", header)
    # Every file that the launch names is there; its options are the shipped header's.
    launch = recipe.build_launch_command(recipe.accelerate_config)
    assert f"#   {launch}\n" in header + "\n"
    arguments = shlex.split(launch)
    assert arguments[:4] == ["accelerate", "launch", "--quiet", "--config_file"]
    file_names = [word for word in arguments if word.endswith((".yaml", ".py"))]
    assert file_names == [f"{recipe.accelerate_config}.yaml", "lora.py", recipe.file_name]
    assert all((tmp_path / "run" / word).is_file() for word in file_names)
    record = recipe.to_json_entry(get_default_recipes())
    assert record["task"] in TASKS
    assert record["memory"]
    assert record["time"]
    assert record["model"] == load_recipe(run_folder[0]).model.path
    assert record["mode"] == load_recipe(run_folder[0]).train.mode


def test_the_script_in_a_folder_of_its_own_differs_in_what_it_says_alone(tmp_path: Path) -> None:
    recipe = PackagedRecipe.from_name("sana", get_default_recipes())
    write_run_folder(recipe, tmp_path, "ddp")
    text = (tmp_path / "lora.py").read_text()
    assert "accelerate launch lora.py sana_600m_512.yaml" in text
    assert "recipes/" not in text
    trees = [ast.parse(text), ast.parse((ROOT / "recipes" / "lora.py").read_text())]
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = ""
    assert ast.dump(trees[0]) == ast.dump(trees[1])
    assert json.loads((tmp_path / "schema.json").read_text()) == build_recipe_schema()
    shipped = ROOT / "accelerate_configs" / "ddp.yaml"
    assert (tmp_path / "ddp.yaml").read_text() == shipped.read_text()


def test_options_of_a_header_that_belong_to_its_own_topology_stay_with_it() -> None:
    recipe = PackagedRecipe.from_name("videochat2/mistral_stage3")
    assert "--num_processes 8 lora.py" in recipe.build_launch_command("ddp")
    assert "--num_processes" not in recipe.build_launch_command("one_gpu")
    assert recipe.build_launch_command("ddp").endswith("videochat2_mistral_stage3.yaml data.media=videos")
    assert recipe.commands[0].startswith("dit-lora convert videochat2 videochat2-mistral-stage2 --llm")
    assert "\\" not in " ".join(recipe.commands)


def test_names_are_taken_as_users_write_them() -> None:
    for name in ("cogvideox/5b_t2v", "cogvideox/5b_t2v.yaml", "recipes/cogvideox/5b_t2v.yaml"):
        assert PackagedRecipe.from_name(name).file_name == "cogvideox_5b_t2v.yaml"
    assert PackagedRecipe.from_name("cogvideox", get_default_recipes()).file_name == "cogvideox_2b_t2v.yaml"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cogvidoex/5b_t2v", "did you mean cogvideox/5b_t2v or"),
        ("5b_t2v", "did you mean cogvideox/5b_t2v or"),
        ("qwen", "did you mean chat/qwen or smoke/qwen"),
        ("cogvideo", "did you mean cogvideox or"),
        ("zzz", "no recipe 'zzz'; see: dit-lora recipes"),
        ("../smoke/cogvideox", "no recipe"),
    ],
)
def test_an_unknown_recipe_gets_the_nearest_names(name: str, message: str) -> None:
    with pytest.raises(DitLoraError, match=message):
        PackagedRecipe.from_name(name, get_default_recipes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("# Task: ", "# Tasks: "), "recipe other/mine lacks Task; compare it with smoke/sd3"),
        (("recipes/lora.py", "train.py"), "lacks a launch command with recipes/lora.py"),
        (("\nmodel:", "\nmodels:"), "lacks a readable header and sections"),
        (("  path: tiny/sd3.5-medium ", "  path: [ "), "lacks a readable header and sections"),
    ],
)
def test_an_incomplete_recipe_of_another_package_is_a_warning_where_all_are_listed(
    change: tuple[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "recipes" / "smoke" / "sd3.yaml").read_text()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.yaml").write_text(text.replace(*change))
    (tmp_path / "other" / "whole.yaml").write_text(text)
    monkeypatch.setattr(catalog, "_list_recipe_folders", lambda: (ROOT / "recipes", tmp_path))
    result = CliRunner().invoke(app, ["recipes", "--family", "sd3"], catch_exceptions=False)
    assert "other/whole" in result.stdout
    assert "other/mine" not in result.stdout
    assert "warning: recipe other/mine lacks" in result.stderr
    with pytest.raises(DitLoraError, match=message):
        CliRunner().invoke(app, ["init", "other/mine", str(tmp_path / "run")], catch_exceptions=False)


def test_a_file_of_another_package_that_is_no_text_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other" / "folder.yaml").mkdir(parents=True)
    (tmp_path / "other" / "latin.yaml").write_bytes("# Title: caf\xe9\n".encode("latin-1"))
    monkeypatch.setattr(catalog, "_list_recipe_folders", lambda: (ROOT / "recipes", tmp_path))
    result = CliRunner().invoke(app, ["recipes", "--family", "sd3"], catch_exceptions=False)
    assert result.exit_code == 0
    for name in ("folder", "latin"):
        assert f"warning: cannot read recipe other/{name}, " in result.stderr
    assert not {"other/folder", "other/latin"} & {recipe.name for recipe in catalog.load_packaged_recipes()}


def test_recipes_of_this_package_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "sd3.yaml").write_text("model: {family: other}\n")
    monkeypatch.setattr(catalog, "_list_recipe_folders", lambda: (ROOT / "recipes", tmp_path))
    assert find_recipe("smoke/sd3") == ROOT / "recipes" / "smoke" / "sd3.yaml"


def test_a_folder_of_recipes_is_listed() -> None:
    with pytest.raises(DitLoraError, match="several recipes") as error:
        PackagedRecipe.from_name("smoke")
    listed_names = re.findall(r"  - (.*)", str(error.value))
    assert listed_names == [name for name in list_recipe_names() if name.startswith("smoke/")]


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(DitLoraError, match="is not empty; choose another folder"):
        write_run_folder(PackagedRecipe.from_name("dit", get_default_recipes()), tmp_path, "cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(DitLoraError, match=r"cannot write .*mine\.txt"):
        write_run_folder(PackagedRecipe.from_name("dit", get_default_recipes()), tmp_path / "mine.txt", "cpu")
