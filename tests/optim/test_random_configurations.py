"""Everything at once, drawn at random: optimizers with all their options, step by step.

Each step is compared with the float64 oracle as in ``cases.py``. A test that fails prints its
configuration.
"""

import random

import pytest
import torch

from coupled_adam import CoupledAdam, CoupledAdamW
from coupled_adam.optim.sharded import full_tensor
from optim.cases import assert_as_oracle, in_rows, laid_out, oracle_of, through_disk

DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 2, 3, 5, 8, 13, 31, 32, 33, 64, 127, 129, 509, 1000)
COLUMNS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 64, 100, 128, 255, 1031)
SHAPES = [(rows, columns) for rows in ROWS for columns in COLUMNS if rows * columns <= 20_000]
LAYOUTS = ("contiguous", "contiguous", "transposed", "columns of more", "every other row")
BETAS = ((0.9, 0.95), (0.9, 0.999), (0.0, 0.99), (0.0, 0.95), (0.5, 0.3), (0.05, 0.75))
KINDS = ({}, {}, {"fused": True}, {"fused": False}, {"foreach": True}, {"differentiable": True})


def whole(x):
    """A copy, with the parts of all ranks."""
    return full_tensor(x.detach()).clone()


class Configuration:
    """All that a seed says: an optimizer of several groups, and what happens in its steps."""

    def __init__(self, seed):
        self.random = draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.cls = draw.choice([CoupledAdam, CoupledAdamW])
        self.dtype = draw.choice(DTYPES)
        self.options = draw.choice(KINDS)
        self.has_scaler = self.options.get("fused") is True and draw.random() < 0.5
        self.has_empty_rows = draw.random() < 0.5
        self.magnitude = 10 ** draw.uniform(-2, 2)
        self.reload_at, self.new_betas_at = (draw.choice([None, 1, 2]) for _ in range(2))
        self.layouts = [draw.choice(LAYOUTS) for _ in range(2)]
        self.groups = [self.draw_group() for _ in range(draw.choice([1, 1, 2, 3]))]
        self.matrices = [
            (group, self.leaf(shape)) for group in self.groups for shape in group.pop("shapes")
        ]

    def draw_group(self):
        """The options of a group, and the shapes of one or two matrices."""
        draw = self.random
        group = {
            "lr": 10 ** draw.uniform(-4, -1),
            "betas": draw.choice(BETAS),
            "eps": draw.choice([1e-15, 1e-8, 1e-8, 1e-5]),
            "weight_decay": draw.choice([0.0, 0.01, 0.3]),
            "maximize": draw.random() < 0.2,
            "amsgrad": draw.random() < 0.2,
            "coupled": True,
            "second_moment_scale": draw.choice([1.0, 1.0, 0.5, 4.0]),
            "vocab_dim": draw.choice([0, 0, 1]),
        }
        if not group["amsgrad"]:
            group["row_exponent"] = draw.choice([0.0, 0.5, 0.75, 1.0])
            group["zero_sum"] = draw.random() < 0.5
        shapes = draw.choices(SHAPES, k=draw.choice([1, 1, 2]))
        return {**group, "shapes": [s[::-1] if group["vocab_dim"] else s for s in shapes]}

    def leaf(self, shape):
        is_leaf = "differentiable" not in self.options
        return self.placed(self.normal(shape), self.layouts[0]).requires_grad_(is_leaf)

    def placed(self, values, layout):
        """A matrix as the optimizer gets it."""
        return laid_out(values, layout)

    def normal(self, shape):
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return values.to(self.dtype)

    def gradient(self, group, p):
        """As an embedding's: most tokens are not in the batch, and some never are."""
        g = self.normal(p.shape) * self.magnitude
        if self.has_empty_rows:
            vocab_dim = group["vocab_dim"]
            occurs = torch.rand(p.shape[vocab_dim], generator=self.generator) < 0.4
            occurs[0] = False
            g = g * occurs.unsqueeze(1 - vocab_dim)
        return g.to(self.dtype)

    def optimizer(self):
        groups = [
            {**group, "params": [p for of, p in self.matrices if of is group]}
            for group in self.groups
        ]
        return self.cls(groups, **self.options)

    def stored(self, optimizer, p):
        """Copies of a parameter and its state, whole."""
        state = optimizer.state.get(p, {})
        return whole(p), {name: whole(x) for name, x in state.items()}

    def __str__(self):
        lines = [f"{name} = {value}" for name, value in vars(self).items() if name != "matrices"]
        return "\n".join([*lines, *(str(p.shape) for _, p in self.matrices)])


def reloaded(c, optimizer):
    """Through the disk into a new optimizer of the same parameters."""
    fresh = c.optimizer()
    fresh.load_state_dict(through_disk(optimizer.state_dict()))
    return fresh


def check(c):
    """Take the steps of a configuration beside the oracle."""
    print(c)
    optimizer = c.optimizer()
    stored = [c.stored(optimizer, p) for _, p in c.matrices]
    for step in range(4):
        # What a user may do between two steps
        if step == c.new_betas_at:
            for group, own in zip(c.groups, optimizer.param_groups):
                group["betas"] = own["betas"] = c.random.choice(BETAS)
        if step == c.reload_at:
            optimizer = reloaded(c, optimizer)

        # Gradients, which may be missing, scaled, or too large for the scale
        grads = [c.gradient(group, p) for group, p in c.matrices]
        is_missing = step == 2 and c.random.random() < 0.2
        scale, overflows = 1.0, False
        if c.has_scaler:
            scale, overflows = 2.0 ** c.random.randint(0, 4), c.random.random() < 0.2
            optimizer.grad_scale = torch.tensor(scale)
            optimizer.found_inf = torch.tensor(float(overflows))
        for (_, p), grad in zip(c.matrices, grads):
            p.grad = None if is_missing else c.placed(grad * scale, c.layouts[1])

        # One step by each, from the same place
        oracles = [oracle_of(c.cls, group, *s) for (group, _), s in zip(c.matrices, stored)]
        optimizer.step()
        is_stepped = not is_missing and not overflows
        stored = [c.stored(optimizer, p) for _, p in c.matrices]
        for (group, _), oracle, grad, now in zip(c.matrices, oracles, grads, stored):
            if is_stepped:
                oracle.step(in_rows(grad, group))
            assert_as_oracle(c.cls, group, *now, oracle, is_stepped)


@pytest.mark.filterwarnings("ignore:.*in the first step only")  # in small matrices
@pytest.mark.filterwarnings("ignore:.*built with beta1 = 0")  # betas change in mid-training
@pytest.mark.parametrize(
    "seed", [*range(100), *(pytest.param(n, marks=pytest.mark.slow) for n in range(100, 500))]
)
def test_random_configurations(seed):
    check(Configuration(seed))
