"""The truth in float64: Algorithm 1 of arXiv 2502.08441 as the paper states it, and LEAN.

Algorithm 1 keeps Adam's second moment of every row here, and averages the bias-corrected moments at
every step, where the package keeps the averages alone. LEAN is written from its formulas, row by
row. Neither shares code with the package.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class CoupledAdamOracle:
    """One embedding matrix [V, H] and its state."""

    embeddings: Array
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = True
    amsgrad: bool = False
    maximize: bool = False
    second_moment_scale: float = 1.0
    row_exponent: float = 0.0
    zero_sum: bool = False
    t: int = 0
    m: Array = field(init=False)
    v: Array = field(init=False)
    nu_max: Array = field(init=False)
    r: Array = field(init=False)
    nu: Array = field(init=False)
    d: Array = field(init=False)
    largest_update: float = 0.0
    largest_factor: float = 0.0

    def __post_init__(self) -> None:
        self.embeddings = np.array(self.embeddings, dtype=np.float64)
        self.m = np.zeros_like(self.embeddings)
        self.v = np.zeros_like(self.embeddings)
        tokens, features = self.embeddings.shape
        self.nu_max, self.nu, self.d = np.zeros((3, features))
        self.r = np.zeros(tokens)

    def step(self, gradient: Array) -> None:
        g = np.array(gradient, dtype=np.float64) * (-1 if self.maximize else 1)
        self.t += 1
        if self.decoupled_weight_decay:
            self.embeddings -= self.lr * self.weight_decay * self.embeddings
        else:
            g = g + self.weight_decay * self.embeddings
        if self.row_exponent or self.zero_sum:
            self.step_lean(g)
        else:
            self.step_coupled(g)

    def step_coupled(self, g: Array) -> None:
        for i in range(len(self.embeddings)):
            self.m[i] = self.beta1 * self.m[i] + (1 - self.beta1) * g[i]
            self.v[i] = self.beta2 * self.v[i] + (1 - self.beta2) * g[i] ** 2
        m_hat = self.m / (1 - self.beta1**self.t)
        if self.amsgrad:
            self.nu_max = np.maximum(self.nu_max, self.v.mean(axis=0))
            nu_hat = self.nu_max / (1 - self.beta2**self.t)
        else:
            nu_hat = (self.v / (1 - self.beta2**self.t)).mean(axis=0)
        denominator = np.sqrt(self.second_moment_scale * nu_hat) + self.eps
        self.embeddings -= self.lr * m_hat / denominator

    def step_lean(self, g: Array) -> None:
        seen = max(self.t - 1, 1)  # gradients in nu, which is 0 in the first step
        rho = self.typical_square() / (1 - self.beta2**seen)
        scales = np.zeros_like(self.nu)
        for j in np.flatnonzero((self.nu != 0) & ~np.isinf(self.nu)):
            nu_hat = self.second_moment_scale * self.nu[j] / (1 - self.beta2**seen)
            scales[j] = 1 / (np.sqrt(nu_hat) + self.eps)
        self.r = self.beta2 * self.r + (1 - self.beta2) * (g**2).mean(axis=1)
        weights = np.zeros_like(self.r)
        updates, factors = np.zeros((2, *self.embeddings.shape))
        for i in range(len(self.embeddings)):
            self.m[i] = self.beta1 * self.m[i] + (1 - self.beta1) * g[i]
            z = scales * self.m[i] / (1 - self.beta1**self.t)  # in the columns' units
            weights[i] = self.weight(self.r[i] / (1 - self.beta2**self.t) / rho, z)
            factors[i] = self.lr * weights[i] * scales / (1 - self.beta1**self.t)
            updates[i] = factors[i] * self.m[i]
            if self.lr:
                self.embeddings[i] -= updates[i] - (self.d if self.zero_sum and weights[i] else 0)
        self.average(g, weights)
        self.largest_update = max(np.abs(updates).max(), np.abs(self.d).max())
        self.largest_factor = factors.max()
        if self.t < 1 / (1 - self.beta2):
            self.d = np.zeros_like(self.d)
        elif weights.any() and self.lr:
            self.d = updates.sum(axis=0) / np.count_nonzero(weights)

    def typical_square(self) -> float:
        """The geometric mean of nu, to which no column counts as more than 10^4 times as far."""
        known = [nu_j for nu_j in self.nu if nu_j and not np.isinf(nu_j)]
        if not known:
            return 1.0
        middle = np.exp(np.mean(np.log(known)))
        return float(np.exp(np.mean(np.log(np.clip(known, middle * 1e-4, middle * 1e4)))))

    def weight(self, relative: float, z: Array) -> float:
        """A row's weight, 0 without a gradient so far."""
        if relative == 0 or np.isinf(relative):
            return 0.0
        weight = relative ** (-self.row_exponent / 2)
        # No row moves further than 30 times the rate, over the columns that move
        known = (self.nu != 0) & ~np.isinf(self.nu)
        length = np.sqrt(self.second_moment_scale * (z[known] ** 2).mean()) if known.any() else 0.0
        return float(min(weight, 30 / length)) if length else float(weight)

    def average(self, g: Array, weights: Array) -> None:
        if weights.any():
            mean = (g[weights != 0] ** 2).mean(axis=0)
            self.nu = self.beta2 * self.nu + (1 - self.beta2) * mean
