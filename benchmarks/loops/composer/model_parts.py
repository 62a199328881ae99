"""Code for the model of a composed loop, its optimizer, schedule, average and saved files."""

from textwrap import indent

from benchmarks.loops.composer.plan import Plan

_LAYERS = {
    "mlp": "nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))",
    "batchnorm": "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))",
    "dropout": "nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 1))",
}
_NET = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = {hidden}
        self.head = nn.Linear(8, 1)

    def forward(self, {arguments}):
"""
_FORWARDS = {
    "dict_output": ("x", 'return {"prediction": self.head(self.hidden(x).tanh())}'),
    "returns_loss": (
        "x, y",
        "prediction = self.head(self.hidden(x).tanh())\n"
        'return {"loss": (prediction - y).square().mean(), "prediction": prediction}',
    ),
    "checkpointed": (
        "x",
        "h = checkpoint(self.hidden, x, use_reentrant=False)\nreturn self.head(h.tanh())",
    ),
    "compiled": ("x", "return self.head(self.hidden(x).tanh())"),
    "gru": (
        "x, lengths",
        "packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)\n"
        "_, h = self.hidden(packed)\nreturn self.head(h[-1])",
    ),
}
_ADAPTER = """\
class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) * 0.3)

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()
"""
_LION = """\
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"].lerp(p.grad, 0.1)
                p.data.add_(update / (update.abs() + 1e-12), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 0.01)
"""
_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW({}, lr=1e-2)",
    "adam_foreach_off": "torch.optim.Adam({}, lr=1e-2, foreach=False)",
    "adam_fused": "torch.optim.AdamW({}, lr=1e-2, fused=True)",
    "sgd": "torch.optim.SGD({}, lr=1e-2, momentum=0.9)",
    "rmsprop": "torch.optim.RMSprop({}, lr=1e-3)",
    "lion": "Lion({}, lr=1e-3)",
    "closure": "torch.optim.SGD({}, lr=1e-2, momentum=0.9)",
}
_STEP_IN_BACKWARD = """\
optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in trained}
optimizer = optimizers[trained[0]]


def step_now(parameter):
    if parameter is trained[0]:
        plant.spoil_gradient(model)
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in trained:
    parameter.register_post_accumulate_grad_hook(step_now)
"""


def model_definitions(plan: Plan) -> list[str]:
    """Classes that model and optimizer need."""
    blocks = []
    if plan.model in _FORWARDS:
        hidden = "nn.GRU(4, 8, batch_first=True)" if plan.model == "gru" else "nn.Linear(4, 8)"
        arguments, body = _FORWARDS[plan.model]
        blocks.append(_NET.format(hidden=hidden, arguments=arguments) + indent(body, " " * 8))
    if plan.model == "adapter":
        blocks.append(_ADAPTER)
    if plan.optimizer == "lion":
        blocks.append(_LION)
    return [block.rstrip("\n") for block in blocks]


def model_lines(plan: Plan) -> list[str]:
    """The model, its optimizers, and what follows the weights: schedule, scaler, average."""
    layers = _LAYERS.get(plan.model, "Net()")
    if plan.model == "adapter":
        layers = "nn.Sequential(Adapted(nn.Linear(4, 8)), nn.Tanh(), Adapted(nn.Linear(8, 1)))"
    has_limit = plan.fault == "replay_oom"
    lines = [f"model = plant.limit_calls({layers})" if has_limit else f"model = {layers}"]
    if plan.model == "compiled":
        lines.append('compiled = torch.compile(model, backend="eager")')
    lines.append("trained = [p for p in model.parameters() if p.requires_grad]")
    if plan.steps_in_backward:
        lines += _STEP_IN_BACKWARD.rstrip("\n").split("\n")
    elif plan.optimizer == "two":
        lines += [
            "optimizer = torch.optim.AdamW(trained[:2], lr=1e-2)",
            "second = torch.optim.SGD(trained[2:], lr=1e-2)",
        ]
    else:
        lines.append(f"optimizer = {_OPTIMIZERS[plan.optimizer].format('trained')}")
    lines += {
        "none": [],
        "late": ["scheduler = None"],
        "each_epoch": ["scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)"],
        "each_step": ["scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)"],
        "plateau": ["scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)"],
    }[plan.schedule]
    if plan.precision == "scaler":
        lines.append('scaler = torch.amp.GradScaler("cpu", init_scale=256.0)')
    lines += {
        "none": [],
        "by_hand": ["ema = {name: p.detach().clone() for name, p in model.named_parameters()}"],
        "averaged_model": [
            "ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))",
        ],
        "deep_copy": ["ema = copy.deepcopy(model).eval().requires_grad_(False)"],
    }[plan.average]
    return lines


def average_lines(plan: Plan) -> list[str]:
    """How the average follows the weights after a step."""
    return {
        "none": [],
        "by_hand": [
            "with torch.no_grad():",
            "    for name, p in model.named_parameters():",
            "        ema[name].lerp_(p, 0.1)",
        ],
        "averaged_model": ["ema.update_parameters(model)"],
        "deep_copy": [
            "with torch.no_grad():",
            "    for e, p in zip(ema.parameters(), model.parameters(), strict=True):",
            "        e.mul_(0.9).add_(p, alpha=0.1)",
        ],
    }[plan.average]


def save_lines(plan: Plan) -> list[str]:
    """Save the weights, and the average, at the end."""
    lines = {
        "state_dict": ['torch.save(model.state_dict(), "model.pt")'],
        "with_optimizer": [
            'state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}',
            'torch.save(state, "checkpoint.pt")',
        ],
        "whole": ['torch.save(model, "model.pt")'],
        "safetensors": ['save_file(model.state_dict(), "model.safetensors")'],
        "half": [
            "half = {name: v.to(torch.bfloat16) for name, v in model.state_dict().items()}",
            'torch.save(half, "half.pt")',
        ],
        "clone": [
            "copies = {name: v.detach().cpu().clone() for name, v in model.state_dict().items()}",
            'torch.save(copies, "copies.pt")',
        ],
        "numpy": [
            "arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}",
            'np.savez("weights.npz", **arrays)',
        ],
        "best": ['torch.save(best.state_dict(), "best.pt")'],
        "thread": [
            "copies = {name: v.detach().clone() for name, v in model.state_dict().items()}",
            'thread = threading.Thread(target=torch.save, args=(copies, "model.pt"))',
            "thread.start()",
            "thread.join()",
        ],
    }[plan.save]
    if plan.average == "by_hand":
        lines = [*lines, 'torch.save(ema, "ema.pt")']
    elif plan.average != "none":
        lines = [*lines, 'torch.save(ema.state_dict(), "ema.pt")']
    return lines
