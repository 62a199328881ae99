"""Regular expressions of other people's adapters: accepted if they match in bounded time, else refused in one line."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from exported import trained
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dit_lora.adapters.diffusers_format import ADAPTER_FILE
from dit_lora.adapters.patterns import find_unbounded_regex_reason, require_bounded_regex_patterns
from dit_lora.cli.app import app
from dit_lora.errors import DitLoraError

# Of each, an exponential or a high polynomial number of ways to match is known.
EVIL = [
    "(a+)+$",
    "(a|a)*b",
    "(a|aa)+$",
    r"(\w+\.)*x",
    "(.*)*x",
    "(.*){20}x",
    "a?" * 40 + "a" * 40,
    "(a|a)" * 40 + "b",
    ".*.*.*.*x",
    r"(a*)\1b",
    "(?=(a+)+$)a",
]
PLAIN = [
    "to_q",
    r"^transformer_blocks\.0\.attn1\.to_q",
    r".*\.to_[qkv]",
    r"blocks\.\d+\.attn.*\.to_(q|k)",
    "|".join(re.escape(f"transformer_blocks.{n}.attn1.to_q") for n in range(800)),
    r"(?=(?:.*\.)?(?:language_model|visual)\.)(?:.*\.)?(?:q_proj|k_proj|v_proj|o_proj|up_proj)",
]


@pytest.mark.parametrize("pattern", EVIL)
def test_expressions_that_may_run_for_years_are_refused(pattern: str) -> None:
    assert find_unbounded_regex_reason(pattern)
    for config in (
        {"target_modules": pattern},
        {"exclude_modules": pattern},
        {"layers_pattern": [pattern]},
        {"alpha_pattern": {pattern: 1}},
        {"rank_pattern": {pattern: 1}},
    ):
        with pytest.raises(DitLoraError, match="a/file: ") as error:
            require_bounded_regex_patterns(config, "a/file")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("pattern", PLAIN)
def test_expressions_that_people_write_are_taken_and_are_quick(pattern: str) -> None:
    assert find_unbounded_regex_reason(pattern) is None
    require_bounded_regex_patterns({"target_modules": pattern, "rank_pattern": {pattern: 4}}, "x")
    start = time.process_time()
    get_pattern_key([pattern], "a." * 60 + "b")
    assert time.process_time() - start < 1


def test_a_name_in_a_list_of_targets_is_no_expression() -> None:
    require_bounded_regex_patterns({"target_modules": ["(a+)+$"]}, "x")
    assert "not a valid regular expression" in (find_unbounded_regex_reason("(") or "")
    with pytest.raises(DitLoraError, match="5,001 patterns"):
        require_bounded_regex_patterns({"rank_pattern": {str(n): 1 for n in range(5001)}}, "x")


@pytest.mark.parametrize("option", ["target_modules", "alpha_pattern", "rank_pattern"])
@pytest.mark.parametrize("command", ["verify", "export", "export --rank 2"])
def test_commands_refuse_such_a_file_at_once(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, command: str, option: str
) -> None:
    adapter = trained("cogvideox", tiny_checkpoints["cogvideox-2b"], tmp_path / "run")
    hostile_pattern = r"(\w+[._\d]*)+!"
    value: Any = hostile_pattern if option == "target_modules" else {hostile_pattern: 2}
    config = {"r": 4, "lora_alpha": 7, "target_modules": ["to_q"], option: value}
    header = json.dumps({f"transformer.{key}": value for key, value in config.items()})
    file = tmp_path / "theirs.safetensors"
    metadata = {"lora_adapter_metadata": header, "format": "pt"}
    save_file(load_file(adapter.folder / ADAPTER_FILE), file, metadata=metadata)
    args = [*command.split(), str(file), "--model", str(adapter.base)]
    args += [] if command == "verify" else ["--out", str(tmp_path / "out")]
    args += ["--to", "diffusers"] if command == "export" else []
    start = time.process_time()
    result = CliRunner().invoke(app, args)
    # The program shows such an error as one line.
    assert isinstance(result.exception, DitLoraError)
    assert f"{option} holds" in str(result.exception)
    assert "repeats a group" in str(result.exception)
    assert "\n" not in str(result.exception)
    assert time.process_time() - start < 30
