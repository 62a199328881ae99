"""Words that reach the code of a model card are literals in it, whoever wrote them."""

import ast
from pathlib import Path
from typing import Any, cast

import pytest

from dit_lora.adapters.diffusers_format import BASE_FILE
from dit_lora.errors import DitLoraError
from dit_lora.hub.contents import PublishedContents
from dit_lora.hub.usage import render_usage_code

HOSTILE = '")\nimport os; os.system("touch ran") #\\'
PIPELINE: dict[str, Any] = {
    **{"class": "CogVideoXPipeline", "module": "diffusers", "loads_lora": True},
    **{"condition": "prompt", "label": None, "labels_as_tensor": False, "from_image": False},
    **{"arguments": {"negative_prompt": HOSTILE}, "output": "frames", "seed": 0, "fps": 8},
    **{"dtype": "torch.bfloat16", "in_fp32": ["vae"]},
}


def contents(facts: dict[str, Any], **made: Any) -> PublishedContents:
    header = {"family": "cogvideox", "base_model": f"a/{HOSTILE}", "revision": HOSTILE, **made}
    return PublishedContents(cast(Any, None), facts, header, "lora", {BASE_FILE: Path("a")})


def calls(code: str) -> set[str]:
    return {ast.unparse(n.func) for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call)}


def test_no_word_becomes_code() -> None:
    code = render_usage_code(contents({"pipeline": PIPELINE}), f"me/{HOSTILE}", HOSTILE)
    assert "os.system" not in calls(code)
    # Literals: the repository twice, base and revision, both prompts.
    assert code.count("import os") == 6
    chat = contents(
        {"model": {"class": "A", "module": "transformers", "library": "transformers"}},
        dtype="torch.float32",
    )
    assert "os.system" not in calls(render_usage_code(chat, f"me/{HOSTILE}", HOSTILE))


def test_a_dtype_of_the_header_is_one() -> None:
    chat = contents(
        {"model": {"class": "A", "module": "transformers", "library": "transformers"}},
        dtype="torch.float32); import os; (",
    )
    with pytest.raises(DitLoraError, match="dtype"):
        render_usage_code(chat, "me/a", "")
