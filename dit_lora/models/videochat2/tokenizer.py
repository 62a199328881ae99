"""The language model's tokenizer, as its tokenizer.json has it."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dit_lora.environment.pretrained import load_pretrained

# Spaces, line breaks and special tokens, which the two ways of reading a folder treat differently.
_PROBE = (
    "{bos} [INST] a  b [/INST] c {eos} [INST] d\ne [/INST] f {eos} ###Human: g ###Assistant: h ###"
)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder, whose tokens are those of its tokenizer.json, if it has one.

    Transformers builds its own LlamaTokenizer for a folder that names that class, unless config.json is of
    a model type that it knows to be otherwise; what tokenizer.json says of spaces is then lost, and after
    each </s> a token is missing that the language model was trained with. Such a folder is read by its
    tokenizer.json alone.
    """
    tokenizer: Any = load_pretrained(AutoTokenizer, folder)
    stored = Path(folder) / "tokenizer.json"
    if not stored.is_file():
        return tokenizer
    backend = Tokenizer.from_file(str(stored))
    text = _PROBE.format(bos=tokenizer.bos_token or "", eos=tokenizer.eos_token or "")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if ids == backend.encode(text, add_special_tokens=False).ids:
        return tokenizer
    return load_pretrained(PreTrainedTokenizerFast, folder)
