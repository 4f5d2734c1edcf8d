"""Writes lr_fixture.h: learning rates as transformers computes them.

Run with transformers 5.17 and torch 2.11:  python make_lr.py > lr_fixture.h
"""
import torch
import transformers
from transformers.optimization import get_scheduler

SHAPES = {"linear": "FB_LR_SHAPE_LINEAR", "cosine": "FB_LR_SHAPE_COSINE", "1-sqrt": "FB_LR_SHAPE_1_SQRT"}
N_STEP = 34  # beyond every n_total below: what happens after the end is part of the definition

# name, base, n_warmup, n_total, keyword arguments as lr_scheduler_kwargs gives them
CASES = [
    ("linear", 2e-5, 0, 30, {}),
    ("linear", 3e-4, 7, 30, {}),
    ("linear", 1.0, 1, 1, {}),
    ("linear", 1e-3, 12, 10, {}),
    ("cosine", 2e-5, 0, 30, {}),
    ("cosine", 3e-4, 7, 30, {}),
    ("cosine", 3e-4, 3, 25, {"num_cycles": 1.75}),
    ("cosine", 1e-3, 12, 10, {}),
    ("cosine_with_min_lr", 3e-4, 7, 30, {"min_lr": 3e-5}),
    ("cosine_with_min_lr", 2e-5, 0, 30, {"min_lr": 7e-6, "num_cycles": 0.8}),
    ("constant", 5e-5, 0, 30, {}),
    ("constant", 5e-5, 9, 30, {}),  # warmup is ignored
    ("constant_with_warmup", 5e-5, 9, 30, {}),
    ("constant_with_warmup", 5e-5, 0, 30, {}),
    ("warmup_stable_decay", 3e-4, 6, 30, {"num_decay_steps": 10}),
    ("warmup_stable_decay", 3e-4, 0, 30, {"num_decay_steps": 0}),
    ("warmup_stable_decay", 1e-3, 5, 30, {"num_decay_steps": 25, "min_lr_ratio": 0.1}),
    *[
        ("warmup_stable_decay", 1e-4, 8, 30,
         {"num_decay_steps": 12, "min_lr_ratio": 0.05, "warmup_type": up, "decay_type": down, "num_cycles": cycles})
        for up, down, cycles in [("cosine", "linear", 0.5), ("1-sqrt", "cosine", 0.5), ("linear", "1-sqrt", 0.5),
                                 ("cosine", "cosine", 0.9)]
    ],
]


def rates(name, base, n_warmup, n_total, kwargs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    scheduler = get_scheduler(name, optimizer, n_warmup, n_total, dict(kwargs))
    for _ in range(N_STEP):
        yield scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()


def main():
    print(f"/* Written by make_lr.py with transformers {transformers.__version__}; see there. */")
    print(f"enum {{ LR_FIXTURE_STEPS = {N_STEP} }};")
    print("static const struct {\n    fb_lr  schedule;\n    double rate[LR_FIXTURE_STEPS];\n} lr_fixture[] = {")
    for name, base, n_warmup, n_total, kwargs in CASES:
        n_decay = kwargs.get("num_decay_steps", 0)
        fields = {
            "type": f"FB_LR_{name.upper()}", "base": base, "n_warmup": n_warmup, "n_total": n_total,
            "n_cycle": kwargs.get("num_cycles", 0.5), "min_lr": kwargs.get("min_lr", 0.0),
            "n_stable": n_total - n_warmup - n_decay if "num_decay_steps" in kwargs else 0, "n_decay": n_decay,
            "min_ratio": kwargs.get("min_lr_ratio", 0.0),
            "warmup_shape": SHAPES[kwargs.get("warmup_type", "linear")],
            "decay_shape": SHAPES[kwargs.get("decay_type", "cosine")],
        }
        given = [f".{key} = {value}" for key, value in fields.items() if value]
        print("    { { " + ",\n        ".join(", ".join(given[i:i + 5]) for i in range(0, len(given), 5)) + " },")
        values = [value.hex() if value else "0" for value in map(float, rates(name, base, n_warmup, n_total, kwargs))]
        rows = [", ".join(values[i:i + 5]) for i in range(0, N_STEP, 5)]
        print("      { " + ",\n        ".join(rows) + " } },")
    print("};")


if __name__ == "__main__":
    main()
