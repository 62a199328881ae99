"""Every code block of every page and README runs as it is printed (docs/contributing.md says how)."""

import contextlib
import io
import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doc_pages
import pytest
import yaml
from accelerate.state import AcceleratorState
from doc_blocks import Block, blocks, missing
from doc_commands import Commands
from doc_pages import Shared
from doc_shell import Shell
from launching import ROOT

from dit_lora.config.load import load_recipe, parse_recipe
from dit_lora.config.recipe import Recipe

pytestmark = pytest.mark.slow  # a long file, which begins early

PAGES = [page for page in doc_pages.PAGES if "```" in page.read_text()]


@pytest.fixture(scope="module")
def shared(
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Shared:
    return Shared(tiny_checkpoints, shape_clips, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def reader(tmp_path: Path, shared: Shared) -> Any:
    """What runs a page: its blocks, in its folder, one after the other."""
    return lambda page: Reader(page, tmp_path, shared)


# Other tests in CI run what these pages show: faults (benchmarks/faults), runs of two ranks
# (recipes/test_distributed.py), runs that begin with a LoRA (recipes/test_continue.py, test_second_model.py), pushes
# (hub/test_push.py), and the first commands (README.md, docs/first_lora.md). Of these pages CI checks the commands'
# names and options.
LONG_PAGES = tuple(
    ROOT / "docs" / f"{name}.md"
    for name in ("export", "hub", "index", "memory", "numerics", "scaling", "starts", "verify")
)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=pytest.mark.thorough if page in LONG_PAGES else ())
        for page in PAGES
    ],
)
def test_every_block_runs(page: Path, reader: Callable[[Path], "Reader"]) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    with reader(page) as reading:
        for block in blocks(page):
            reading.read(block)
    AcceleratorState._reset_state(reset_partial_state=True)


# Commands of index.md and numerics.md read what earlier commands of the page write.
@pytest.mark.parametrize(
    "page", [page for page in LONG_PAGES if page.stem not in ("index", "numerics")], ids=lambda page: page.stem
)
def test_every_command_of_a_long_page_has_known_options(page: Path, reader: Callable[[Path], "Reader"]) -> None:
    with reader(page) as reading:
        for block in blocks(page):
            if block.says("file"):
                reading.read(block)
            elif block.language in ("bash", "console") and not block.says("example"):
                reading._check(block)


@pytest.mark.parametrize("what", ["not run", "example"])
def test_what_is_not_run_is_listed_with_its_reason(what: str) -> None:
    listed = {"not run": doc_pages.NOT_RUN, "example": doc_pages.EXAMPLES}[what]
    unrun = {str(page.relative_to(ROOT)): Counter(r for b in blocks(page) if (r := b.says(what))) for page in PAGES}
    assert {page: reasons for page, reasons in unrun.items() if reasons} == {
        page: Counter(reasons) for page, reasons in listed.items()
    }


class Reader:
    """One page on its way: folder, shell, names, and what the last command said."""

    def __init__(self, page: Path, folder: Path, shared: Shared) -> None:
        self.folder, self.shared = folder, shared
        self.names = doc_pages.prepare(page, folder, shared)
        hub = {name: shared.tiny[variant] for name, variant in doc_pages.HUB.items()}
        self.commands = Commands(hub, doc_pages.SMALL, doc_pages.CHEAP)
        self.shell = Shell(folder, self.commands.started)
        self.words = {**doc_pages.PYTHON, **{name: str(path) for name, path in hub.items()}}
        self.said: tuple[int, str] | None = None

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.shell.__exit__()

    def read(self, block: Block) -> None:
        doc_pages.your_own(block.page, self.folder, self.shared)
        if name := block.says("file"):
            path = self.shell.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.says("not run"):
            self._check(block)
        elif not block.says("example"):
            getattr(self, f"_{block.language}")(block)

    def _check(self, block: Block) -> None:
        if block.language == "python":
            compile(block.text, str(block), "exec")
        elif block.language in ("bash", "console"):
            script = _commands(block)
            process = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
            assert process.returncode == 0, f"{block}: {process.stderr}"
            commands = self.commands.check(script, self.shell.folder)
            assert commands, f"{block}: none of its commands is known to tests/doc_commands.py"
        else:
            raise AssertionError(f"{block}: only commands and python are marked as not run")

    def _bash(self, block: Block) -> None:
        process = self.shell.run(block.text)
        output = process.stdout
        code = int(block.says("exit code") or 0)
        assert process.returncode == code, f"{block}: ended with {process.returncode}\n{output[-3000:]}"
        self.said = block.heading, output

    def _console(self, block: Block) -> None:
        steps = block.text.split("\n$ ")
        for step in ["", *[step.removeprefix("$ ") for step in steps]][1:]:
            command, _, expected = step.partition("\n")
            self._bash(Block(**{**vars(block), "text": command}))
            self._compare(block, expected)

    def _python(self, block: Block) -> None:
        text = block.text
        for word in sorted(self.words, key=len, reverse=True):
            text = text.replace(word, self.words[word])
        output = io.StringIO()
        with (
            contextlib.chdir(self.shell.folder),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            exec(compile(text, str(block), "exec"), self.names)
        self.said = block.heading, output.getvalue()

    def _text(self, block: Block) -> None:
        self._compare(block, doc_pages.as_installed(block.text))

    def _compare(self, block: Block, expected: str) -> None:
        assert self.said, f"{block}: output of nothing; say <!-- example: REASON --> above it"
        heading, output = self.said
        assert heading == block.heading, f"{block}: its command is under another heading"
        missing_text = missing(expected, output)
        assert missing_text is None, (
            f"{output[-6000:]}\n--- {block}: not in this output, or not in this order: {missing_text}"
        )

    def _json(self, block: Block) -> None:
        try:
            json.loads(block.text)
        except json.JSONDecodeError:
            for line in block.text.strip().splitlines():
                json.loads(line)

    def _yaml(self, block: Block) -> None:
        values = yaml.safe_load(block.text)
        assert isinstance(values, dict), f"{block}: no mapping"
        if set(values) & {"compute_environment", "distributed_type"}:
            path = self.folder / "given.yaml"
            path.write_text(block.text)
            self.commands.check("accelerate launch --config_file given.yaml -m dit_lora families", self.folder)
            return
        assert set(values) <= set(Recipe.model_fields), f"{block}: unknown {set(values)}"
        parse_recipe(_merged(_base(values), values), source=str(block))


def _commands(block: Block) -> str:
    if block.language == "bash":
        return block.text
    lines = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
    return "\n".join(lines)


def _base(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe that the part can be of."""
    sources = values.get("data", {}).get("sources", [])
    chat = "chat" in values or any("media" in source for source in sources)
    name = "videochat2/mistral_stage3" if chat else "cogvideox/5b_t2v"
    base = load_recipe(ROOT / "recipes" / f"{name}.yaml").model_dump(mode="json")
    if sources:
        del base["data"]["path"]
    return base


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{key: _merged(base.get(key), value) for key, value in over.items()}}
