"""Sizes of the real models, at which their LoRAs are trained: tokens include text where the two are joined."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One transformer and a batch."""

    batch: int
    tokens: tuple[int, ...]
    """Tokens of each stream that has a norm of its own."""
    heads: int
    head_dim: int
    norm: str
    """`affine` or plain `layer`, `fp32` (Wan's), `rms`."""
    norm_eps: float
    layers: int
    qk: str = ""
    """`layer` over a head, `across`, `inner` or `split` as in stock.py; empty: q and k are used as they are."""
    rotary: bool = False
    linear_attention: bool = False
    glu: tuple[int, int, int] | None = None
    """Height, width and C of Mix-FFN."""
    rank: int = 64

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim

    @property
    def adapted(self) -> int:
        """Layers of width by width with an adapter: q, k, v and out of every attention."""
        # These models have a second attention, to the text, in every block.
        attentions = 2 if self.linear_attention or self.qk in ("across", "inner", "split") else 1
        return self.layers * 4 * attentions


SHAPES = {
    # 49 frames of 480x720: 13 x 30 x 45 tokens of video, 226 of text.
    "cogvideox_5b": Shape(1, (226, 17550), 48, 64, "affine", 1e-5, 42, "layer", True),
    # 1024x1024: 32x32 tokens; q, k, v and out of linear and of cross-attention.
    "sana_1.6b": Shape(8, (1024,), 70, 32, "layer", 1e-6, 20, linear_attention=True, glu=(32, 32, 5600)),
    "dit_xl2": Shape(64, (256,), 16, 72, "layer", 1e-6, 28),  # 256x256
    # 81 frames of 480x832: 21 x 30 x 52.
    "wan_1.3b": Shape(1, (32760,), 12, 128, "fp32", 1e-6, 30, "across", True),
    "cogvideox_2b": Shape(1, (226, 17550), 30, 64, "affine", 1e-5, 30, "layer"),
    # 121 frames of 512x704: 16 x 16 x 22.
    "ltx": Shape(1, (5632,), 32, 64, "rms", 1e-6, 28, "inner", True),
    # The video of 121 frames of 512x768: 16 x 16 x 24.
    "ltx2": Shape(1, (6144,), 32, 128, "rms", 1e-6, 48, "split", True),
    # 81 frames of 768x1360: 11 x 48 x 85.
    "cogvideox_1.5": Shape(1, (226, 44880), 48, 64, "affine", 1e-5, 42, "layer", True),
}
"""In the order in which a short run takes them."""
TINY = Shape(2, (7, 33), 3, 32, "affine", 1e-5, 2, "layer", True, linear_attention=True, glu=(5, 7, 24), rank=4)
"""For tests: every op has a case."""
