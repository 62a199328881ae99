"""Sites of faults in tiny chat models, of both families."""

from typing import Any

from dit_lora.families.family import Site


def chat_site(family: str, variant: str, vision: str, language: str, **changes: Any) -> Site:
    """Return the site of a variant; `vision` is a layer of the vision encoder, `language` the language model."""
    defaults: dict[str, Any] = {
        "family": family,
        "variant": variant,
        "samples": "conversations",
        "sections": {"chat": {"max_tokens": 448, "length_step": 64, "shuffle_turns": False}},
        "attention": f"{language}.layers.1.self_attn",
        "key": "k_proj",
        "out": "o_proj",
        "ff": f"{vision}.mlp",
        "ff_out": f"{vision}.mlp.fc2",
        "modulation": None,
        "last": f"{language}.norm",
        "time_proj": None,
        "text": None,
        "posterior": False,
        "has_buffers": True,
    }
    return Site(**{**defaults, **changes})


def experts(vision: str, projection: str, language: str, **others: str) -> dict[str, str]:
    """Name the modules of a chat model by what they are."""
    return {
        "vision": vision,
        "projection": projection,
        "attention": f"{language}.layers.0.self_attn.o_proj",
        "mlp": f"{language}.layers.0.mlp.down_proj",
        "head": "lm_head",
        **others,
    }
