"""Names of the tensors that adapters train, as PEFT gives them: in a model's parameters and in files.

Diffusers' older names of LoRA's (`lora_linear_layer.down`) are among them.
"""

import re

# LoRA's factors and DoRA's magnitude (lora_*), LoKr (lokr_*), LoHa (hada_*), OFT.
_ADAPTER_TENSOR = re.compile(r"\.(lora_\w+|lokr_w[12](_[ab])?|hada_w[12]_[ab]|oft_R)(\.|$)")
# With one factor at zero the product is zero: these are the factors that PEFT starts at zero.
_ZERO_INITIALIZED = re.compile(r"\.(lora_B|lokr_w1(_a)?|hada_w2_b|oft_R)(\.|$)")


def is_adapter_tensor(name: str) -> bool:
    """True if a tensor's name, as in a state dict, is that of an adapter's tensor."""
    return _ADAPTER_TENSOR.search(name) is not None


def is_zero_initialized(name: str) -> bool:
    """True if an adapter tensor of this name is zero before the first step, so that the adapter has no effect yet."""
    return _ZERO_INITIALIZED.search(name) is not None


def get_layer_name(name: str) -> str:
    """The name of the layer that an adapter's tensor belongs to; any other name is returned unchanged."""
    match = _ADAPTER_TENSOR.search(name)
    return name[: match.start()] if match else name
