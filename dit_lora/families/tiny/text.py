"""Text encoders and tokenizers with random weights, small enough for tests and demos on a CPU.

The tokenizer's vocabulary is fixed and weights come from one generator, so one seed gives the same bytes everywhere.
(A trained tokenizer would not: its vocabulary differs from process to process.)
"""

import string

from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

# Width of T5's and Gemma's embeddings, and of CLIP's pooled output.
TEXT_WIDTH = 32
POOLED_WIDTH = 16


def build_t5_tokenizer() -> T5Tokenizer:
    """Build a tokenizer of the printable ASCII characters, inside a word and at its start. Nothing is trained."""
    characters = [c for c in string.printable if not c.isspace()]
    special = ["<pad>", "</s>", "<unk>"]
    pieces = ["▁", *characters, *(f"▁{c}" for c in characters)]
    # A unigram vocabulary: pieces with log probabilities. Special tokens come first, so padding is id 0.
    vocab = [(token, 0.0) for token in special] + [(piece, -2.0) for piece in pieces]
    return T5Tokenizer(vocab=vocab, extra_ids=0)


def build_t5_encoder(vocab_size: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=vocab_size,
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config).eval()


def build_clip_tokenizer() -> CLIPTokenizer:
    """Build a tokenizer of the printable ASCII characters, inside a word and at its end. Nothing is trained."""
    characters = [c for c in string.printable if not c.isspace()]
    # CLIP's BPE marks the end of a word with </w>.
    pieces = [*characters, *(f"{c}</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    # Without merges, every character is a token.
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def build_clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(_clip_config(tokenizer, POOLED_WIDTH)).eval()


def build_projected_clip_encoder(tokenizer: CLIPTokenizer, width: int) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(_clip_config(tokenizer, width)).eval()


def _clip_config(tokenizer: CLIPTokenizer, width: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=32,
        # Only the variant with a projection uses it.
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_umt5_encoder(vocab_size: int) -> UMT5EncoderModel:
    """Build a tiny UMT5 encoder: T5 with separate relative positions in every layer. Padding is masked."""
    config = UMT5Config(vocab_size=vocab_size, d_model=TEXT_WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    return UMT5EncoderModel(config).eval()


def build_gemma_tokenizer() -> GemmaTokenizer:
    """Build a tokenizer of the printable ASCII characters, space and newline. Nothing is trained."""
    characters = [c for c in string.printable if not c.isspace()]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    # The newline is a token because the pipeline's instruction has several lines.
    pieces = [*special, "\n", "▁", *characters]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return GemmaTokenizer(vocab=vocab, merges=[], add_bos_token=True)


def build_gemma_encoder(vocab_size: int) -> Gemma2Model:
    config = Gemma2Config(
        vocab_size=vocab_size,
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )
    return Gemma2Model(config).eval()
