"""What the tests of fused models ask of every one alike; a model's own class says how it is built and called."""

import copy
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from fuse_checks import (
    Values,
    adapted,
    assert_equal,
    by,
    fuse_all,
    values,
    worst_error,
)
from kernel_checks import saved_bytes
from torch import nn

from dit_lora.fuse.api import unfuse
from dit_lora.fuse.patches import get_fusion
from dit_lora.guard.comparison.parity import find_first_difference
from dit_lora.guard.fallbacks import find_fallback, list_model_fallbacks

Inputs = dict[str, Any]


def draw(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Contract:
    """Subclass it as `TestModel`, with these and `stock` and `inputs`."""

    ops: ClassVar[tuple[str, ...]]
    targets: ClassVar[list[str]]
    module: ClassVar[Any]
    """Of the patches."""
    variants: ClassVar[tuple[str, ...]] = ("",)
    """Of the inputs; the first is the usual."""
    blocks: ClassVar[str] = "transformer_blocks"
    without_gradient: ClassVar[tuple[str, ...]] = ()
    """Ends of names of weights whose exact gradient is zero, such as the bias of a k without a norm."""
    wide: ClassVar[tuple[str, ...]] = ()
    """Parts of names of what stays fp32 beside bf16 weights."""
    kept: ClassVar[tuple[float, float]]
    """Units that a block keeps at most, and of what the stock block keeps."""

    def stock(self) -> nn.Module:
        raise NotImplementedError

    def inputs(self, variant: str) -> Inputs:
        """Two different samples; `values` differentiates by those that require it."""
        raise NotImplementedError

    def block_run(self, model: nn.Module, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        """A call of the first block, what it is given besides tokens, and the elements of its tokens."""
        raise NotImplementedError

    def samples(self, output: Any) -> torch.Tensor:
        """The model's output, a row a sample."""
        return output[0]

    def kind(self, name: str) -> str:
        """What a value is judged together with in bf16: itself, unless a model has many layers of few numbers."""
        return name

    def build(self, targets: list[str] | None = None, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return adapted(self.stock(), targets or self.targets, seed)

    def all_trained(self, model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(self.without_gradient))
        return model

    def run(self, model: nn.Module, given: Inputs | None = None) -> Values:
        given = self.inputs(self.variants[0]) if given is None else given
        tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
        torch.manual_seed(5)
        return values(model, lambda m: m(**given, return_dict=False), tensors)

    def representable(self, model: nn.Module) -> nn.Module:
        """fp32 weights that bf16 can hold."""
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16().float()
        return model

    def lowered(self, model: nn.Module) -> nn.Module:
        """bf16 base, fp32 adapters: the policy of a run."""
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and not any(part in name for part in self.wide):
                parameter.data = parameter.data.bfloat16()
        return model

    @pytest.fixture(autouse=True)
    def implementation(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        """The references, which are quick on a CPU, where a test does not ask for both."""
        chosen = getattr(request, "param", "reference")
        with by(chosen, monkeypatch):
            yield chosen

    @pytest.mark.parametrize(
        "implementation",
        ["reference", pytest.param("kernel", marks=pytest.mark.thorough)],
        indirect=True,
    )
    def test_values_and_gradients(self) -> None:
        model = self.build()
        for variant in self.variants:
            inputs = self.inputs(variant)
            expected = self.run(model, inputs)
            random_state = torch.get_rng_state()
            fuse_all(model)
            assert set(get_fusion(model).get_active_ops()) == set(self.ops)
            assert_equal(self.run(model, inputs), expected)
            assert torch.equal(torch.get_rng_state(), random_state)
            unfuse(model)

    @pytest.mark.parametrize(
        "implementation",
        ["reference", pytest.param("kernel", marks=pytest.mark.thorough)],
        indirect=True,
    )
    def test_gradients_of_every_weight(self) -> None:
        model = self.all_trained(self.build())
        expected = self.run(model)
        assert_equal(self.run(fuse_all(model)), expected, 5e-5)

    def test_each_op_alone_off(self) -> None:
        model = self.build()
        expected = self.run(model)
        fuse_all(model)
        for op in self.ops:
            with get_fusion(model).disable_op(op):
                assert_equal(self.run(model), expected)
        with get_fusion(model).use_stock_code():
            assert_equal(self.run(model), expected, 0.0)

    def test_bf16_autocast_is_no_worse(self) -> None:
        self.check_bf16_autocast(trains_every_weight=False)

    @pytest.mark.thorough  # DiT and Flux do it every time
    def test_bf16_autocast_is_no_worse_where_every_weight_trains(self) -> None:
        self.check_bf16_autocast(trains_every_weight=True)

    def check_bf16_autocast(self, *, trains_every_weight: bool) -> None:
        """The mean of some models, and of more where that is not enough: a gradient of few numbers is now and then far
        off in either.
        """
        for variant in self.variants:
            inputs = self.inputs(variant)
            errors: list[tuple[dict[str, float], dict[str, float]]] = []
            worse: dict[str, list[float]] = {}
            for seed in range(16):
                model = self.build(seed=seed)
                if trains_every_weight:
                    exact = self.run(self.all_trained(model), inputs)
                else:
                    exact = self.run(self.representable(model), inputs)
                    self.lowered(model)
                with torch.autocast("cpu", torch.bfloat16):
                    stock = self.run(model, inputs)
                    fused = self.run(fuse_all(model), inputs)
                assert {n: x.dtype for n, x in fused.items()} == {n: x.dtype for n, x in stock.items()}
                errors.append((worst_error(fused, exact), worst_error(stock, exact)))
                if seed in (2, 15):
                    worse = self.worse_kinds(errors)
                    if not worse:
                        break
            assert not worse, worse

    def worse_kinds(self, errors: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, list[float]]:
        """Kinds of tensors of which the fused model's mean error is larger than the stock model's; both errors."""
        kinds: dict[str, list[str]] = {}
        for name in errors[0][0]:
            kinds.setdefault(self.kind(name), []).append(name)
        mean = {
            kind: [statistics.mean(pair[i][n] for pair in errors for n in names) for i in (0, 1)]
            for kind, names in kinds.items()
        }
        return {n: e for n, e in mean.items() if not e[0] <= 1.25 * e[1] + 2**-8}

    def test_undone_it_is_the_stock_model(self) -> None:
        model = self.build()
        keys, before = list(model.state_dict()), [dict(vars(m)) for m in model.modules()]
        names = [name for name, _ in model.named_parameters()]
        expected = self.run(model)
        fuse_all(model)
        assert list(model.state_dict()) == keys
        assert [name for name, _ in model.named_parameters()] == names
        unfuse(model)
        assert_equal(self.run(model), expected, 0.0)
        differences = [set(vars(m)) ^ set(old) for m, old in zip(model.modules(), before, strict=True)]
        assert not any(differences), differences

    def test_checkpointing_and_a_copy(self) -> None:
        model = fuse_all(self.build())
        expected = self.run(model)
        copied = copy.deepcopy(model)
        copied.enable_gradient_checkpointing()
        assert_equal(self.run(copied), expected, 0.0)
        unfuse(model)
        assert set(get_fusion(copied).get_active_ops()) == set(self.ops)
        with torch.no_grad():
            next(p for p in copied.parameters() if p.requires_grad).add_(1.0)
        assert_equal(self.run(model), expected)

    @pytest.mark.thorough  # CogVideoX and Sana do it every time
    def test_a_block_compiles_whole(self) -> None:
        model = fuse_all(self.build())
        expected = self.run(model)
        model.get_submodule(self.blocks)[0].compile(fullgraph=True, backend="aot_eager")
        try:
            assert_equal(self.run(model), expected)
        finally:
            torch._dynamo.reset()

    def kept_units(self, model: nn.Module) -> float:
        """What a block's forward keeps for its backward, in units of one bf16 activation of all tokens."""
        call, besides, elements = self.block_run(model, torch.Generator().manual_seed(5))
        besides = [*model.parameters(), *model.buffers(), *besides]
        with torch.autocast("cpu", torch.bfloat16):
            return saved_bytes(call, besides) / (2 * elements)

    def test_what_a_block_keeps(self) -> None:
        model = self.lowered(self.build(["to_q", "to_k", "to_v", "to_out.0"]))
        stock = self.kept_units(model)
        fused = self.kept_units(fuse_all(model))
        max_bytes, ratio = self.kept
        assert fused <= max_bytes, (fused, stock)
        assert fused <= ratio * stock, (fused, stock)

    def test_a_wrong_row_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, inputs = fuse_all(self.build()), self.inputs(self.variants[0])
        joint = self.module.joint_ada_norm

        def wrong(streams: Any, *args: Any, **kwargs: Any) -> Any:
            rolled = [
                stream if stream.scale is None else stream._replace(scale=stream.scale.roll(1, 0))
                for stream in streams
            ]
            return joint(rolled, *args, **kwargs)

        def losses() -> torch.Tensor:
            return self.samples(model(**inputs, return_dict=False)).flatten(1).square().mean(1)

        switch = find_fallback(list_model_fallbacks(model), "ada_norm")
        assert find_first_difference(switch, losses, model) is None
        monkeypatch.setattr(self.module, "joint_ada_norm", wrong)
        difference = find_first_difference(switch, losses, model)
        assert difference is not None
        assert f"{self.blocks}.0" in difference.module
