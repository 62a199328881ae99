"""VideoChat2: a video transformer and a Q-Former turn frames into tokens of a causal language model.

Source: OpenGVLab/Ask-Anything, video_chat2/models/videochat_mistra/videochat2_it_mistral.py and
videochat2_it_hd_mistral.py (MVBench, arXiv 2311.17005); the Vicuna and Phi-3 variants differ in the language model.
Parameters have the original's names, below `model`, except `projection` (there `mistral_proj`, ...) and
`language_model` (there `mistral_model`, ...). Nothing here casts a module or uses autocast.

Shapes: B batch, L tokens, F frames, H and W pixels, I tokens of the instruction, V views of a frame (tiles and the
downscaled frame), Q queries, N vision tokens, D width.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModel, Cache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from dit_lora.environment.pretrained import build_from_config
from dit_lora.errors import DitLoraError, format_list
from dit_lora.models.videochat2.configuration import VideoChat2Config
from dit_lora.models.videochat2.qformer import VideoChat2QFormer
from dit_lora.models.videochat2.vision import VideoChat2Vision, VideoChat2VisionAttention

# blip2.py: BERT's initializer_range; the original leaves the extra queries at zero.
QUERY_STD = 0.02


class VideoChat2PreTrainedModel(PreTrainedModel):
    """Base class of the VideoChat2 models: initialization of weights and Transformers' feature flags."""

    config_class = VideoChat2Config
    config: VideoChat2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VideoChat2VisionBlock", "VideoChat2QFormerLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw new queries from N(0, 0.02): for a constant row, LayerNorm's gradient would be 1/eps**0.5."""
        super()._init_weights(module)
        if isinstance(module, VideoChat2VisionAttention):
            init.zeros_(module.q_bias)
            init.zeros_(module.v_bias)
        elif isinstance(module, VideoChat2Model):
            init.normal_(module.query_tokens, std=QUERY_STD)
            if module.extra_query_tokens is not None:
                init.normal_(module.extra_query_tokens, std=QUERY_STD)


class VideoChat2Model(VideoChat2PreTrainedModel):
    """VideoChat2 without the output head: from tokens and pixels to the language model's last hidden state."""

    extra_query_tokens: nn.Parameter | None

    def __init__(self, config: VideoChat2Config) -> None:
        super().__init__(config)
        vision_width = config.vision_config["hidden_size"]
        width = config.qformer_config["hidden_size"]
        self.vision_encoder = VideoChat2Vision(config.vision_config)
        self.vision_layernorm = nn.LayerNorm(vision_width, eps=config.layer_norm_eps)
        self.query_tokens = nn.Parameter(torch.zeros(1, config.num_query_tokens, width))
        extra = torch.zeros(1, config.num_extra_query_tokens, width)
        self.register_parameter("extra_query_tokens", nn.Parameter(extra) if extra.numel() else None)
        self.qformer = VideoChat2QFormer(config.qformer_config, vision_width, config.layer_norm_eps)
        self.projection = nn.Linear(width, config.text_config.hidden_size)
        # Override the dtype recorded in text_config: all of VideoChat2 has the same dtype.
        self.language_model = build_from_config(AutoModel, config.text_config, dtype=torch.get_default_dtype())
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    def get_media_features(
        self,
        pixel_values: torch.Tensor,
        instruction_ids: torch.Tensor | None = None,
        instruction_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens (B, V * Q, D) that represent normalized pixels (B, F, 3, H, W) in the prompt."""
        views = self._split_views(pixel_values)
        # Each view of a sample gets that sample's instruction.
        if instruction_ids is not None:
            instruction_ids = instruction_ids.repeat_interleave(views.shape[1], dim=0)
        if instruction_mask is not None:
            instruction_mask = instruction_mask.repeat_interleave(views.shape[1], dim=0)
        # (B, V, F, 3, tile, tile) -> (B * V, F, 3, tile, tile) -> (B * V, N, D)
        vision = self.vision_layernorm(self.vision_encoder(views.flatten(0, 1)))
        queries: torch.Tensor = self.query_tokens
        if self.extra_query_tokens is not None:
            queries = torch.cat([queries, self.extra_query_tokens], dim=1)
        queries = queries.expand(len(vision), -1, -1)
        query_outputs = self.qformer(queries, vision, instruction_ids, instruction_mask)
        # (B * V, Q, D) -> (B, V * Q, D)
        return self.projection(query_outputs).unflatten(0, (len(views), -1)).flatten(1, 2)

    def _split_views(self, pixels: torch.Tensor) -> torch.Tensor:
        """Cut frames (B, F, 3, H, W) into views (B, V, F, 3, tile, tile).

        Views are the tiles by row, then the full frame, resized in fp32. If there is only one tile, it is the full
        frame; the original's HD model then reads it twice.
        """
        size = self.config.tile_size
        rows, columns = self.config.tile_grid(*pixels.shape[-2:])
        tiles = pixels.unflatten(-1, (columns, size)).unflatten(-3, (rows, size))
        # (B, F, 3, rows, tile, columns, tile) -> (B, rows, columns, F, 3, tile, tile)
        views = tiles.permute(0, 3, 5, 1, 2, 4, 6).flatten(1, 2)
        if self.config.num_views(*pixels.shape[-2:]) == rows * columns:
            return views
        # (B * F, 3, H, W)
        frames = pixels.flatten(0, 1).float()
        resized = functional.interpolate(frames, size=(size, size), mode="bicubic")
        resized = resized.to(pixels.dtype).unflatten(0, pixels.shape[:2])
        return torch.cat([views, resized[:, None]], dim=1)

    def embed(self, input_ids: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        """Embed tokens as (B, L, D), with each row's features (B, V * Q, D) at the positions of its media tokens."""
        is_media = input_ids == self.config.media_token_id
        # The media token's id is outside the vocabulary, so look up row 0 instead.
        embeds = self.get_input_embeddings()(input_ids.masked_fill(is_media, 0))
        if self.config.legacy:
            bos = self.config.text_config.bos_token_id
            # The original assigns the id itself to the embedding.
            embeds = embeds.masked_fill((input_ids == bos)[..., None], float(bos))
        if features is None:
            return embeds
        return embeds.masked_scatter(is_media[..., None], features.to(embeds.dtype))

    def check_media_tokens(self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None) -> None:
        """Raise `DitLoraError` unless each row has as many media tokens as its pixels need.

        Synchronizes with the device.
        """
        expected = 0
        if pixel_values is not None:
            expected = self.config.num_media_tokens(*pixel_values.shape[-2:])
        counts = (input_ids == self.config.media_token_id).sum(1).tolist()
        rows = [f"row {row}: {count}" for row, count in enumerate(counts) if count != expected]
        if not rows:
            return
        raise DitLoraError(
            format_list(
                f"each row of input_ids needs {expected} media tokens (id {self.config.media_token_id}) for these "
                "pixel_values; got:",
                rows,
            )
        )

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        instruction_ids: torch.Tensor | None = None,
        instruction_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The language model's output for tokens (B, L) and pixels (B, F, 3, H, W)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise DitLoraError(
                f"VideoChat2 needs either input_ids or inputs_embeds; got {'neither' if input_ids is None else 'both'}"
            )
        if input_ids is not None:
            features = None
            # In later steps of `generate` there are no pixels: media are in the cache.
            if pixel_values is not None:
                features = self.get_media_features(pixel_values, instruction_ids, instruction_mask)
            inputs_embeds = self.embed(input_ids, features)
        return self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )


class VideoChat2ForConditionalGeneration(VideoChat2PreTrainedModel, GenerationMixin):
    """VideoChat2 with the language model's output head: next-token logits, loss, `generate`.

    `pixel_values` (B, F, 3, H, W) are normalized frames, H and W multiples of `tile_size`. Each row of `input_ids` has
    as many `media_token_id` as its frames need (`VideoChat2Config.num_media_tokens`), anywhere in the row.
    `instruction_ids` and `instruction_mask` (B, I) are the Q-Former's instruction, padded on the right. Rows of a
    batch are independent. Training pads tokens on the right, `generate` on the left with an `attention_mask`.
    """

    _tied_weights_keys = {  # noqa: RUF012
        "lm_head.weight": "model.language_model.embed_tokens.weight"
    }

    def __init__(self, config: VideoChat2Config) -> None:
        super().__init__(config)
        self.model = VideoChat2Model(config)
        text = config.text_config
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        instruction_ids: torch.Tensor | None = None,
        instruction_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, L, vocabulary); only of the last `logits_to_keep` positions unless that is 0.

        `labels` (B, L) are token ids or -100. They are shifted here, as in all Transformers models.
        """
        if input_ids is not None:
            self.model.check_media_tokens(input_ids, pixel_values)
        outputs = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            instruction_ids=instruction_ids,
            instruction_mask=instruction_mask,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        # slice(0, None) for 0, so that all positions are kept.
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, positions])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.text_config.vocab_size)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def prepare_inputs_for_generation(self, *args: Any, is_first_iteration: bool | None = False, **kwargs: Any) -> Any:
        """Prepare inputs as Transformers does. Media are only passed at the first step; later they are in the cache.

        Transformers 5.23 drops `pixel_values` itself; 5.0 does not.
        """
        inputs = super().prepare_inputs_for_generation(  # type: ignore[misc]
            *args, is_first_iteration=is_first_iteration, **kwargs
        )
        if not is_first_iteration and kwargs.get("use_cache", True):
            for name in ("pixel_values", "instruction_ids", "instruction_mask"):
                inputs[name] = None
        return inputs
