"""What the study says of single updates, on small cases."""

import pytest
import torch
from study import movement

from coupled_adam import CoupledAdamW


def updates_of(options, gradients):
    """The updates of an optimizer that really moves its matrix, at a learning rate of one."""
    matrix = torch.nn.Parameter(torch.zeros_like(gradients[0], dtype=torch.float64))
    kind = CoupledAdamW if "coupled" in options else torch.optim.AdamW
    optimizer = kind([matrix], lr=1.0, weight_decay=0.0, **options)
    for gradient in gradients:
        before = matrix.detach().clone()
        matrix.grad = gradient.double()
        optimizer.step()
        yield matrix.detach() - before


@pytest.mark.parametrize("name", movement.RULES)
def test_a_rule_computes_what_its_optimizer_would_do(name):
    """Although its matrix is put back to zero before each step."""
    gradients = [*torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))]
    rule = movement.Rule(movement.RULES[name], gradients[0])
    for gradient, expected in zip(gradients, updates_of(movement.RULES[name], gradients)):
        rule.step(gradient)
        torch.testing.assert_close(rule.update.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_window_by_hand(monkeypatch):
    """Three tokens, two bands: sums and shares of rows that move by whole numbers."""
    rule = movement.Rule({"betas": (0.0, 0.9)}, torch.zeros(3, 2))
    monkeypatch.setattr(movement, "RULES", {"rule": {}})
    downhill = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    window = movement.Window(7, downhill)
    rule.update = torch.tensor([[3.0, 4.0], [0.0, 1.0], [2.0, 0.0]])
    window.add({"rule": rule}, torch.tensor([[0]]))
    rule.update = torch.tensor([[3.0, -4.0], [0.0, 1.0], [-1.0, 0.0]])
    window.add({"rule": rule}, torch.tensor([[1, 1]]))
    result = window.result(torch.tensor([0, 0, 1]))
    measured = result["rules"]["rule"]
    assert result["start"] == 7
    # Sums (6, 0), (0, 2), (1, 0): along downhill 6 + 4, of norms sqrt(36 + 4) and sqrt(1 + 4)
    assert measured["cosine"][0] == pytest.approx(10 / (40 * 5) ** 0.5)
    # Squared movements of 25, 1 and 4, then 25, 1 and 1
    assert measured["in_batch"] == pytest.approx([26 / 52, 0])
