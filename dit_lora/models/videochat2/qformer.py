"""BLIP-2's Q-Former with stochastic depth: learned queries read the vision tokens, and optionally an instruction.

Source: OpenGVLab/Ask-Anything, video_chat2/models/blip2/Qformer.py (arXiv 2301.12597, and InstructBLIP, 2305.06500).
Weights have their names in the original below `qformer.bert`. Differences: attention is SDPA, so no product of q
and k is stored in half precision; `layer_norm_eps` is an argument.

Shapes: B batch, Q queries, I tokens of the instruction, N vision tokens, D width.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

from dit_lora.errors import DitLoraError
from dit_lora.models.videochat2.vision import DropPath, drop_path_rates


class VideoChat2QFormerEmbeddings(nn.Module):
    """Embeds queries, then the instruction's tokens with positions from 0, and norms both: (B, Q + I, D)."""

    def __init__(self, config: dict[str, Any], eps: float) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.use_text = config["use_text"]
        # Without text, files of stage 2 have no word embeddings.
        if self.use_text:
            self.word_embeddings = nn.Embedding(config["vocab_size"], width, padding_idx=0)
            self.position_embeddings = nn.Embedding(config["max_position_embeddings"], width)
        self.LayerNorm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(config["hidden_dropout_prob"])

    def forward(self, queries_BQD: torch.Tensor, instruction_ids: torch.Tensor | None) -> torch.Tensor:
        # Queries have no positions.
        tokens = queries_BQD
        if instruction_ids is not None:
            position = torch.arange(instruction_ids.shape[1], device=instruction_ids.device)
            text_tokens = self.word_embeddings(instruction_ids) + self.position_embeddings(position)
            tokens = torch.cat([queries_BQD, text_tokens], dim=1)
        # Trained queries are fp32 while frozen weights are bf16, and LayerNorm on a CPU rejects mixed dtypes.
        return self.dropout(self.LayerNorm(tokens.to(self.LayerNorm.weight.dtype)))


class VideoChat2QFormerSelfAttention(nn.Module):
    """Attention of the tokens to `context`, whose width may differ. `mask` is True where attention is allowed."""

    def __init__(self, config: dict[str, Any], context_width: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.dropout_prob = config["attention_probs_dropout_prob"]
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(context_width, width)
        self.value = nn.Linear(context_width, width)

    def forward(self, tokens: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        # (B, N, D) -> (B, heads, N, D / heads)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(tokens), self.key(context), self.value(context))
        )
        # SDPA would apply dropout in evaluation too.
        dropout = self.dropout_prob if self.training else 0.0
        attended = functional.scaled_dot_product_attention(query, key, value, mask, dropout)
        # (B, heads, N, D / heads) -> (B, N, D)
        return attended.transpose(1, 2).flatten(2)


class VideoChat2QFormerOutput(nn.Module):
    """End of each branch: linear, dropout, stochastic depth, residual, LayerNorm (post-norm, as in BERT)."""

    def __init__(self, inner: int, config: dict[str, Any], eps: float, rate: float) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.dense = nn.Linear(inner, width)
        self.dropout = nn.Dropout(config["hidden_dropout_prob"])
        self.drop_path = DropPath(rate)
        self.LayerNorm = nn.LayerNorm(width, eps=eps)

    def forward(self, branch: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.drop_path(self.dropout(self.dense(branch))) + residual)


class VideoChat2QFormerAttention(nn.Module):
    """Attention branch with its output: attention of `tokens` to `context`, added to the tokens and normed."""

    def __init__(self, config: dict[str, Any], context_width: int, eps: float, rate: float) -> None:
        super().__init__()
        self.self = VideoChat2QFormerSelfAttention(config, context_width)
        self.output = VideoChat2QFormerOutput(config["hidden_size"], config, eps, rate)

    def forward(self, tokens: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.output(self.self(tokens, context, mask), tokens)


class VideoChat2QFormerIntermediate(nn.Module):
    """First half of a feed-forward branch; `VideoChat2QFormerOutput` is the second."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.dense = nn.Linear(config["hidden_size"], config["intermediate_size"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.dense(tokens))


class VideoChat2QFormerLayer(GradientCheckpointingLayer):
    """Self-attention over queries and text, cross-attention of the queries, and separate feed-forwards."""

    def __init__(self, config: dict[str, Any], vision_width: int | None, eps: float, rate: float) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.attention = VideoChat2QFormerAttention(config, width, eps, rate)
        # `vision_width` is None in layers without cross-attention.
        self.crosses = vision_width is not None
        if vision_width is not None:
            self.crossattention = VideoChat2QFormerAttention(config, vision_width, eps, rate)
        self.intermediate_query = VideoChat2QFormerIntermediate(config)
        self.output_query = VideoChat2QFormerOutput(inner, config, eps, rate)
        if config["use_text"]:
            self.intermediate = VideoChat2QFormerIntermediate(config)
            self.output = VideoChat2QFormerOutput(inner, config, eps, rate)

    def forward(
        self, tokens: torch.Tensor, vision_BND: torch.Tensor, queries: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        tokens = self.attention(tokens, tokens, mask)
        # Only queries attend to the image; text tokens have a separate feed-forward.
        query, text_tokens = tokens[:, :queries], tokens[:, queries:]
        if self.crosses:
            query = self.crossattention(query, vision_BND, None)
        query = self.output_query(self.intermediate_query(query), query)
        if text_tokens.shape[1] == 0:
            return query
        return torch.cat([query, self.output(self.intermediate(text_tokens), text_tokens)], dim=1)


class VideoChat2QFormerEncoder(nn.Module):
    """Stack of Q-Former layers.

    Each `cross_attention_frequency`-th, starting with the first, attends to vision tokens.
    """

    def __init__(self, config: dict[str, Any], vision_width: int, eps: float) -> None:
        super().__init__()
        # The rate of stochastic depth grows with the layer.
        rates = drop_path_rates(config["drop_path_rate"], config["num_hidden_layers"])
        frequency = config["cross_attention_frequency"]
        self.layer = nn.ModuleList(
            VideoChat2QFormerLayer(config, None if index % frequency else vision_width, eps, rate)
            for index, rate in enumerate(rates)
        )


class VideoChat2QFormer(nn.Module):
    """Q-Former: queries (B, Q, D) read vision tokens (B, N, *) and the instruction (B, I), which may be padded.

    Padding is masked. The original pads on the left and counts positions from there, so that a sample's output depends
    on the length of other instructions in its batch. With instructions padded on the right it does not. Without
    `use_text` there is no instruction, and none of its weights.
    """

    def __init__(self, config: dict[str, Any], vision_width: int, eps: float) -> None:
        super().__init__()
        self.use_text = config["use_text"]
        self.embeddings = VideoChat2QFormerEmbeddings(config, eps)
        self.encoder = VideoChat2QFormerEncoder(config, vision_width, eps)

    def forward(
        self,
        queries_BQD: torch.Tensor,
        vision_BND: torch.Tensor,
        instruction_ids: torch.Tensor | None = None,
        instruction_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if instruction_ids is not None and not self.use_text:
            raise DitLoraError(
                "this VideoChat2's Q-Former reads no instruction (qformer_config use_text: false); got "
                f"instruction_ids of shape {tuple(instruction_ids.shape)}"
            )
        # Number of queries, which come first in the sequence.
        queries = queries_BQD.shape[1]
        mask = None
        if instruction_ids is not None and instruction_mask is not None:
            # Every token may look at the queries, and at the words that are no padding: (B, 1, 1, Q + I).
            query_mask = instruction_mask.new_ones((len(instruction_mask), queries))
            mask = torch.cat([query_mask, instruction_mask], dim=1).bool()[:, None, None]
        tokens = self.embeddings(queries_BQD, instruction_ids)
        for layer in self.encoder.layer:
            tokens = layer(tokens, vision_BND, queries, mask)
        # The text's tokens only served to condition the queries.
        return tokens[:, :queries]
