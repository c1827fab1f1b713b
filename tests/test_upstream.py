"""The page that is pasted elsewhere takes the package's steps."""

import copy
import importlib.util
from pathlib import Path

import torch
from torch import nn

from coupled_adam import LEAN, CoupledAdamW
from optim.cases import gradient, matrix

PATH = Path(__file__).parents[1] / "upstream" / "lean.py"


def pasted():
    spec = importlib.util.spec_from_file_location("pasted_lean", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LEAN


def test_the_pasted_page_is_lean():
    """With rare tokens, a token and a column without gradients, and a gradient that jumps."""
    start = matrix((40, 12), dtype=torch.float32)
    ps = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [
        pasted()(ps[:1], lr=1e-2),
        CoupledAdamW([{"params": ps[1:], **LEAN | {"lr_factor": 1}, "coupled": True}], 1e-2),
    ]
    optimizers[1].param_groups[0]["weight_decay"] = 0.0
    for step in range(120):
        g = gradient((40, 12), step, torch.float32)
        g[:, 3] = 0 if step < 5 else g[:, 3]
        g[7] *= 1e6 if step == 50 else 1.0
        for p, optimizer in zip(ps, optimizers):
            p.grad = g.clone()
            optimizer.step()
    torch.testing.assert_close(*(p.detach() for p in ps), rtol=1e-4, atol=1e-5)
    assert (ps[0] - start).abs().max() > 0.1


def test_the_pasted_page_goes_on_from_a_checkpoint():
    p = nn.Parameter(matrix((9, 4), dtype=torch.float32))
    optimizer = pasted()([p])
    for step in range(3):
        p.grad = gradient((9, 4), step, torch.float32)
        optimizer.step()
    q = nn.Parameter(p.detach().clone())
    resumed = pasted()([q])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, of_parameter in ((p, optimizer), (q, resumed)):
        parameter.grad = gradient((9, 4), 3, torch.float32)
        of_parameter.step()
    assert torch.equal(p, q)
