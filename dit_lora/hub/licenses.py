"""The licences of known base models, as their own pages state them: an adapter is a derivative of its base."""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class License:
    """As the Hub's metadata has it: an identifier of its list, or `other` with a name and a link."""

    id: str
    name: str | None = None
    link: str | None = None


_COGVIDEOX = License(
    "other", "cogvideox-license", "https://huggingface.co/THUDM/CogVideoX-5b/blob/main/LICENSE"
)
_NVIDIA_OPEN = License(
    "other",
    "nvidia-open-model-license",
    "https://www.nvidia.com/en-us/agreements/enterprise-software/nvidia-open-model-license/",
)
_SANA = "nscl-v2-custom"  # its cards: "NSCL v2-custom, ./LICENSE.txt", and Gemma's terms for the text encoder

# Patterns of Hub ids, the first that fits counts. Each base's page on the Hub is the source; of DiT, whose page
# states none, LICENSE.txt of facebookresearch/DiT. What is not here has a card without a licence, which says so.
_KNOWN = {
    "THUDM/CogVideoX-2b": License("apache-2.0"),
    "zai-org/CogVideoX-2b": License("apache-2.0"),
    "THUDM/CogVideoX*": _COGVIDEOX,
    "zai-org/CogVideoX*": _COGVIDEOX,
    "Efficient-Large-Model/SANA-Video_*": _NVIDIA_OPEN,
    "Efficient-Large-Model/S[Aa][Nn][Aa]*": License("other", _SANA),
    "facebook/DiT-XL-2-*": License("cc-by-nc-4.0"),
    "maxin-cn/Latte-1": License("apache-2.0"),
    "llava-hf/LLaVA-NeXT-Video-7B*": License("llama2"),
    "Qwen/Qwen2.5-VL-3B-Instruct": License(
        "other",
        "qwen-research",
        "https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct/blob/main/LICENSE",
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": License("apache-2.0"),
    "HuggingFaceTB/SmolVLM2-*": License("apache-2.0"),
}


def license_of(base: str | None) -> License | None:
    """The licence of a base by its Hub id; None where it is not known here."""
    for pattern, found in _KNOWN.items():
        if base is not None and fnmatchcase(base, pattern):
            if found.id == "other" and found.link is None:
                link = f"https://huggingface.co/{base}/blob/main/LICENSE.txt"
                return License(found.id, found.name, link)
            return found
    return None
