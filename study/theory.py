"""The paper's argument, measured on a trained model: which updates sum to zero over the tokens.

For a hidden state h and true token t, the head's gradient of row i is g_i = -(delta_it - p_i) h,
and these gradients sum to zero over i (arXiv 2502.08441). So do the updates of SGD and of Coupled
Adam. Those of AdamW do not, since each row is divided by its own second moment, and so the mean
embedding drifts. With tied weights, the input side adds a gradient that does not sum to zero.

python -m study.theory RUN
python -m study.theory MODEL --text corpus.txt --picture updates.png
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from coupled_adam import CoupledAdamW
from coupled_adam.embeddings import mean_embedding, pictures
from coupled_adam.errors import UsageError
from coupled_adam.files import write_atomically
from coupled_adam.lab.data.batches import held_out_batches
from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
from coupled_adam.lab.evaluation.load_model import (
    block_length,
    check_model,
    load_model,
    trusted_run,
)
from coupled_adam.lab.models import require_causal
from coupled_adam.lab.training.loss import sequence_losses
from coupled_adam.rendering.pictures import ADAMW_COLOR, COUPLED_ADAM_COLOR, drawn
from coupled_adam.runs import MODEL, is_run
from coupled_adam.text.token_files import Tokens
from coupled_adam.text.tokenizers import load_tokenizer, text_tokens

Side = Literal["output", "input", "both"]
OPTIMIZERS = ("SGD", "AdamW", "Coupled Adam")
PAPER_BETAS, PAPER_EPS = (0.9, 0.95), 1e-8


@dataclasses.dataclass(frozen=True)
class Sums:
    """How closely the gradients of an embedding matrix, and the resulting updates, sum to zero.

    ``gradient`` and ``updates`` are ||sum_i x_i|| / sum_i ||x_i|| over the rows x_i. This is 0 if
    the rows sum to zero, and 1 if all rows point in the same direction.

    Attributes:
        gradient: the value for the average gradient over the batches.
        updates: the value for the last update of each optimizer.
        input_share: for each optimizer, the share of the sum of the updates, measured along that
            sum, that is due to the gradient of the input side. None if there is only one side.
        away: for each optimizer, the cosine between the sum of the updates and the mean embedding.
            If it is positive, the mean moves further away from the origin.
    """

    gradient: float
    updates: dict[str, float]
    input_share: dict[str, float] | None
    away: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Theory:
    """The sums for a model's embedding matrices, and the last update [V, H] of each optimizer.

    Attributes:
        tied: whether a single matrix is used for input and output embeddings.
        batches: the number of gradients that the optimizers were given.
        sums: for the gradient from the head (``"output"``), for that from the lookup (``"input"``)
            and, for a tied model, also for the sum of the two, on which its optimizer acts.
        updates: the updates by the gradient on which the output embeddings' optimizer acts.
    """

    tied: bool
    batches: int
    sums: dict[Side, Sums]
    updates: dict[str, Tensor]

    def to_dict(self) -> dict[str, Any]:
        """All fields for JSON, except the updates."""
        sums = {side: dataclasses.asdict(values) for side, values in self.sums.items()}
        return {"tied": self.tied, "batches": self.batches, "sums": sums}


def measure_folder(
    folder: Path,
    *,
    text: Path | None,
    batches: int,
    batch_size: int,
    cache: Path,
) -> Theory:
    """Call :func:`measure_theory` for a run and its training text, or for a model and a text.

    Args:
        folder: the folder of a finished run, or of a causal language model in Hugging Face format.
        text: for a model only: a file, or a folder of text files.
        batches: the number of gradients.
        batch_size: the number of sequences in a batch. They are as long as in the run's training
            or, for a model, as long as it allows, but at most 1024 tokens.
        cache: the folder of prepared corpora, which contains a run's text.

    Raises:
        UsageError: a text is given for a run, or none for a model; the model is not causal; or for
            the reasons given in :func:`measure_theory`.
    """
    tokens: Tokens | NDArray[Any]
    if is_run(folder):
        if text is not None:
            raise UsageError(f"--text is for models; {folder} is a run with its own")
        recipe = trusted_run(folder).recipe
        training = recipe.training
        model = load_model(folder / MODEL, "cpu")
        tokens = prepare_corpus(recipe, cache).tokens("train")
        length, betas, eps = training.sequence_length, training.betas, training.eps
    else:
        check_model(folder)
        if text is None:
            raise UsageError(f"{folder} is a model: name a text for it with --text")
        model = load_model(folder, "cpu")
        require_causal(model, folder)
        tokens = text_tokens(text, load_tokenizer(folder))
        length, betas, eps = block_length(model), PAPER_BETAS, PAPER_EPS
    taken = itertools.islice(held_out_batches(tokens, batch_size, length), batches)
    return measure_theory(model, taken, betas=betas, eps=eps)


def measure_theory(
    model: PreTrainedModel,
    batches: Iterable[Tensor],
    *,
    betas: tuple[float, float] = PAPER_BETAS,
    eps: float = PAPER_EPS,
) -> Theory:
    """Measure gradients of some batches at fixed weights, and the updates of several optimizers.

    torch's SGD (with momentum) and AdamW (without weight decay), and CoupledAdamW, are run on the
    same gradients. Only their last update is examined, since by then the moments are averages over
    many batches. A tied matrix is untied in memory, which separates the two sides of its gradient.

    Args:
        model: a causal language model; its weights do not change, but are untied afterwards.
        batches: batches of token ids, [sequences, length + 1] each.
        betas: the betas of AdamW and Coupled Adam; the first is also SGD's momentum.
        eps: the eps of AdamW and Coupled Adam.

    Raises:
        UsageError: there are no batches, or a gradient is not finite.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    inputs: Any = model.get_input_embeddings()
    tied = head.weight is inputs.weight
    if tied:
        head.weight = nn.Parameter(head.weight.detach().clone())
    model.requires_grad_(False)
    head.weight.requires_grad_(True)
    inputs.weight.requires_grad_(True)

    sides: tuple[Side, ...] = ("output", "input", "both") if tied else ("output", "input")
    streams = {side: _Stream(head.weight, betas, eps, tied) for side in sides}
    seen = 0
    for batch in batches:
        head.weight.grad = inputs.weight.grad = None
        sequence_losses(model, batch.to(model.device)).mean().backward()
        gradients = {"output": head.weight.grad, "input": inputs.weight.grad}
        if not all(torch.isfinite(gradient).all() for gradient in gradients.values()):
            raise UsageError(f"{model.name_or_path}: a gradient is not finite")
        for side, stream in streams.items():
            gradient = head.weight.grad + inputs.weight.grad if side == "both" else gradients[side]
            stream.step(gradient, inputs.weight.grad)
        seen += 1
    if not seen:
        raise UsageError("the text is shorter than one batch: give more of it")
    mean = torch.from_numpy(mean_embedding(head.weight)).to(head.weight.device)
    sums = {side: stream.sums(mean, seen, side == "both") for side, stream in streams.items()}
    own = streams["both" if tied else "output"]
    return Theory(tied, seen, sums, own.updates)


class _Stream:
    """A stream of gradients of one matrix, and the updates that each optimizer computes from it."""

    def __init__(
        self, weight: Tensor, betas: tuple[float, float], eps: float, keep_input: bool
    ) -> None:
        self.betas, self.eps = betas, eps
        self.total = torch.zeros_like(weight, requires_grad=False)
        self.input_average = torch.zeros_like(self.total) if keep_input else None
        self.parameters = {name: nn.Parameter(torch.zeros_like(weight)) for name in OPTIMIZERS}
        one, two, three = self.parameters.values()
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "SGD": torch.optim.SGD([one], lr=1.0, momentum=betas[0]),
            "AdamW": torch.optim.AdamW([two], lr=1.0, betas=betas, eps=eps, weight_decay=0),
            "Coupled Adam": CoupledAdamW(
                [three], lr=1.0, betas=betas, eps=eps, weight_decay=0, coupled=True
            ),
        }

    @torch.no_grad()
    def step(self, gradient: Tensor, input_gradient: Tensor) -> None:
        """Take the next gradient, and the part of it that comes from the input side."""
        self.total += gradient
        if self.input_average is not None:
            self.input_average.lerp_(input_gradient, 1 - self.betas[0])
        for name, parameter in self.parameters.items():
            parameter.zero_()  # so that it equals the update after the step
            parameter.grad = gradient
            self.optimizers[name].step()

    @property
    def updates(self) -> dict[str, Tensor]:
        """The last update [V, H] of each optimizer."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def sums(self, mean: Tensor, batches: int, both: bool) -> Sums:
        """The sums of the average gradient and of the last updates."""
        totals = {name: update.double().sum(0) for name, update in self.updates.items()}
        share = None
        if both and self.input_average is not None:
            share = {}
            for name, total in totals.items():
                input_average = self.input_average.double() / self._denominator(name, batches)
                share[name] = float(-input_average.sum(0) @ total / (total @ total))
        return Sums(
            _cancellation(self.total),
            {name: _cancellation(update) for name, update in self.updates.items()},
            share,
            {
                name: float(torch.cosine_similarity(total, mean, dim=0))
                for name, total in totals.items()
            },
        )

    def _denominator(self, name: str, batches: int) -> Tensor | float:
        """The divisor of the average gradient in an optimizer's update, at learning rate one."""
        if name == "SGD":  # its momentum is a sum, not an average
            return 1 - self.betas[0]
        state = self.optimizers[name].state[self.parameters[name]]
        v_hat: Tensor = state["exp_avg_sq"].double() / (1 - self.betas[1] ** batches)
        return (v_hat.sqrt() + self.eps) * (1 - self.betas[0] ** batches)


def _cancellation(rows: Tensor) -> float:
    """||sum_i x_i|| / sum_i ||x_i||."""
    rows = rows.double()
    return float(rows.sum(0).norm() / rows.norm(dim=1).sum())


_SIDES: dict[Side, str] = {
    "output": "of the head",
    "input": "of the lookup",
    "both": "of both, tied",
}


def rows(theory: Theory) -> list[tuple[str, list[str]]]:
    """The rows of the table: a label, and the numbers for gradient and optimizers."""
    table = []
    for side, sums in theory.sums.items():
        values = [sums.gradient, *sums.updates.values()]
        table.append((f"sum over the rows, {_SIDES[side]}", [f"{value:.1e}" for value in values]))
    last = theory.sums["both" if theory.tied else "output"]
    if last.input_share is not None:
        shares = ["–", *(f"{value:.0%}" for value in last.input_share.values())]
        table.append(("  the share of the lookup in it", shares))
    away = ["–", *(f"{value:+.2f}" for value in last.away.values())]
    return [*table, ("cosine of the sum and the mean", away)]


def picture(theory: Theory) -> Figure:
    """Draw each optimizer's last updates of all rows as a cloud, with their mean and the origin.

    They are in units of their mean norm, seen along their mean (as Fig. 1).
    """
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
    return figure


def main(arguments: list[str] | None = None) -> None:
    """Measure a run or a model, print the table, and draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m study.theory", description=__doc__)
    parser.add_argument("model", type=Path, help="a run, or a causal language model's folder")
    parser.add_argument("--text", type=Path, help="for a model: a file, or a folder of text files")
    parser.add_argument("--batches", type=int, default=50, help="gradients to take")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--picture", type=Path, help="write a picture of the updates")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="prepared corpora")
    options = parser.parse_args(arguments)
    theory = measure_folder(
        options.model,
        text=options.text,
        batches=options.batches,
        batch_size=options.batch_size,
        cache=options.cache,
    )
    if options.json:
        print(json.dumps(theory.to_dict(), indent=2, allow_nan=False))
    else:
        print(f"{'':34}" + "".join(f"{name:>14}" for name in ("gradient", *OPTIMIZERS)))
        for label, values in rows(theory):
            print(f"{label:34}" + "".join(f"{value:>14}" for value in values))
    if options.picture is not None:
        write_atomically(options.picture, drawn(picture(theory), options.picture.suffix[1:]))


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"error: {error}")
