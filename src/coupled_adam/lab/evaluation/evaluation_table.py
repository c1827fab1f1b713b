"""The content of an ``evaluation.json`` as a table."""

from collections.abc import Mapping
from typing import Any

from coupled_adam.embeddings.report import measure_rows
from coupled_adam.lab.evaluation.downstream import with_error
from coupled_adam.rendering.tables import Cell, Table


def evaluation_table(result: Mapping[str, Any], name: str) -> Table:
    """The content of an ``evaluation.json``: test loss, measures and scores."""
    inputs = result.get("input_embeddings")
    # Tied embeddings are one matrix, and need no name for their side.
    sides = {"output" if inputs else "": result.get("embeddings") or {}}
    if inputs:
        sides["input"] = inputs

    def alone(label: str, symbol: str, text: str) -> list[str | Cell]:
        """A row about the model, not about one of its matrices."""
        return [label, symbol, text, *[""] * len(sides)]

    rows = [alone("parameters", "N", f"{result['parameters']:,}")]
    if result.get("test_loss") is not None:
        rows.append(alone("test loss, nats per token", "L", f"{result['test_loss']:.4f}"))
        if result.get("test_tokens") is not None:
            rows.append(alone("tokens of the test loss", "", f"{result['test_tokens']:,}"))
    # measure_rows() reads dicts, too: an evaluation may have been written by another version.
    rows += measure_rows([*sides.values()])
    similarity, tasks = result.get("word_similarity"), result.get("lm_eval")
    if similarity is not None:
        rows.append(alone("word similarity, mean of the sets", "r̄", _score(similarity["mean"])))
        for set_name, score in similarity["sets"].items():
            text = f"{_score(score['r'])}, {score['pairs']}/{score['total']}"
            rows.append(alone(f"word similarity, {set_name}", "r", text))
    if tasks is not None:
        rows.append(alone("accuracy, mean of the tasks", "Acc", with_error(tasks)))
        for task, score in tasks["tasks"].items():
            rows.append(alone(f"accuracy, {task}", "", with_error(score)))
        if tasks.get("limit") is not None:
            rows.append(alone("examples of each task, at most", "", str(tasks["limit"])))
    return Table(["", "", *sides, "references"], rows, name, left=(0, 1, len(sides) + 2))


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
