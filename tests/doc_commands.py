"""Commands of the pages: checked as they are written, by the parsers that read them, and made small enough to run."""

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from doc_shell import COMMANDS, Started
from launching import ROOT
from torch.distributed.run import get_args_parser
from typer.exceptions import TyperException

from dit_lora.cli.app import app
from dit_lora.config.load import load_folder_config, load_recipe
from dit_lora.config.recipe import Recipe

_HALF_SIZE = ("data.height=32", "data.width=48")
_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+=.*", re.DOTALL)


class Commands:
    """Checks of commands, and their small forms; the tables are those of `doc_pages`, `hub` with paths."""

    def __init__(
        self,
        hub: dict[str, Path],
        small: dict[str, Sequence[str]],
        cheap: dict[str, Sequence[str]],
    ) -> None:
        self.hub, self.small, self.cheap = hub, small, cheap

    def started(self, words: list[str], folder: Path) -> Started:
        """What is run of a command; an `AssertionError` or `SystemExit` says what is wrong with it."""
        return self._read(words, folder, runs=True)

    def check(self, block: str, folder: Path) -> int:
        """Check every command that we know in a block that is not run; how many there were."""
        count = 0
        for command in _simple_commands(block):
            if command[0] == "cd":
                folder /= command[1]
                assert folder.is_dir(), f"no folder {command[1]}"
            elif command[0] in COMMANDS:
                self._read(command, folder, runs=False)
                count += 1
        return count

    def _read(self, words: list[str], folder: Path, *, runs: bool) -> Started:
        name, args = words[0], words[1:]
        if name == "accelerate":
            assert args[:1] == ["launch"], f"accelerate {args[:1]}: only launch is known here"
            return self._accelerate(args[1:], folder, runs=runs)
        if name == "torchrun" or (name == "python" and args[:2] == ["-m", "torch.distributed.run"]):
            return self._torchrun(args if name == "torchrun" else args[2:], folder, runs=runs)
        if name == "dit-lora":
            return self._script(["-m", "dit_lora", *args], folder, runs=runs)
        if name == "python":
            return self._script(args, folder, runs=runs)
        assert not runs, f"{name} is not run by tests: put <!-- not run: REASON --> above the block"
        _OTHERS[name](args, folder)
        return Started(())

    def _accelerate(self, args: list[str], folder: Path, *, runs: bool) -> Started:
        options = launch_command_parser().parse_args(_plain(args))
        ranks = options.num_processes or 1
        if options.config_file:
            config = load_config_from_file(str(folder / options.config_file))
            ranks = options.num_processes or config.num_processes
        assert not runs or ranks == 1, f"{ranks} processes: put <!-- not run: REASON --> above the block"
        script = [options.training_script, *options.training_script_args]
        return self._script([*(["-m"] if options.module else []), *script], folder, runs=runs)

    def _torchrun(self, args: list[str], folder: Path, *, runs: bool) -> Started:
        options = get_args_parser().parse_args(_plain(args))
        ranks = int(options.nproc_per_node)
        assert not runs or ranks <= 2, f"{ranks} processes: put <!-- not run: REASON --> above the block"
        script = [options.training_script, *options.training_script_args]
        started = self._script([*(["-m"] if options.module else []), *script], folder, runs=runs)
        return Started(started.words, ranks)

    def _script(self, words: list[str], folder: Path, *, runs: bool) -> Started:
        if words[0] == "-m":
            assert words[1] == "dit_lora" or words[1].startswith("benchmarks."), words[1]
            if words[1] == "dit_lora":
                _check_verb(words[2:])
            head, args = words[:2], words[2:]
        else:
            assert (folder / words[0]).is_file(), f"no file {words[0]}"
            head, args = words[:1], words[1:]
        recipe = _recipe_of(args, folder)
        args = [self._local(word) for word in args]
        args = [word for word in args if word != "--serve"]  # until Ctrl-C
        option, *value = self.cheap.get(args[0] if args else "", [""])
        if option and option not in args:
            args += [option, *value]
        if recipe is not None:
            args += self._small(recipe)
        return Started((*head, *args))

    def _local(self, word: str) -> str:
        for name in sorted(self.hub, key=len, reverse=True):
            word = word.replace(name, str(self.hub[name]))
        return word

    def _small(self, recipe: Recipe) -> list[str]:
        """Overrides of a recipe for a GPU that make it one for a test; smoke recipes run nearly as they are."""
        if recipe.model.path not in self.hub:
            steps = ["train.steps=20"] if recipe.train.steps > 100 else []
            is_long = recipe.chat is None and recipe.train.steps > 20
            return [*steps, *(_HALF_SIZE if is_long else ())]
        small = self.small["chat" if recipe.chat else "diffusion"]
        return [f"model.path={self.hub[recipe.model.path]}", *small]


def _plain(args: Sequence[str]) -> list[str]:
    """Without shell variables, which stand for a number of a node or of processes."""
    return [re.sub(r"\$\w+|\$\{\w+\}", "1", word) for word in args]


def _check_verb(args: Sequence[str]) -> None:
    """A verb of dit-lora, with its options and arguments, as Typer reads them; nothing is run."""
    command: Any = typer.main.get_command(app)
    remaining = list(args)
    while hasattr(command, "commands") and remaining and not remaining[0].startswith("-"):
        assert remaining[0] in command.commands, f"no verb {remaining[0]!r}"
        command = command.commands[remaining.pop(0)]
    if not hasattr(command, "commands"):
        try:
            command.make_context(str(command.name), remaining)
        except typer.Exit:  # --help
            return
        except TyperException as error:
            raise AssertionError(f"dit-lora {' '.join(args)}: {error}") from error


def _recipe_of(args: Sequence[str], folder: Path) -> Recipe | None:
    """The first argument that is a recipe, with the overrides among the others; refused as training would."""
    files = [word for word in args if word.endswith(".yaml") and not _OVERRIDE.fullmatch(word)]
    overrides = [word for word in args if _OVERRIDE.fullmatch(word)]
    if not files:
        if args[:1] == ["audit"]:  # of a folder, they say where its references and masks are
            load_folder_config(args[1], overrides)
            return None
        assert not overrides, f"overrides of no recipe: {overrides}"
        return None
    path = folder / files[0]
    if "config-file" in " ".join(args) or "--keep" in args:
        return None
    return load_recipe(path, overrides)


def _simple_commands(block: str) -> Iterator[list[str]]:
    """The commands of a script, with `VAR=value` before them left out."""
    text = re.sub(r"\\\n", " ", block)
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()<>")
        lexer.whitespace_split, command = True, []
        for word in [*lexer, ";"]:
            if re.fullmatch(r"[;|&()<>]+", word):
                if command:
                    yield command
                command = []
            elif command or not re.fullmatch(r"\w+=.*", word):
                command.append(word)


def _check_pip(args: Sequence[str], folder: Path) -> None:
    assert args[:1] == ["install"], args
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in args:
        match = re.fullmatch(r"(?:\.|dit-lora)\[(.*)\]", word)
        unknown = set(match[1].split(",")) - set(project["optional-dependencies"]) if match else ()
        assert not unknown, f"pyproject.toml has no extra {sorted(unknown)}"
        assert not word.endswith(".txt") or (folder / word).is_file(), f"no file {word}"


def _check_make(args: Sequence[str], _folder: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    unknown = {word for word in args if "=" not in word} - set(targets)
    assert not unknown, f"Makefile has no target {sorted(unknown)}"


def _check_file(args: Sequence[str], folder: Path) -> None:
    assert (folder / args[0]).is_file(), f"no file {args[0]}"
    _recipe_of(args[1:], folder)


def _unchecked(_args: Sequence[str], _folder: Path) -> None:
    """Another project's command, whose parser is not at hand."""


_OTHERS = {
    "pip": _check_pip,
    "make": _check_make,
    "sbatch": _check_file,
    "hf": _unchecked,
    "ffmpeg": _unchecked,
    "lmms-eval": _unchecked,
}
