"""Show measurements of the paper's argument as a table, a picture and a page."""

from matplotlib.figure import Figure
from rich.table import Table

from coupled_adam.embeddings import pictures
from coupled_adam.lab.evaluation.theory import OPTIMIZERS, Side, Theory
from coupled_adam.rendering.page import render_table
from coupled_adam.rendering.pictures import ADAMW_COLOR, COUPLED_ADAM_COLOR, Picture
from coupled_adam.rendering.tables import terminal_table

EXPLANATION = (
    "‖sum of the rows‖ / sum of their norms: 0, they cancel; 1, all point one way. The gradients "
    "are taken at fixed weights, and each optimizer makes its updates of the same ones. Where the "
    "cosine is above zero, the updates move the mean embedding further from the origin."
)

_SIDES: dict[Side, str] = {
    "output": "of the head",
    "input": "of the lookup",
    "both": "of both, tied",
}


def theory_rows(theory: Theory) -> list[tuple[str, list[str]]]:
    """Rows for the terminal and the page: a label, and the numbers for gradient and optimizers."""
    rows = []
    for side, sums in theory.sums.items():
        values = [sums.gradient, *sums.updates.values()]
        rows.append((f"sum over the rows, {_SIDES[side]}", [f"{value:.1e}" for value in values]))
    last = theory.sums["both" if theory.tied else "output"]
    if last.input_share is not None:
        shares = ["–", *(f"{value:.0%}" for value in last.input_share.values())]
        rows.append(("  the share of the lookup in it", shares))
    away = ["–", *(f"{value:+.2f}" for value in last.away.values())]
    rows.append(("cosine of the sum and the mean", away))
    return rows


def theory_table(theory: Theory, name: str) -> Table:
    """Create the table for the terminal."""
    table = terminal_table(
        title=f"{name}: {theory.batches} gradients at fixed weights",
        caption="‖sum of the rows‖ / sum of their norms: 0, they cancel; 1, all point one way.",
    )
    for header in ("", "gradient", *OPTIMIZERS):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for label, values in theory_rows(theory):
        table.add_row(label, *values)
    return table


def theory_page(theory: Theory, name: str) -> str:
    """Create an HTML page with the table and the picture."""
    title = f"{name}: what sums to zero over the vocabulary"
    columns = ["gradient", *OPTIMIZERS]
    rows = [(label, "", values) for label, values in theory_rows(theory)]
    return render_table(title, columns, [("", rows)], [theory_picture(theory)], [EXPLANATION])


def theory_picture(theory: Theory) -> Picture:
    """Draw each optimizer's last updates of all rows as a cloud, with their mean and the origin."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    for ax, (name, update) in zip(figure.subplots(1, 3), theory.updates.items()):
        scaled = update / update.norm(dim=1).mean()
        pictures.plot_cloud(ax, scaled, ADAMW_COLOR if name == "AdamW" else COUPLED_ADAM_COLOR)
        pictures.finish_clouds(ax)
        side = theory.sums["both" if theory.tied else "output"]
        ax.set_title(f"{name}: sum {side.updates[name]:.1e}")
        # The updates of a few frequent tokens are much larger and would compress all others.
        limits = {"xlim": (-4, 4), "ylim": (-3, 3)}
        ax.set(xlabel="along the mean update", adjustable="box", **limits)
    return Picture(
        figure,
        "The last update of every row by each optimizer, in units of the mean norm, seen along "
        "their mean. X: the mean, which moves the mean embedding; +: the origin (as Fig. 1).",
    )
