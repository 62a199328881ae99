"""Loads the language model's tokenizer so that it agrees with its tokenizer.json."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dit_lora.environment.pretrained import load_pretrained

# Spaces, line breaks and special tokens, which the two ways of loading a tokenizer may treat differently.
_PROBE_TEXT = "{bos} [INST] a  b [/INST] c {eos} [INST] d\ne [/INST] f {eos} ###Human: g ###Assistant: h ###"


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder. Its tokens are those of tokenizer.json, if there is one.

    If a folder names LlamaTokenizer, Transformers builds its own unless it knows config.json's model type to be
    different. The handling of spaces in tokenizer.json is then lost, and after each </s> a token is missing that the
    language model was trained with. Such a folder is loaded only from its tokenizer.json.
    """
    tokenizer: Any = load_pretrained(AutoTokenizer, folder)
    stored = Path(folder) / "tokenizer.json"
    if not stored.is_file():
        return tokenizer
    # Compare the two on a probe text: equal ids mean that Transformers kept the file's rules.
    backend = Tokenizer.from_file(str(stored))
    text = _PROBE_TEXT.format(bos=tokenizer.bos_token or "", eos=tokenizer.eos_token or "")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if ids == backend.encode(text, add_special_tokens=False).ids:
        return tokenizer
    return load_pretrained(PreTrainedTokenizerFast, folder)
