"""The progress of training: one bar for all runs."""

import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from coupled_adam.lab.run import Run
from coupled_adam.lab.training.distributed import rank


class Progress:
    """A bar over the steps of all runs, on rank 0: which run, steps, time left, and loss.

    In a log file, it is written every half minute. The time left is that of all runs, and includes
    their evaluations.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._bar = tqdm(
            total=sum(run.recipe.steps for run in runs),
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
        # As if the bar had begun there: steps of earlier calls must not count as fast ones.
        if not self._bar.disable:
            self._bar.initial += step
        self._bar.n += step
        self._bar.refresh()

    def step(self, loss: float) -> None:
        """A step is finished; ``loss`` is the last that was logged."""
        self._bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self._bar.update()

    def say(self, activity: str) -> None:
        """Show beside the bar what is done between runs."""
        self._bar.set_postfix_str(activity)
