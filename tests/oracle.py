"""The truth in float64: Algorithm 1 of arXiv 2502.08441 as the paper states it.

It keeps Adam's second moment of every row and averages the bias-corrected moments at every step,
where the package keeps the averages alone. It shares no code with the package.
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

    def __post_init__(self) -> None:
        self.embeddings = np.array(self.embeddings, dtype=np.float64)
        self.m = np.zeros_like(self.embeddings)
        self.v = np.zeros_like(self.embeddings)
        self.nu_max = np.zeros(self.embeddings.shape[1])

    def step(self, gradient: Array) -> None:
        g = np.array(gradient, dtype=np.float64) * (-1 if self.maximize else 1)
        self.t += 1
        if self.decoupled_weight_decay:
            self.embeddings -= self.lr * self.weight_decay * self.embeddings
        else:
            g = g + self.weight_decay * self.embeddings
        for i in range(len(self.embeddings)):
            self.m[i] = self.beta1 * self.m[i] + (1 - self.beta1) * g[i]
            self.v[i] = self.beta2 * self.v[i] + (1 - self.beta2) * g[i] ** 2
        m_hat = self.m / (1 - self.beta1**self.t)
        if self.amsgrad:
            self.nu_max = np.maximum(self.nu_max, self.v.mean(axis=0))
            nu_hat = self.nu_max / (1 - self.beta2**self.t)
        else:
            nu_hat = (self.v / (1 - self.beta2**self.t)).mean(axis=0)
        # Beyond the paper: tokens that never had a gradient neither count nor move.
        tokens = range(len(self.embeddings))
        if self.row_exponent or self.zero_sum:
            tokens = [i for i in tokens if self.v[i].any()]
            nu_hat = nu_hat * len(self.embeddings) / max(len(tokens), 1)
        denominator = np.sqrt(self.second_moment_scale * nu_hat) + self.eps
        updates = np.zeros_like(self.embeddings)
        row_means = self.v.mean(axis=1)
        for i in tokens:
            updates[i] = m_hat[i] / denominator
            if self.row_exponent:
                relative = row_means[i] / row_means[tokens].mean()
                updates[i] *= relative ** (-self.row_exponent / 2)
        if self.zero_sum:
            mean = updates.sum(axis=0) / max(len(tokens), 1)
            for i in tokens:
                updates[i] -= mean
        self.embeddings -= self.lr * updates
