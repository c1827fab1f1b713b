"""Records of a matrix in one step, as the optimizer makes them, for the kernels of GPUs."""

import torch

from coupled_adam.optim import reference
from coupled_adam.optim.update import Update

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The CPU stands for a GPU in Triton's interpreter, and where kernels are only compiled."""

LAYOUTS = ("rows", "transposed", "slices", "grad transposed", "exp_avg transposed")
NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95}
GROUP = {
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled_weight_decay": True,
    "maximize": False,
    "second_moment_scale": 1.0,
    "row_exponent": 0.0,
    "zero_sum": False,
    "differentiable": False,
}


def laid_out(values, layout, name):
    if layout == "transposed" or layout == f"{name} transposed":
        return values.T.contiguous().T
    if layout == "slices":  # of wider rows
        return torch.cat([values, values], 1)[:, : values.shape[1]]
    return values


def apply_all(update, kernel):
    """All that comes after ``measure``, on one rank."""
    if update.exp_avg_sq_row is not None and update.weights is None:
        reference.weigh_rows(update)
    if update.group["zero_sum"] and update.moment_sums is None:
        kernel.center(update)
    kernel.apply(update)


def record(rows, columns, dtype, layout="rows", vocab_dim=0, amsgrad=False, **options):
    """A matrix in one step, with a row for each token, on the device.

    Options are fields of the record, or a param group's.
    """
    from coupled_adam.optim.kernels import triton as kernel

    generator = torch.Generator().manual_seed(0)
    matrices = {}
    for name, scale in (("param", 1.0), ("grad", 1e-2), ("exp_avg", 1e-2)):
        values = torch.randn(rows, columns, generator=generator) * scale
        matrices[name] = laid_out(values.to(DEVICE, dtype), layout, name)
    nu = (torch.rand(columns, generator=generator) * 1e-4).to(DEVICE)
    per_row = None
    if options.get("row_exponent"):
        per_row = (torch.rand(rows, generator=generator) * 1e-4).to(DEVICE)
        for name in ("grad", "exp_avg"):  # a token that never occurs
            matrices[name][0] = per_row[0] = 0
    numbers = {name: options.pop(name, value) for name, value in NUMBERS.items()}
    return Update(
        group={**GROUP, "vocab_dim": vocab_dim, **options},
        parameter=matrices["param"] if vocab_dim == 0 else matrices["param"].T,
        moment=nu,
        step=torch.zeros(()),
        **matrices,
        exp_avg_sq=nu,
        max_exp_avg_sq=nu * 1.1 if amsgrad else None,
        exp_avg_sq_row=per_row,
        traced=False,
        **numbers,
        kernel=kernel,
        t=1.0,
    )
