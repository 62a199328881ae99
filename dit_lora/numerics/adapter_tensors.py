"""Names of the tensors that adapters train, as PEFT gives them: in a model's parameters and in files.

Diffusers' older names of LoRA's (`lora_linear_layer.down`) are among them.
"""

import re

_TENSOR = re.compile(r"\.(lora_\w+|lokr_w[12](_[ab])?|hada_w[12]_[ab]|oft_R)(\.|$)")
_IDLE = re.compile(r"\.(lora_B|lokr_w1(_a)?|hada_w2_b|oft_R)(\.|$)")


def is_adapter(name: str) -> bool:
    """Return true for a tensor of an adapter."""
    return _TENSOR.search(name) is not None


def is_idle(name: str) -> bool:
    """Return true for a tensor that is zero before the first step, so that the adapter changes nothing."""
    return _IDLE.search(name) is not None


def layer_of(name: str) -> str:
    """Return the adapted layer of an adapter's tensor; the name itself of any other."""
    found = _TENSOR.search(name)
    return name[: found.start()] if found else name
