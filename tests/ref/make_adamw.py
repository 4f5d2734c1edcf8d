"""Writes adamw_fixture.h: a few updates by torch.optim.AdamW in float32.

Run with torch 2.11:  python make_adamw.py > adamw_fixture.h
"""
import torch

N, N_STEP = 16, 8
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def row(tensor):
    """The exact values in hexadecimal: a float32 has six digits after the point, the seven beyond are zero."""
    values = [value.hex().replace("0000000p", "p") + "f" if value else "0" for value in tensor.tolist()]
    return ",\n    ".join(", ".join(values[i:i + 6]) for i in range(0, len(values), 6))


def floats(name, tensor):
    shape = "".join(f"[{n}]" for n in tensor.shape)
    rows = row(tensor) if tensor.dim() == 1 else ",\n    ".join("{ " + row(t) + " }" for t in tensor)
    print(f"static const float {name}{shape} = {{\n    {rows}\n}};")


def main():
    generator = torch.Generator().manual_seed(7)
    p = torch.nn.Parameter(torch.randn(N, generator=generator))
    scale = torch.logspace(-6, 2, N)  # each element has its own magnitude of gradients
    gradients = torch.randn(N_STEP, N, generator=generator) * scale
    gradients[:, 3] = 0
    gradients[4:, 5] = 0
    optimizer = torch.optim.AdamW([p], foreach=False, fused=False, **HYPER)
    before = p.detach().clone()
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[p]

    print(f"/* Written by make_adamw.py with torch {torch.__version__}; see there. */")
    print(f"enum {{ ADAMW_FIXTURE_N = {N}, ADAMW_FIXTURE_STEPS = {N_STEP} }};")
    print("static const fb_adamw adamw_fixture_hyper = {")
    print(f"    .lr = {HYPER['lr']}, .beta1 = {HYPER['betas'][0]}, .beta2 = {HYPER['betas'][1]}, .eps = {HYPER['eps']},"
          f" .weight_decay = {HYPER['weight_decay']}, .clip = 1\n}};")
    floats("adamw_fixture_before", before)
    floats("adamw_fixture_gradient", gradients)
    floats("adamw_fixture_after", p.detach())
    floats("adamw_fixture_m", state["exp_avg"])
    floats("adamw_fixture_v", state["exp_avg_sq"])


if __name__ == "__main__":
    main()
