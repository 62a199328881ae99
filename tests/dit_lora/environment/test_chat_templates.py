"""Chat templates of a checkpoint have bounds on time, memory and output, wherever Transformers renders them."""

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import byte_tokenizer
from transformers import tokenization_utils_base

from dit_lora.environment import chat_templates
from dit_lora.environment.chat_templates import ChatTemplateError, limit_chat_template_rendering

MESSAGES = [{"role": "user", "content": "A disc?"}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def tokenizer() -> Any:
    limit_chat_template_rendering()
    # A process that is left from the last test has that test's MAX_SECONDS.
    tokenization_utils_base.render_jinja_template._stop_process()
    return byte_tokenizer()


def rendered(tokenizer: Any, template: str, **options: Any) -> Any:
    return tokenizer.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, **options)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.5 s"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "0.5 s",
        ),
        ("{{ 'a' * 7000000000 }}", "536,870,912 bytes"),
        ("{{ '%9999999999s' | format(1) }}", "536,870,912 bytes"),
        ("{{ 'a' * 20000000 }}", "writes more than 16,777,216 characters"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('no\nerror: forged') }}", "no error: forged"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_a_hostile_template_is_one_line(
    tokenizer: Any, template: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "MAX_SECONDS", 0.5 if reason == "0.5 s" else 60.0)
    start = time.monotonic()
    with pytest.raises(ChatTemplateError, match=reason) as error:
        rendered(tokenizer, template)
    assert time.monotonic() - start < 100
    assert "\n" not in str(error.value)
    assert rendered(tokenizer, PLAIN) == "<user>A disc?"


def test_a_template_that_is_always_slow_is_not_waited_for_with_every_sample(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "MAX_SECONDS", 0.5)
    slow = "{% for a in range(99999) %}{% for b in range(99998) %}{% endfor %}{% endfor %}"
    for _ in range(3):
        with pytest.raises(ChatTemplateError, match=r"takes more than 0.5 s"):
            rendered(tokenizer, slow)
    monkeypatch.setattr(chat_templates, "MAX_SECONDS", 60.0)
    start = time.monotonic()
    for _ in range(100):
        with pytest.raises(ChatTemplateError, match="3 times and is not rendered again"):
            rendered(tokenizer, slow)
    assert time.monotonic() - start < 30
    assert rendered(tokenizer, PLAIN) == "<user>A disc?"


def test_the_process_that_renders_holds_no_lock_of_its_parents(tokenizer: Any, tmp_path: Path) -> None:
    rendered(tokenizer, PLAIN)
    tokenization_utils_base.render_jinja_template._stop_process()  # the next template begins a process
    path = tmp_path / "lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert rendered(tokenizer, PLAIN) == "<user>A disc?"
    with path.open("w") as second_file:
        fcntl.flock(second_file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_other_templates_are_rendered_as_without_bounds(tokenizer: Any) -> None:
    assert rendered(tokenizer, PLAIN + "{% if add_generation_prompt %}<me>{% endif %}") == ("<user>A disc?")
    tokens = tokenizer.apply_chat_template(MESSAGES, chat_template=PLAIN)["input_ids"]
    assert tokens == tokenizer("<user>A disc?", add_special_tokens=False)["input_ids"]


def test_a_forked_process_has_a_renderer_of_its_own(tokenizer: Any) -> None:
    assert rendered(tokenizer, PLAIN)
    child = os.fork()
    if child == 0:
        os._exit(0 if rendered(tokenizer, PLAIN) == "<user>A disc?" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rendered(tokenizer, PLAIN) == "<user>A disc?"
