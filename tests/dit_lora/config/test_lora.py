"""The section `lora`: each kind has its own options, and what it has not is refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from dit_lora.config.lora import ADAPTER_KINDS, LoraConfig


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "lokr", "dropout": 0.1}, "kind lokr has no dropout; it has alpha, alpha_pattern"),
        ({"kind": "loha", "rslora": True, "factor": 2}, "kind loha has no factor, rslora"),
        ({"kind": "oft", "rank": 4, "alpha": 4}, "kind oft has no alpha, rank; it has block_size"),
        ({"block_size": 4}, "kind lora has no block_size"),
        ({"kind": "dora", "under": ["x"]}, "kind dora has no under"),
        ({"kind": "lokr", "init": "gaussian"}, "kind lokr has its own initialization"),
        ({"kind": "dora", "init": "pissa"}, "pissa needs kind lora; got dora"),
        ({"kind": "dora", "init": "eva"}, "eva needs kind lora; got dora"),
        ({"kind": "dora", "init": "runs/one"}, "init takes only the file of a LoRA, and kind is dora"),
        ({"init": "runs/one", "rslora": True}, "come from the file in init"),
        ({"init": "loftq"}, "loftq is not supported"),
        ({"kind": "vera"}, "Input should be 'lora', 'dora', 'lokr', 'loha' or 'oft'"),
    ],
)
def test_what_a_kind_has_not_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        LoraConfig(**values)
    assert words in str(error.value)


@pytest.mark.parametrize("kind", ADAPTER_KINDS)
def test_defaults_are_the_kinds_own(kind: Any) -> None:
    config = LoraConfig(kind=kind)
    assert config.rank == (None if kind == "oft" else 64)
    assert LoraConfig.model_validate(config.model_dump()) == config
