"""Write the script of a plan, in the form of the loops that were written by hand."""

from textwrap import indent

from benchmarks.loops.composer.data_parts import (
    batch_lines,
    data_definitions,
    data_lines,
    walk_lines,
)
from benchmarks.loops.composer.model_parts import (
    average_lines,
    model_definitions,
    model_lines,
    save_lines,
)
from benchmarks.loops.composer.plan import Plan

_LOSSES = {
    "mse": "(prediction - b).square().mean()",
    "huber": "nn.functional.smooth_l1_loss(prediction, b)",
    "sum_over_count": "(prediction - b).square().sum() / len(b)",
}
# Text in a script, and the import that it needs.
_IMPORTS = (
    ("copy.", "import copy"),
    ("itertools.", "import itertools"),
    ("math.", "import math"),
    ("queue.", "import queue"),
    ("sys.argv", "import sys"),
    ("threading.", "import threading"),
)
_LIBRARIES = (
    ("np.", "import numpy as np"),
    ("torch.", "import torch"),
    ("save_file(", "from safetensors.torch import save_file"),
    ("nn.", "from torch import nn"),
)
_NAMES = (
    ("torch.nn.utils.rnn", ("pack_padded_sequence", "pad_sequence")),
    ("torch.optim.swa_utils", ("AveragedModel", "get_ema_multi_avg_fn")),
    ("torch.utils.checkpoint", ("checkpoint",)),
    (
        "torch.utils.data",
        (
            "BatchSampler",
            "ConcatDataset",
            "DataLoader",
            "Dataset",
            "IterableDataset",
            "RandomSampler",
            "Subset",
            "TensorDataset",
            "WeightedRandomSampler",
            "default_collate",
        ),
    ),
)


def write_script(plan: Plan, title: str) -> str:
    """The script of a plan, as text."""
    definitions = [*data_definitions(plan), *model_definitions(plan)]
    body = [
        "torch.manual_seed(0)",
        *data_lines(plan),
        *model_lines(plan),
        *_setup_lines(plan),
        "",
        *_guard_lines(plan),
        "for epoch in range(2):",
        *_indented(_epoch_lines(plan)),
        "",
        *save_lines(plan),
    ]
    code = "\n\n\n".join([*definitions, "\n".join(body)]) + "\n"
    separator = "\n\n\n" if definitions else "\n\n"
    head = f'"""{title}:\n{_wrapped(plan.describe())}.\n"""\n\n{_imports(code)}\n{_constants(plan)}'
    return f"{head}{separator}{code}"


def _wrapped(text: str, width: int = 100) -> str:
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _constants(plan: Plan) -> str:
    lines = ["", f'FAULTS = "{plan.fault}"', 'SURVIVES = "*"']
    if plan.guard != "command":
        lines.append('GUARDS = "watch"')
    if plan.model == "batchnorm":
        lines.append('SPREADS = "running_mean running_var"')
    return "\n".join(lines)


def _imports(code: str) -> str:
    standard = [line for text, line in _IMPORTS if text in code]
    libraries = [line for text, line in _LIBRARIES if text in code]
    for module, names in _NAMES:
        used = [name for name in names if f"{name}(" in code or f"({name})" in code]
        if used:
            libraries.append(f"from {module} import {', '.join(used)}")
    blocks = ["\n".join(standard), "\n".join(libraries), "from benchmarks.loops import plant"]
    return "\n\n".join(block for block in blocks if block)


def _indented(lines: list[str]) -> list[str]:
    return [indent(line, "    ") for line in lines]


def _setup_lines(plan: Plan) -> list[str]:
    lines = []
    if plan.batch == "copied":
        lines.append("inputs, targets = torch.empty(4, 4), torch.empty(4, 1)")
    if plan.save == "best":
        lines.append("lowest, best = math.inf, model")
    if plan.accumulate != "1":
        lines += [f"accumulate = {plan.accumulate}", "micro_step = 0"]
    return lines


def _guard_lines(plan: Plan) -> list[str]:
    if plan.guard == "command":
        return []
    optimizers = {"two": "[optimizer, second]", "in_backward": "list(optimizers.values())"}.get(
        plan.optimizer, "optimizer"
    )
    options = ", scaler=scaler" if plan.precision == "scaler" else ""
    options += ", loader=loader" if plan.guard == "watch_with_loader" else ""
    return [
        'if "--guard=watch" in sys.argv:',
        "    import dit_lora",
        "",
        f'    dit_lora.Guard.watch(model, {optimizers}{options}, folder="dit_lora_guard")',
        "",
    ]


def _epoch_lines(plan: Plan) -> list[str]:
    lines = ["order = torch.randperm(24)"] if plan.loader == "no_loader" else []
    if plan.schedule == "late":
        lines += [
            "if epoch == 1:",
            "    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)",
        ]
    lines += walk_lines(plan)
    lines += _indented([*batch_lines(plan), *_step_lines(plan)])
    lines += {
        "each_epoch": ["scheduler.step()"],
        "plateau": ["scheduler.step(loss.item())"],
        "late": ["if scheduler is not None:", "    scheduler.step()"],
    }.get(plan.schedule, [])
    if plan.save == "best":
        lines += [
            "if not loss.item() >= lowest:  # true for NaN",
            "    lowest, best = loss.item(), copy.deepcopy(model)",
        ]
    return [*lines, 'print(f"epoch {epoch}: {loss.item():.6f}")']


def _step_lines(plan: Plan) -> list[str]:
    if plan.has_closure:
        inside = [*_zero_grad(plan), *_loss_lines(plan), *_backward(plan), *_clip(plan)]
        return [
            "",
            "def closure():",
            *_indented([*inside, "return loss"]),
            "",
            "loss = optimizer.step(closure)",
            *_after_step(plan),
        ]
    lines = _zero_grad(plan) if plan.zero_grad in ("before_forward", "keep_zeros") else []
    lines += _loss_lines(plan)
    if plan.skip == "loss":
        lines += ["if not torch.isfinite(loss):", "    continue"]
    if plan.zero_grad == "before_backward":
        lines += _zero_grad(plan)
    lines += _backward(plan)
    if plan.accumulate == "1":
        return [*lines, *_update(plan)]
    return [
        *lines,
        "micro_step += 1",
        "if micro_step % accumulate == 0:",
        *_indented(_update(plan)),
    ]


def _zero_grad(plan: Plan) -> list[str]:
    argument = "set_to_none=False" if plan.zero_grad == "keep_zeros" else ""
    names = ("optimizer", "second") if plan.optimizer == "two" else ("optimizer",)
    return [f"{name}.zero_grad({argument})" for name in names]


def _loss_lines(plan: Plan) -> list[str]:
    name = "compiled" if plan.model == "compiled" else "model"
    call = {
        "gru": f"{name}(a, n)",
        "returns_loss": f"{name}(a, b)",
        "dict_output": f'{name}(a)["prediction"]',
    }.get(plan.model, f"{name}(a)")
    lines = [f"prediction = {call}", f"loss = {_LOSSES.get(plan.loss)}"]
    if plan.loss == "in_model":
        lines = [f'loss = {call}["loss"]']
    if plan.precision != "fp32":
        dtype = "bfloat16" if plan.precision == "bf16" else "float16"
        context = f'with torch.autocast("cpu", dtype=torch.{dtype}):'
        lines = [context, *_indented(lines)]
    divided = "" if plan.accumulate == "1" else " / accumulate"
    return [*lines, f"loss = plant.spoil_loss(loss){divided}"]


def _backward(plan: Plan) -> list[str]:
    call = "scaler.scale(loss).backward()" if plan.precision == "scaler" else "loss.backward()"
    has_gradients = not plan.steps_in_backward and plan.accumulate == "1"
    return [call, "plant.spoil_gradient(model)"] if has_gradients else [call]


def _clip(plan: Plan) -> list[str]:
    lines = []
    if plan.clip != "none" and plan.precision == "scaler":
        lines.append("scaler.unscale_(optimizer)")
        lines += ["scaler.unscale_(second)"] if plan.optimizer == "two" else []
    return (
        lines
        + {
            "none": [],
            "norm": ["norm = nn.utils.clip_grad_norm_(trained, 1.0)"],
            "value": ["nn.utils.clip_grad_value_(trained, 0.5)"],
            "by_hand": [
                "norm = torch.stack([p.grad.norm() for p in trained]).norm()",
                "for p in trained:",
                "    p.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))",
            ],
            "raises": [
                "try:",
                "    nn.utils.clip_grad_norm_(trained, 1.0, error_if_nonfinite=True)",
                "except RuntimeError:",
                *_indented([*_zero_grad(plan), *_scaler_update(plan), "continue"]),
            ],
        }[plan.clip]
    )


def _scaler_update(plan: Plan) -> list[str]:
    return ["scaler.update()"] if plan.precision == "scaler" else []


def _update(plan: Plan) -> list[str]:
    """From the gradients to the end of the step."""
    if plan.steps_in_backward:
        return _after_step(plan)
    lines = ["plant.spoil_gradient(model)"] if plan.accumulate != "1" else []
    lines += _clip(plan)
    if plan.skip == "norm":
        skip_lines = [*_zero_grad(plan), *_scaler_update(plan), "continue"]
        lines += ["if norm > 100:", *_indented(skip_lines)]
    names = ("optimizer", "second") if plan.optimizer == "two" else ("optimizer",)
    for name in names:
        lines.append(f"scaler.step({name})" if plan.precision == "scaler" else f"{name}.step()")
    lines += _scaler_update(plan)
    if plan.schedule == "each_step":
        lines.append("scheduler.step()")
    if plan.zero_grad == "after_step":
        lines += _zero_grad(plan)
    return [*lines, *_after_step(plan)]


def _after_step(plan: Plan) -> list[str]:
    lines = average_lines(plan)
    if plan.fault == "nan_state":
        items = "iter(ema.items())" if plan.average == "by_hand" else "ema.named_parameters()"
        lines.append(f"plant.spoil_state(*next({items}))")
    scheduled = ["scheduler.step()"] if plan.has_closure and plan.schedule == "each_step" else []
    return [*scheduled, *lines, "plant.spoil_between_steps(model, optimizer)"]
