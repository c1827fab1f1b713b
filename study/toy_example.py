"""A toy example, as in the paper's Fig. 1: one update of three embeddings by each optimizer.

python -m study.toy_example
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from coupled_adam import CoupledAdamW
from coupled_adam.files import write_atomically
from coupled_adam.rendering.pictures import COUPLED_ADAM_COLOR, Array, drawn

TOY_EMBEDDINGS = ((-0.5, 0.9), (1.4, -0.3), (-0.1, -0.7))


def toy_updates() -> dict[str, Array]:
    """The first updates, [3, 2] each, of three embeddings in the plane by three optimizers.

    For hidden state h and true token 0, the head's gradient of row i is -(delta_i0 - p_i) h; these
    gradients sum to zero over the tokens i.
    """
    hidden = torch.tensor([1.0, 0.5], dtype=torch.float64)
    start = torch.tensor(TOY_EMBEDDINGS, dtype=torch.float64)
    optimizers: dict[str, Callable[[torch.nn.Parameter], torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD([p], lr=1.0),
        "AdamW": lambda p: torch.optim.AdamW([p], lr=0.5, weight_decay=0),
        "Coupled Adam": lambda p: CoupledAdamW([p], lr=0.25, weight_decay=0, coupled=True),
    }
    updates = {}
    for name, make in optimizers.items():
        embeddings = torch.nn.Parameter(start.clone())
        loss = torch.nn.functional.cross_entropy(embeddings @ hidden, torch.tensor(0))
        loss.backward()
        make(embeddings).step()
        updates[name] = (embeddings.detach() - start).numpy()
    return updates


def draw_toy_example() -> Figure:
    """Draw the updates as arrows at the embeddings, and their sum as an arrow at the origin."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    start = np.array(TOY_EMBEDDINGS)
    for ax, (name, updates) in zip(figure.subplots(1, 3, sharey=True), toy_updates().items()):
        arrows = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.012}
        ax.quiver(0, 0, 1.0, 0.5, color="lightgrey", **arrows)
        ax.annotate("h", (1.02, 0.5), color="grey")
        ax.plot(*start.T, "o", color=COUPLED_ADAM_COLOR)
        for i, point in enumerate(start, 1):
            ax.annotate(f"e{'₀₁₂₃'[i]}", point, xytext=(-4, 8), textcoords="offset points")
        ax.quiver(*start.T, *updates.T, color=COUPLED_ADAM_COLOR, **arrows)
        total = updates.sum(0).round(9) + 0.0  # + 0.0: no minus sign before a zero
        if np.linalg.norm(total) > 1e-6:
            ax.quiver(0, 0, *total, color="#d00000", **arrows)
        ax.plot(0, 0, "+", color="black", markersize=14)
        ax.set(
            title=f"{name}: sum ({total[0]:.2f}, {total[1]:.2f})",
            xlim=(-1.9, 2.3),
            ylim=(-1.3, 1.7),
            aspect="equal",
        )
    return figure


def main() -> None:
    """Draw the picture of the pages again."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    images = Path(__file__).parents[1] / "docs" / "images"
    write_atomically(images / "toy_example.png", drawn(draw_toy_example()))


if __name__ == "__main__":
    main()
