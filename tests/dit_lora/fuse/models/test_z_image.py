"""Z-Image on fused ops equals the stock model.

Covers both refiners and the joint layers, with captions of one length and of several.
"""

import gc
from typing import Any, ClassVar

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from fuse_checks import Values, adapted, by, fuse_all, values
from fuse_contract import Contract, Inputs, draw
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.fuse.api import fuse
from dit_lora.fuse.models import complex_rotary, streams, swiglu, z_image
from dit_lora.fuse.models.complex_rotary import get_rotary_tables
from dit_lora.fuse.patches import get_fusion
from dit_lora_kernels.ada_norm import AdaNormInputs


def build() -> Any:
    """Head width 16 is 8 for the place in the text or the picture behind it, 4 for the row, 4 for the column."""
    model: Any = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=12,
        axes_dims=[8, 4, 4],
        axes_lens=[128, 8, 8],
    )
    return model


class TestZImage(Contract):
    ops = ("lora_linear", "qk_norm_rope", "ada_norm")
    targets: ClassVar = [
        *("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3"),
        *("noise_refiner.0.adaLN_modulation.0", "layers.0.adaLN_modulation.0"),
    ]
    module = streams
    variants = ("unequal", "equal")
    blocks = "noise_refiner"
    kept = (14.6, 0.42)

    def stock(self) -> nn.Module:
        return build()

    def inputs(self, variant: str) -> Inputs:
        """Captions of 5 and 40 tokens are padded to 32 and 64, and the first is masked. Images of 6 patches are
        padded to 32.
        """
        length = 40 if variant == "unequal" else 7
        return {
            "x": [draw(4, 1, 4, 6, seed=seed).requires_grad_() for seed in (3, 4)],
            "t": torch.tensor([0.17, 0.803]),
            "cap_feats": [draw(5, 12, seed=5).requires_grad_(), draw(length, 12).requires_grad_()],
        }

    def run(self, model: nn.Module, given: Inputs | None = None) -> Values:
        given = self.inputs(self.variants[0]) if given is None else given
        leaves = {f"{n} {i}": x for n in ("x", "cap_feats") for i, x in enumerate(given[n])}
        return values(model, lambda m: m(**given, return_dict=False), leaves)

    def samples(self, output: Any) -> torch.Tensor:
        return torch.stack(output[0])

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        x = torch.randn(2, 192, 32, generator=generator).bfloat16().requires_grad_()
        rotations = model.rope_embedder(torch.randint(8, (384, 3), generator=generator))
        rotations = rotations.unflatten(0, (2, 192))
        adaln = torch.randn(2, 32, generator=generator).bfloat16()
        block = model.layers[0]
        # All blocks share the tables.
        excluded = [adaln, rotations, *get_rotary_tables(rotations)]
        return lambda: block(x, None, rotations, adaln), excluded, x.numel()

    def test_norms_and_hidden_values_are_computed_again_for_adapters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each block's once: what saves them by another name or shape would keep them."""
        model, outputs = fuse_all(self.build()), []
        for module, name in ((z_image, "recompute_norm"), (swiglu, "recompute_gated_hidden")):
            patched = getattr(module, name)

            def counted(*args: Any, again: Any = patched, name: str = name) -> torch.Tensor:
                outputs.append(name)
                return again(*args)

            monkeypatch.setattr(module, name, counted)
        self.run(model)
        assert sorted(outputs) == ["recompute_gated_hidden"] * 3 + ["recompute_norm"] * 3

    def test_tables_are_made_once_for_each_sequence_and_kept_no_longer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One table each for images, captions and both, for every number of blocks."""
        model, tables_built = fuse_all(self.build()), []
        tables = complex_rotary._compute_tables

        def counted(rotations: torch.Tensor) -> Any:
            tables_built.append(rotations.shape)
            return tables(rotations)

        monkeypatch.setattr(complex_rotary, "_compute_tables", counted)
        before = len(complex_rotary._TABLE_CACHE)
        model.layers.append(model.layers[0])
        self.run(model)
        assert [tuple(shape[:2]) for shape in tables_built] == [(2, 32), (2, 64), (2, 96)]
        gc.collect()
        assert len(complex_rotary._TABLE_CACHE) == before

    def test_modulation_of_each_token_runs_the_stock_block(self) -> None:
        """Z-Image-Omni has clean and noisy tokens."""
        model = self.build().requires_grad_(False)
        block, x = model.layers[0], draw(2, 6, 32)
        rotations = model.rope_embedder(torch.arange(18).view(6, 3) % 8).expand(2, -1, -1)
        of_noise, clean = draw(2, 32, seed=4), draw(2, 32, seed=5)
        noisy = torch.tensor([[1, 1, 0, 0, 0, 1], [0, 1, 1, 0, 1, 0]])
        model_inputs = (x, None, rotations, None, noisy, of_noise, clean)
        stock = block(*model_inputs)
        fuse_all(model)
        torch.testing.assert_close(block(*model_inputs), stock, rtol=2e-5, atol=2e-5)
        inverted = block(*model_inputs[:4], 1 - noisy, *model_inputs[5:])
        assert (inverted - stock).abs().max() > 0.1


@pytest.mark.parametrize("samples", [1, 2])
def test_a_wrong_row_is_found_at_the_first_forward_of_one_sample_too(
    monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    """A list of one sample is one row: each block is given a second one, made of it."""
    norm = z_image.normalize_stream

    def wrong(module: Any, stream: AdaNormInputs, kind: Any) -> Any:
        if stream.scale is not None:
            stream = stream._replace(scale=stream.scale[:1].expand_as(stream.scale))
        return norm(module, stream, kind)

    inputs = {
        "x": [draw(4, 1, 4, 6, seed=seed) for seed in range(samples)],
        "t": torch.tensor([0.17, 0.803])[:samples],
        "cap_feats": [draw(5, 12, seed=seed) for seed in range(samples)],
    }
    ops = {"ada_norm": "on", "qk_norm_rope": "off", "lora_linear": "off"}
    model, other_model = (adapted(build(), ["to_q"]) for _ in "ab")
    with by("reference", monkeypatch):
        fuse(model, ops)
        model(**inputs)
        monkeypatch.setattr(z_image, "normalize_stream", wrong)
        fuse(other_model, ops)
        with pytest.raises(DitLoraError, match=r"ada_norm.* noise_refiner\.0.*it is set to on"):
            other_model(**inputs)


def test_what_is_not_the_stock_block_is_kept() -> None:
    model = adapted(build(), ["to_q"])
    for refiner in (model.noise_refiner[0], model.context_refiner[0]):
        refiner.ffn_norm2 = nn.LayerNorm(32)
        refiner.attention.norm_k = nn.Identity()
    report = str(fuse(model, {"ada_norm": "on"}, check=False))
    assert "ada_norm: not in 2 modules: one of its norms is a LayerNorm" in report
    assert "attention: not in 2 modules: one of its norms is a Identity" in report
    replaced = get_fusion(model).patched_modules
    assert [n for op, n in replaced if op == "ada_norm" and "feed" not in n] == ["layers.0"]
    assert [n for op, n in replaced if op == "attention"] == ["layers.0.attention"]
    for name in ("noise_refiner", "context_refiner", "layers"):
        setattr(model, name, nn.ModuleList())
    with pytest.raises(DitLoraError, match="can use qk_norm_rope"):
        fuse(model, {"qk_norm_rope": "on"}, check=False)
