"""JSON of a known shape is read as that shape, or refused in one line that names the file and the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from dit_lora.config.records import (
    AdapterConfig,
    BundleFacts,
    Manifest,
    RunFacts,
    RunMetadata,
    parse_typed_json,
    read_typed_json,
)
from dit_lora.errors import DitLoraError

CODE = "x; import os; os.system('touch ran')"


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("[1]", Manifest, "is damaged: Input should be a valid dictionary"),
        ('{"sha256": {"a": 1}}', Manifest, "sha256.a: Input should be a valid string; got 1"),
        (r'{"sha256": {"a\nerror: b": 1}}', Manifest, r"sha256.a\nerror: b: Input should"),
        (r'{"data": {"kind": "a\nerror: b"}}', RunFacts, r"Input tag 'a\nerror: b'"),
        ('{"sha256": {}, "sha256": {"a": "b"}}', Manifest, "it holds 'sha256' twice"),
        ('{"sha256": ' + "[" * 100_000, Manifest, "nested deeper"),
        ('{"sha256": ' + "9" * 5000 + "}", Manifest, "more than 100 digits"),
        ('{"rank": ' + "9" * 90 + "}", RunMetadata, "less than or equal"),
        ('{"alpha": NaN}', RunMetadata, "alpha"),
        ('{"alpha": 1e999}', RunMetadata, "alpha"),
        ('{"rank": true}', RunMetadata, "rank"),
        ('{"part": "../../x"}', RunMetadata, "part"),
        ('{"under": [{"name": "a"}]}', RunMetadata, "under.0.scale: Field required; got nothing"),
        ('{"r": "4"}', AdapterConfig, "r: Input should be a valid integer"),
        ('{"rank_pattern": [1]}', AdapterConfig, "rank_pattern"),
        ("{}", BundleFacts, "format: Field required"),
        (b"\xff\xfe{", Manifest, "utf-8"),
    ],
)
def test_what_is_of_another_shape_is_one_line(text: str | bytes, kind: Any, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DitLoraError) as error:
        read_typed_json(file, kind)
    message = str(error.value)
    assert reason in message
    assert str(file) in message
    assert "\n" not in message
    assert len(message) < 500


def test_what_newer_versions_write_is_kept_and_integers_stay_so() -> None:
    values = {"alpha": 8, "video": {"frames": 9, "fps": None}, "future": {"key": [1]}}
    assert json.dumps(parse_typed_json(json.dumps(values), RunMetadata, "a")) == json.dumps(values)


FACTS: dict[str, Any] = {
    "data": {
        **{"kind": "images", "datasets": [], "left_out": 0},
        **{"clips": 2, "samples": 2, "seconds": None},
    },
    "pipeline": {
        **{"class": "CogVideoXPipeline", "module": "diffusers", "loads_lora": True},
        **{"condition": "class_labels", "label": [1], "labels_as_tensor": True},
        **{"from_image": False, "arguments": {"guidance_scale": 6.0}, "output": "frames"},
        **{"seed": 0, "fps": 8, "dtype": "torch.bfloat16", "in_fp32": ["vae"]},
    },
    "model": {"class": "LlavaModel", "module": "transformers", "library": "transformers"},
}


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("pipeline", "class", CODE),
        ("pipeline", "class", "A\nimport os"),
        ("pipeline", "module", CODE),
        ("pipeline", "module", "os\n"),
        ("pipeline", "label", CODE),
        ("pipeline", "label", [CODE]),
        ("pipeline", "arguments", {CODE: 1}),
        ("pipeline", "arguments", {"a": [CODE]}),
        ("pipeline", "output", CODE),
        ("pipeline", "seed", CODE),
        ("pipeline", "fps", CODE),
        ("pipeline", "dtype", CODE),
        ("pipeline", "dtype", "torch.float32\n"),
        ("pipeline", "in_fp32", [CODE]),
        ("model", "class", CODE),
        ("model", "module", CODE),
    ],
)
def test_facts_hold_no_code(part: str, field: str, value: Any) -> None:
    assert parse_typed_json(json.dumps(FACTS), RunFacts, "facts.json") == FACTS
    changed_facts = {**FACTS, part: {**FACTS[part], field: value}}
    with pytest.raises(DitLoraError, match=rf"facts\.json is damaged: {part}\.{field}"):
        parse_typed_json(json.dumps(changed_facts), RunFacts, "facts.json")
