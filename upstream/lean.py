"""LEAN: an optimizer for token embeddings without a matrix of state. One file, torch only.

Paste it into a training script, give it the embedding matrices [V, H], and give all else to any
other optimizer. Its state is V + 2 H numbers for a matrix, where AdamW's is 2 V H:

    embeddings = [model.wte.weight]  # tied, or with the head: [V, H]
    optimizers = [LEAN(embeddings, lr=4e-2), torch.optim.AdamW(the_rest, lr=6e-4)]

A token's step size follows from one number for its row, and from step 1 / (1 - beta2) on the step
after takes back by how much a step has moved the mean embedding. From coupled_adam (Apache 2.0), whose fused kernels, sharding and
checkpoints this leaves out; it takes the same steps.
"""

import math

import torch
from torch import Tensor


class LEAN(torch.optim.Optimizer):
    """Embedding matrices [V, H] with dense gradients; r [V], nu [H] and d [H] for each.

    The first step moves nothing: it only measures.
    """

    def __init__(self, params, lr=2e-3, beta2=0.99, exponent=0.75, eps=1e-8):
        super().__init__(params, dict(lr=lr, beta2=beta2, exponent=exponent, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for e in group["params"]:
                if e.grad is not None:
                    e.sub_(self.update(e.grad.float(), self.state[e], group).to(e.dtype))
        return loss

    @staticmethod
    def update(g: Tensor, state: dict, group: dict) -> Tensor:
        """What is subtracted from a matrix, [V, H]; g [V, H] in float32."""
        beta2, lr = group["beta2"], group["lr"]
        if not state:
            state.update(step=0, r=torch.zeros_like(g[:, 0]))
            state.update(nu=torch.zeros_like(g[0]), d=torch.zeros_like(g[0]))
        r, nu, d = state["r"], state["nu"], state["d"]
        state["step"] = t = state["step"] + 1
        # 1. Rows: a mean square for each, compared with the geometric mean of the columns', in
        # which none counts as more than 10^4 times as large as the others
        r.lerp_(g.square().mean(1), 1 - beta2)
        active = (r > 0) & r.isfinite()  # rows that have had a gradient
        known = (nu > 0) & nu.isfinite()  # columns that had one before this step
        logs = torch.where(known, nu, 1.0).log()
        number = known.sum().clamp(min=1)
        center = logs.sum() / number
        spread = torch.where(known, (logs - center).clamp(-math.log(1e4), math.log(1e4)), 0.0)
        seen = 1 - beta2 ** max(t - 1, 1)  # nu is that of the step before
        rho = (center + spread.sum() / number).exp() / seen
        w = (r / (1 - beta2**t) / rho) ** (-group["exponent"] / 2)
        # 2. Columns, and a limit: no row moves further than 30 times the rate
        z = torch.where(known, g / ((nu / seen).sqrt() + group["eps"]), 0.0)  # [V, H]
        w = torch.minimum(w, 30 / (z.square().sum(1) / number).sqrt())
        u = lr * torch.where(active, w, 0.0).nan_to_num(posinf=0.0)[:, None] * z
        # 3. The averages for the next step
        count = active.sum().clamp(min=1)
        nu.lerp_(torch.where(active[:, None], g, 0.0).square().sum(0) / count, 1 - beta2)
        taken_back = torch.where(active[:, None], d, 0.0)
        state["d"] = u.sum(0) / count * (t * (1 - beta2) >= 1)
        return u - taken_back
