"""Records of a matrix in one step, as the optimizer makes them, for the kernels of GPUs."""

import torch

from coupled_adam.optim import update
from coupled_adam.optim.matrix import OPTIONS, Matrix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The CPU stands for a GPU in Triton's interpreter, and where kernels are only compiled."""

LAYOUTS = ("rows", "transposed", "slices", "grad transposed", "exp_avg transposed")
NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95}
GROUP = {
    **OPTIONS,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled_weight_decay": True,
    "maximize": False,
    "differentiable": False,
}


def laid_out(values, layout, name):
    if layout == "transposed" or layout == f"{name} transposed":
        return values.T.contiguous().T
    if layout == "slices":  # of wider rows
        return torch.cat([values, values], 1)[:, : values.shape[1]]
    return values


def record(rows, columns, dtype, layout="rows", vocab_dim=0, amsgrad=False, t=1.0, **options):
    """A matrix in step t, with a row for each token, on the device.

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
    if options.get("row_exponent") or options.get("zero_sum"):
        per_row = (torch.rand(rows, generator=generator) * 1e-4).to(DEVICE)
        for name in ("grad", "exp_avg"):  # a token that never occurs
            matrices[name][0] = per_row[0] = 0
    numbers = {name: options.pop(name, value) for name, value in NUMBERS.items()}
    if numbers["beta1"] == 0:
        matrices["exp_avg"] = None
    return Matrix(
        group={**GROUP, "vocab_dim": vocab_dim, **options},
        parameter=matrices["param"] if vocab_dim == 0 else matrices["param"].T,
        step=torch.tensor(t - 1.0),
        vocab_size=rows,
        hidden_size=columns,
        **matrices,
        exp_avg_sq=nu,
        max_exp_avg_sq=nu * 1.1 if amsgrad else None,
        exp_avg_sq_row=per_row,
        traced=False,
        **numbers,
        kernel=kernel,
    )


def take_step(matrix, factor=None, found_inf=None):
    """Take the step, in place."""
    sums = update.measure([matrix], as_is=factor is None and found_inf is None)
    update.update([matrix], sums, factor, found_inf)
