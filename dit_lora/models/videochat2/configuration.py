"""Configuration of a VideoChat2 checkpoint: sizes of its three networks, and how media become tokens.

Source: OpenGVLab/Ask-Anything, video_chat2/scripts/videochat_mistral/config_7b_stage3.py and config_7b_hd_stage4.py.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

from dit_lora.errors import DitLoraError, format_list

# Sizes of UMT-L.
VISION_DEFAULTS: dict[str, Any] = {
    "image_size": 224,
    "patch_size": 16,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "return_index": -2,
    "num_attention_heads": 16,
    "mlp_ratio": 4.0,
    "num_frames": 8,
    "pretrained_frames": 4,
    "tubelet_size": 1,
    "drop_path_rate": 0.0,
}
# BERT-base, with cross-attention in every second layer.
QFORMER_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "cross_attention_frequency": 2,
    # BERT's 30,522 tokens and [DEC].
    "vocab_size": 30523,
    "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "drop_path_rate": 0.2,
    "use_text": True,
}
PROMPT_FORMATS = ("mistral", "vicuna", "phi3")
# LayerNorm epsilons with and without `legacy`.
LEGACY_EPS, EPS = 1e-12, 1e-6


class VideoChat2Config(PreTrainedConfig):
    """Sizes of VideoChat2. Defaults are those of VideoChat2-Mistral-7B; `text_config` may be any causal LM's.

    `vision_config` (UMT-L) and `qformer_config` are plain dicts. Missing keys get defaults, and an unknown key raises
    `DitLoraError`. `num_hidden_layers` of `vision_config` counts the blocks of the pretrained encoder: return_index -2
    uses the output of the second-to-last block, and the last is not built. Any number of frames works; `num_frames` is
    the number in training.

    `media_token_id` fills the positions of the media's tokens in the prompt. It is outside both vocabularies and never
    embedded. `legacy` selects the arithmetic that the released weights were trained with: LayerNorm eps 1e-12 in the
    Q-Former and before it, and each BOS token embedded as a constant vector of its own id (videochat2_it_mistral.py
    assigns the id to the embedding; its demo and MVBench notebooks embed BOS as any token). Without `legacy`, eps is
    1e-6, and BOS has its own embedding.
    """

    model_type = "videochat2"
    sub_configs: ClassVar = {"text_config": AutoConfig}

    def __init__(
        self,
        vision_config: Mapping[str, Any] | None = None,
        qformer_config: Mapping[str, Any] | None = None,
        text_config: PreTrainedConfig | Mapping[str, Any] | None = None,
        num_query_tokens: int = 32,
        num_extra_query_tokens: int = 64,
        media_token_id: int | None = None,
        legacy: bool = False,
        tile_size: int = 224,
        add_global: bool = True,
        prompt_format: str = "mistral",
        **kwargs: Any,
    ) -> None:
        self.vision_config = fill_config_defaults(vision_config, VISION_DEFAULTS, "vision_config")
        self.qformer_config = fill_config_defaults(qformer_config, QFORMER_DEFAULTS, "qformer_config")
        if not isinstance(text_config, PreTrainedConfig):
            # config.json stores the language model's config as a plain dict.
            values = dict(text_config or {})
            text_config = AutoConfig.for_model(values.pop("model_type", "mistral"), **values)
        self.text_config = text_config
        self.num_query_tokens = num_query_tokens
        self.num_extra_query_tokens = num_extra_query_tokens
        # The first id after the vocabulary.
        self.media_token_id = text_config.vocab_size if media_token_id is None else media_token_id
        self.legacy, self.tile_size, self.add_global = legacy, tile_size, add_global
        self.prompt_format = prompt_format
        # Transformers reads this flag of the outer config to tie the output head.
        kwargs.setdefault("tie_word_embeddings", bool(text_config.tie_word_embeddings))
        # After the attributes are set, because the base class may read them.
        super().__init__(**kwargs)
        self._check()

    @property
    def layer_norm_eps(self) -> float:
        """Epsilon of the LayerNorms in the Q-Former and before it.

        At 1e-12, the gradient of a constant row has a factor of 1e6.
        """
        return LEGACY_EPS if self.legacy else EPS

    def tile_grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles for height x width pixels. Raises `DitLoraError` if they are not whole tiles."""
        tile = self.tile_size
        if height < tile or width < tile or height % tile or width % tile:
            raise DitLoraError(
                f"pixels of VideoChat2 are whole tiles of {tile}x{tile} (tile_size); got {height}x{width}"
            )
        return height // tile, width // tile

    def num_views(self, height: int, width: int) -> int:
        """Number of tiles for height x width pixels. `add_global` adds the downscaled frame if there are several."""
        rows, columns = self.tile_grid(height, width)
        # A single tile is the whole frame already.
        return rows * columns + (self.add_global and rows * columns > 1)

    def num_media_tokens(self, height: int, width: int) -> int:
        """Number of prompt positions that media of height x width pixels fill. Independent of the number of frames."""
        return self.num_views(height, width) * (self.num_query_tokens + self.num_extra_query_tokens)

    def _check(self) -> None:
        problems = []
        if self.prompt_format not in PROMPT_FORMATS:
            problems.append(f"prompt_format must be one of {', '.join(PROMPT_FORMATS)}; got {self.prompt_format!r}")
        # A media token inside the vocabulary could not be told from text.
        if 0 <= self.media_token_id < self.text_config.vocab_size:
            problems.append(
                f"media_token_id is outside the vocabulary of {self.text_config.vocab_size} tokens; "
                f"got {self.media_token_id}"
            )
        if self.vision_config["image_size"] != self.tile_size:
            problems.append(
                "each tile is one picture of the vision encoder: tile_size is vision_config's image_size; "
                f"got {self.tile_size} and {self.vision_config['image_size']}"
            )
        if self.legacy and not isinstance(self.text_config.bos_token_id, int):
            problems.append(
                "legacy replaces the BOS token's embedding, and text_config has no single bos_token_id; "
                f"got {self.text_config.bos_token_id}"
            )
        if problems:
            raise DitLoraError(format_list("this VideoChat2 configuration cannot be built:", problems))


# Transformers' auto classes, also for tokenizers, look up config.json's model_type.
AutoConfig.register("videochat2", VideoChat2Config)


def fill_config_defaults(values: Mapping[str, Any] | None, defaults: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Update default options with `values`, and return the result. Raises `DitLoraError` for an unknown key."""
    unknown = sorted(set(values or {}) - set(defaults))
    if unknown:
        raise DitLoraError(format_list(f"{name} has no such keys (it has {', '.join(defaults)}):", unknown))
    return {**defaults, **(values or {})}
