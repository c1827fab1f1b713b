"""Accuracy on downstream tasks, measured with the lm-evaluation-harness."""

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coupled_adam.errors import UsageError, install, one_line
from coupled_adam.fields import require
from coupled_adam.text.tokenizers import document_start

PAPER_TASKS = (
    "arc_easy",
    "arc_challenge",
    "hellaswag",
    "lambada_openai",
    "race",
    "truthfulqa_mc2",
    "winogrande",
)
"""The tasks of arXiv 2502.08441."""

_ACCURACIES = ("acc", "acc_norm", "exact_match")  # the first one that a task reports


class Downstream:
    """Tasks of the lm-evaluation-harness, by the names of tasks, groups or tags.

    ``folder`` has the user's own tasks (YAML); then the harness's are looked up. ``limit`` is how
    many examples of each are used, from its start. Raises UsageError if the harness is not
    installed, there is no such task, its data cannot be loaded, or it does not report an accuracy.
    """

    def __init__(
        self,
        names: Sequence[str] = PAPER_TASKS,
        folder: Path | None = None,
        limit: int | None = None,
    ) -> None:
        try:
            from lm_eval.tasks import TaskManager
        except ModuleNotFoundError as error:
            raise UsageError(f"--lm-eval: {error}; {install('lm-eval')}") from None
        require(folder is None or folder.is_dir(), f"--lm-eval-path {folder} is not a folder")
        path = None if folder is None else str(folder)
        # Indexing the harness's thousands of tasks takes seconds, which the user's own do not need.
        self._manager = TaskManager(include_path=path, include_defaults=folder is None)
        if folder is not None and not set(names) <= set(self._manager.all_tasks):
            self._manager = TaskManager(include_path=path)
        self.names = list(dict.fromkeys(names))
        self.limit = limit
        # Loaded before anything is evaluated, which may take hours, to see that they can be.
        try:
            tasks = self._manager.load(self.names)["tasks"]
        except Exception as error:  # raised by several libraries and by the tasks' own code
            raise UsageError(
                f"--lm-eval {' '.join(self.names)}: {type(error).__name__}: {one_line(error)}. "
                "Are these the tasks' names (lm-eval ls tasks), and can their data be reached?"
            ) from None
        for name, task in tasks.items():
            measured = task.aggregation()
            require(
                {*measured} & {*_ACCURACIES},
                f"--lm-eval {name} measures {', '.join(measured)}, but no accuracy",
            )

    def evaluate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int
    ) -> dict[str, Any]:
        """Measure the accuracy on each task, zero-shot unless the task itself shows examples.

        Returns:
            ``accuracy``, from 0 to 1, the mean over tasks (a group is one, a tag all its tasks);
            its ``stderr``, sqrt(sum se^2) / n as if the tasks were independent, or None if the
            harness reports none; ``tasks``, the same for each; the ``versions`` of harness and
            tasks; and the ``limit``.
        """
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        start = document_start(tokenizer, model.config.to_dict())
        require(
            start,
            f"--lm-eval needs a BOS or an EOS token before each text, and the tokenizer of "
            f"{tokenizer.name_or_path} has neither: set one in its tokenizer_config.json",
        )
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            results = lm_eval.simple_evaluate(
                HFLM(
                    pretrained=model,
                    tokenizer=tokenizer,
                    batch_size=batch_size,
                    prefix_token_id=start[-1],
                ),
                tasks=self.names,
                limit=self.limit,
                log_samples=False,
                # Only perplexities, which are not used here, are bootstrapped.
                bootstrap_iters=2,
                task_manager=self._manager,
            )
        tasks: dict[str, dict[str, Any]] = {}
        for name in self.names:
            tasks |= self._scores(name, results)
        errors = [score["stderr"] for score in tasks.values()]
        return {
            "accuracy": math.fsum(score["accuracy"] for score in tasks.values()) / len(tasks),
            "stderr": None if None in errors else math.hypot(*errors) / len(tasks),
            "tasks": tasks,
            "limit": self.limit,
            "versions": {"lm_eval": lm_eval.__version__, **results["versions"]},
        }

    def _scores(self, name: str, results: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The scores of a task, of a group with a score, or of all tasks in a group or tag."""
        values = results["results"].get(name, {})
        for metric in _ACCURACIES:
            for key in values:
                if key.partition(",")[0] == metric:  # a filter's name follows
                    error = values.get(key.replace(metric, f"{metric}_stderr", 1))
                    error = float(error) if isinstance(error, float) else None
                    score = {"accuracy": float(values[key]), "stderr": error, "metric": metric}
                    return {name: score}
        # A group without a score of its own, or a tag, is the scores of its members.
        members = results["group_subtasks"].get(name) or self._manager.task_index[name].tags
        scores: dict[str, dict[str, Any]] = {}
        for member in sorted(members):
            scores |= self._scores(member, results)
        return scores


def with_error(score: Mapping[str, Any]) -> str:
    """An accuracy and its standard error, if there is one: ``0.412 ± 0.010``."""
    error = score.get("stderr")
    return f"{score['accuracy']:.3f}" + ("" if error is None else f" ± {error:.3f}")
