"""A first hour at the command: recipes, a folder to start from, help that says what to type, completion."""

import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dit_lora.cli.app import EXAMPLES, PANELS, app
from dit_lora.config.catalog import list_recipe_names
from dit_lora.errors import DitLoraError
from dit_lora.families import FAMILIES

runner = CliRunner()
COMMAND: Any = typer.main.get_command(app)


def invoke(*arguments: object) -> str:
    result = runner.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_recipes_lists_all_with_task_memory_and_time() -> None:
    table = invoke("recipes")
    assert [name for name in list_recipe_names() if name not in table] == []
    assert re.search(r"smoke/cogvideox +text-to-video +0.6 GiB +10 s +cogvideox-2b", table)
    assert re.search(r"cogvideox/5b_t2v +text-to-video +21 GiB +- ", table)
    assert re.search(r"chat/qwen +video chat +16.0 GiB \+ ", table)
    records = json.loads(invoke("recipes", "--json"))["recipes"]
    assert [record["name"] for record in records] == list_recipe_names()
    assert sum(record["default"] for record in records) == len(FAMILIES)


def test_recipes_of_one_family() -> None:
    records = json.loads(invoke("recipes", "--family", "sana_video", "--json"))["recipes"]
    assert [record["name"] for record in records] == ["smoke/sana_video", "sana/video_2b"]
    with pytest.raises(DitLoraError, match="unknown family 'sora'; choose one of anima, chroma, cogvideox"):
        runner.invoke(app, ["recipes", "--family", "sora"], catch_exceptions=False)


def test_init_says_what_to_type_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = invoke("init", "cogvideox", "my run").splitlines()
    assert [line.strip() for line in lines[-5:]] == [
        "cd 'my run'",
        "dit-lora caption clips --model Qwen/Qwen2.5-VL-7B-Instruct --recipe cogvideox_2b_t2v.yaml"
        "  # where captions are missing",
        "dit-lora audit cogvideox_2b_t2v.yaml",
        "dit-lora plan cogvideox_2b_t2v.yaml",
        "dit-lora train cogvideox_2b_t2v.yaml",
    ]
    assert "Put your data into clips, or change data.path in cogvideox_2b_t2v.yaml." in "\n".join(lines)
    assert "dit-lora recipes --family cogvideox" in "\n".join(lines)


def test_init_of_a_smoke_recipe_says_how_to_make_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = invoke("init", "smoke/sana", ".").splitlines()
    assert lines[1:] == [
        "Next:",
        "  dit-lora tiny sana-600m tiny/sana-600m",
        "  dit-lora tiny shapes images --frames 1",
        "  dit-lora train smoke_sana.yaml",
    ]


def test_init_takes_another_launch(tmp_path: Path) -> None:
    invoke("init", "videochat2", tmp_path / "run", "--accelerate", "one_gpu")
    text = (tmp_path / "run" / "videochat2_mistral_stage3.yaml").read_text()
    assert "--config_file one_gpu.yaml lora.py videochat2_mistral_stage3.yaml" in text
    assert (tmp_path / "run" / "one_gpu.yaml").is_file()
    command = ["init", "dit", str(tmp_path / "other"), "--accelerate", "two"]
    with pytest.raises(DitLoraError, match="unknown Accelerate config 'two'; choose one of cpu, ddp"):
        runner.invoke(app, command, catch_exceptions=False)
    assert not (tmp_path / "other").exists()


def verbs(command: Any = COMMAND, parent: str = "") -> dict[str, Any]:
    """Every verb and group of verbs by what a user types."""
    commands = {}
    for name, inner in command.commands.items():
        commands[f"{parent}{name}"] = inner
        if "commands" in vars(inner):
            commands |= verbs(inner, f"{parent}{name} ")
    return commands


def test_every_verb_has_a_panel_and_examples() -> None:
    tops = [verb.rpartition(".")[2] for panel in PANELS.values() for verb in panel]
    assert set(COMMAND.commands) == set(tops)
    assert set(verbs()) == set(EXAMPLES)
    for name, verb in verbs().items():
        assert all(f"dit-lora {example}" in verb.epilog for example in EXAMPLES[name])


@pytest.mark.parametrize("verb", EXAMPLES)
def test_every_example_is_one_that_its_verb_takes(verb: str) -> None:
    for example in EXAMPLES[verb]:
        arguments = shlex.split(example.split(" > ")[0])
        command = COMMAND
        while arguments and arguments[0] in getattr(command, "commands", {}):
            command = command.commands[arguments.pop(0)]
        assert example.startswith(verb)
        if arguments == ["--help"]:
            continue
        assert "commands" not in vars(command)
        command.make_context(verb, arguments)  # raises of an unknown option, a missing or wrong value


def test_without_arguments_the_help_comes_in_a_newcomers_order_and_says_what_to_type() -> None:
    output = runner.invoke(app, []).output
    panels = [output.index(f"─ {panel} ─") for panel in PANELS]
    assert panels == sorted(panels)
    verb_positions = [output.index(f"  dit-lora {verb}") for verb in ("doctor", "recipes", "init smoke/cog")]
    assert panels[-1] < verb_positions[0] < verb_positions[1] < verb_positions[2]
    assert output.split() == invoke("--help").split()


def completed(words: str, shell: str = "bash") -> list[str]:
    """What a shell is told at the end of these words, by typer's protocol."""
    line = ["dit-lora", *words.split(" ")]
    env = {
        "_DIT_LORA_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "\n".join(line),
        "COMP_CWORD": str(len(line) - 1),
        "_TYPER_COMPLETE_ARGS": " ".join(line),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    result = runner.invoke(app, [], env=env, prog_name="dit-lora", catch_exceptions=False)
    return result.stdout.split()


def test_recipes_families_launches_and_tiny_checkpoints_complete() -> None:
    assert completed("init cogvideox/5b") == ["cogvideox/5b_i2v", "cogvideox/5b_t2v"]
    assert completed("init lat") == ["latte", "latte/latte1_lora"]
    assert completed("recipes --family sana") == ["sana", "sana_video"]
    assert completed("init dit out --accelerate f") == ["fsdp2"]
    assert completed("tiny dit") == ["dit-tiny"]
    assert completed("tiny sh") == ["shapes"]


@pytest.mark.parametrize("verb", ["plan", "audit", "cache build", "cache verify", "show"])
def test_recipe_files_and_keys_complete(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one" / "two").mkdir(parents=True)
    for name in ("a.yaml", "b.txt", "one/two/c.yaml", "one/two/d.yaml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert completed(f"{verb} ") == ["a.yaml", "one/"]
    assert completed(f"{verb} o") == ["one/two/c.yaml", "one/two/d.yaml"]
    assert completed(f"{verb} a.yaml train.s") == [
        "train.steps=",
        "train.seed=",
        "train.save_every=",
        "train.stop_after=",
    ]


def test_keys_complete_down_to_their_values() -> None:
    assert completed("plan a.yaml optim.groups.adapter.l") == ["optim.groups.adapter.lr="]
    assert completed("plan a.yaml train.keep_b") == ["train.keep_best=", "train.keep_best=0"]
    assert completed("plan a.yaml train.mod")[1:] == ["train.mode=lora", "train.mode=full"]
    assert completed("plan a.yaml train.mode = l") == []  # bash's three words of train.mode=l


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_the_same(shell: str) -> None:
    assert any("latte/latte1_lora" in word for word in completed("init latte/", shell))


def test_completion_installs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the shell's own files below the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for shell, file in (
        ("bash", ".bash_completions/dit-lora.sh"),
        ("zsh", ".zfunc/_dit-lora"),
        ("fish", ".config/fish/completions/dit-lora.fish"),
    ):
        monkeypatch.setattr("shellingham.detect_shell", lambda shell=shell: (shell, shell))
        result = runner.invoke(app, ["--install-completion"], prog_name="dit-lora")
        assert result.exit_code == 0, result.output
        assert f"_DIT_LORA_COMPLETE=complete_{shell}" in (tmp_path / file).read_text()


def test_completing_keys_is_instant() -> None:
    completed("plan a.yaml ")
    start = time.process_time()
    assert len(completed("plan a.yaml ")) > 100
    assert time.process_time() - start < 0.2
