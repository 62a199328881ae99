"""The parts that a composed loop is made of, which of them fit together, and how a plan is drawn."""

import random
from dataclasses import asdict, dataclass, fields

VECTOR_MODELS = (
    "mlp",
    "batchnorm",
    "dropout",
    "dict_output",
    "returns_loss",
    "adapter",
    "checkpointed",
    "compiled",
)
PARTS: dict[str, tuple[str, ...]] = {
    "data": ("tensors", "pairs", "dataset", "dicts", "stream", "subset", "concat", "sequences"),
    "collate": ("default", "sorted", "reversed", "drop_broken", "padded", "padded_sorted"),
    "loader": (
        "plain",
        "shuffled",
        "sampler",
        "batch_sampler",
        "one_worker",
        "persistent_workers",
        "no_loader",
    ),
    "walk": ("for", "cycle", "list", "reversed_list", "prefetch", "thread"),
    "batch": ("unchanged", "scaled", "normalised", "permuted", "rolled", "filtered", "copied"),
    "model": (*VECTOR_MODELS, "gru"),
    "loss": ("mse", "huber", "sum_over_count", "in_model"),
    "optimizer": (
        "adamw",
        "adam_foreach_off",
        "adam_fused",
        "sgd",
        "rmsprop",
        "lion",
        "two",
        "closure",
        "in_backward",
    ),
    "accumulate": ("1", "2", "3"),
    "clip": ("none", "norm", "value", "raises", "by_hand"),
    "precision": ("fp32", "bf16", "scaler"),
    "schedule": ("none", "each_epoch", "each_step", "late", "plateau"),
    "average": ("none", "by_hand", "averaged_model", "deep_copy"),
    "save": (
        "state_dict",
        "with_optimizer",
        "whole",
        "safetensors",
        "half",
        "clone",
        "numpy",
        "best",
        "thread",
    ),
    "skip": ("none", "loss", "norm"),
    "zero_grad": ("before_forward", "before_backward", "after_step", "keep_zeros"),
    "guard": ("command", "watch", "watch_with_loader"),
    "fault": (
        "nan_sample",
        "nan_target",
        "huge_target",
        "inf_gradient",
        "nan_moment",
        "nan_weight",
        "nan_loss",
        "nan_state",
        "empty_batch",
        "replay_oom",
        "late_nan",
        "late_weight",
    ),
}


@dataclass(frozen=True)
class Plan:
    """One part of each kind; `PARTS` lists what each may be."""

    data: str
    collate: str
    loader: str
    walk: str
    batch: str
    model: str
    loss: str
    optimizer: str
    accumulate: str
    clip: str
    precision: str
    schedule: str
    average: str
    save: str
    skip: str
    zero_grad: str
    guard: str
    fault: str

    @property
    def is_sequence(self) -> bool:
        """True if samples are sequences of different lengths."""
        return self.data == "sequences"

    @property
    def has_closure(self) -> bool:
        """True if forward and backward happen inside the optimizer's step."""
        return self.optimizer == "closure"

    @property
    def steps_in_backward(self) -> bool:
        """True if every parameter has an optimizer that steps inside the backward."""
        return self.optimizer == "in_backward"

    def describe(self) -> str:
        """All parts but the usual ones, as one line."""
        usual = {"none", "default", "for", "unchanged", "fp32", "1", "plain"}
        parts = {name: part for name, part in asdict(self).items() if part not in usual}
        return ", ".join(f"{name} {part}" for name, part in parts.items())


def is_valid(plan: Plan) -> bool:
    """True if the parts of a plan make a program that runs, and its fault can be planted in it."""
    return _has_valid_data(plan) and _has_valid_step(plan) and _has_valid_fault(plan)


def _has_valid_data(plan: Plan) -> bool:
    has_loader = plan.loader != "no_loader"
    return all(
        (
            plan.is_sequence == (plan.model == "gru"),
            plan.is_sequence == plan.collate.startswith("padded"),
            # Slices of tensors, without a loader that could collate or be walked in other ways.
            has_loader or (plan.data == "tensors" and plan.collate == "default"),
            has_loader or (plan.walk == "for" and plan.guard != "watch_with_loader"),
            plan.collate != "drop_broken" or plan.data in ("dataset", "dicts"),
            # A stream has no indices to draw, and two workers would read it twice.
            plan.data != "stream" or plan.loader in ("plain", "one_worker"),
            # Workers that are forked by a thread may inherit a lock that the main thread holds.
            plan.walk != "thread" or "worker" not in plan.loader,
            not plan.is_sequence or plan.batch in ("unchanged", "scaled", "normalised", "permuted"),
            # One row may be left, of which BatchNorm has no variance.
            plan.model != "batchnorm"
            or (plan.batch != "filtered" and (plan.collate != "drop_broken" or plan.loader != "sampler")),
            # The buffers have four rows; broken items leave fewer.
            plan.batch != "copied" or plan.collate != "drop_broken",
        )
    )


def _has_valid_step(plan: Plan) -> bool:
    is_plain = not plan.has_closure and not plan.steps_in_backward
    accumulates = plan.accumulate != "1"
    return all(
        (
            (plan.model == "returns_loss") == (plan.loss == "in_model"),
            # Gradients of micro-batches must be kept until the step.
            not accumulates or plan.zero_grad == "after_step",
            plan.clip in ("norm", "by_hand") or plan.skip != "norm",
            # A closure runs inside the step: there is no place for these.
            is_plain or (not accumulates and plan.skip == "none" and plan.clip != "raises"),
            is_plain or plan.precision != "scaler",
            not plan.has_closure or plan.zero_grad in ("before_forward", "keep_zeros"),
            # No gradient is left after such a backward, and each parameter has its own optimizer.
            not plan.steps_in_backward or (plan.clip == "none" and plan.schedule == "none"),
            not plan.steps_in_backward or plan.zero_grad == "after_step",
        )
    )


def _has_valid_fault(plan: Plan) -> bool:
    has_second_moment = plan.optimizer in ("adamw", "adam_foreach_off", "adam_fused", "in_backward")
    return all(
        (
            plan.fault != "huge_target"
            or (
                has_second_moment
                and plan.clip == "none"
                and plan.precision == "fp32"
                and plan.loss in ("mse", "in_model")
            ),
            plan.fault != "nan_state" or plan.average != "none",
            plan.fault != "empty_batch" or plan.batch == "filtered",
            # The number of calls must not depend on what the weights are, and a step that the loop leaves out has no
            # place after which its next call is known from an experiment's.
            plan.fault != "replay_oom" or (plan.skip == "none" and plan.clip != "raises" and plan.model != "compiled"),
            plan.fault != "nan_moment" or not plan.steps_in_backward,
        )
    )


def draw_plan(generator: random.Random) -> Plan:
    """Draw a plan. Every valid combination of parts can come.

    One part is drawn first, and the others are drawn until they fit: else parts that fit to few others would hardly
    ever come.
    """
    names = [field.name for field in fields(Plan)]
    kind = generator.choice(names)
    part = generator.choice(PARTS[kind])
    while True:
        parts = {name: generator.choice(PARTS[name]) for name in names}
        plan = Plan(**{**parts, kind: part})
        if is_valid(plan):
            return plan
