"""The progress of training: one bar for all runs."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from coupled_adam.lab.run import Run
from coupled_adam.lab.training.distributed import rank

_NARROW = 100  # columns, below which only the time left and the loss fit beside the bar


class Progress:
    """A bar over the steps of all runs, on rank 0: which run, steps, time left, and losses.

    It moves with every step and is used as a context manager. In a log file, it is written every
    half minute. The time left is that of all runs, and includes their evaluations.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._bar = tqdm(
            total=sum(run.recipe.steps for run in runs),
            desc=f"{runs[0].folder.name}: ",
            bar_format="{desc}{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
            disable=rank() > 0,
            dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else 30,
            smoothing=0,  # the average speed: evaluations count, too
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def start(self, run: Run, step: int) -> None:
        """A run starts after ``step`` steps made earlier; all of them if it is finished."""
        self._bar.set_description(run.folder.name, refresh=False)
        if self._bar.disable:  # on other ranks, where it has no counts
            return
        # As if the bar had begun there: steps of earlier calls must not count as fast ones.
        skipped = self._place(run, step) - self._bar.n
        self._bar.initial += skipped
        self._bar.n += skipped
        self._bar.last_print_n += skipped
        self._bar.refresh()

    def step(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """A run has finished ``step`` steps, with the last ``metrics`` that were logged."""
        names = {"train_loss": "loss {:.3f}"}
        if shutil.get_terminal_size().columns >= _NARROW:
            names |= {"valid_loss": "held-out {:.3f}", "tokens_per_second": "{:,.0f} tokens/s"}
        texts = [text.format(metrics[name]) for name, text in names.items() if name in metrics]
        self._bar.set_postfix_str(", ".join(texts), refresh=False)
        self._bar.update(self._place(run, step) - self._bar.n)

    def say(self, activity: str) -> None:
        """Show beside the bar what is done between runs."""
        self._bar.set_postfix_str(activity)

    def _place(self, run: Run, step: int) -> int:
        return step + sum(earlier.recipe.steps for earlier in self._runs[: self._runs.index(run)])
