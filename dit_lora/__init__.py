"""LoRA fine-tuning of diffusion transformers and video chat models that does not die of NaN."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dit_lora.adapters.groups import parameter_groups

__version__ = "0.1.0"
__all__ = ["__version__", "parameter_groups"]


def __getattr__(name: str) -> Any:
    # Heavy imports happen at first use, so that `import dit_lora` is instant (PEP 562).
    if name == "parameter_groups":
        from dit_lora.adapters.groups import parameter_groups

        return parameter_groups
    raise AttributeError(f"module 'dit_lora' has no attribute {name!r}")
