"""The content of an ``evaluation.json`` as a table."""

from collections.abc import Mapping
from typing import Any

from coupled_adam.embeddings.analysis_tables import measure_rows
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

    rows = [alone(*fact) for fact in _facts(result)]
    rows += measure_rows([*sides.values()])
    rows += [alone(*score) for score in _scores(result)]
    return Table(["", "", *sides, "healthy"], rows, name, left=(0, 1, len(sides) + 2))


def _facts(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows about the model and its test loss."""
    rows = [("parameters", "N", f"{result['parameters']:,}")]
    if result.get("test_loss") is not None:
        loss, tokens = result["test_loss"], result.get("test_tokens")
        rows.append(("test loss, nats per token", "L", f"{loss:.4f}"))
        if tokens is not None:
            rows.append(("tokens of the test loss", "", f"{tokens:,}"))
    return rows


def _scores(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows about the sets of word similarity, and the downstream tasks."""
    rows = []
    similarity, tasks = result.get("word_similarity"), result.get("lm_eval")
    if similarity is not None:
        rows.append(("word similarity, mean of the sets", "r̄", _score(similarity["mean"])))
        for name, score in similarity["sets"].items():
            pairs = f"{score['pairs']}/{score['total']}"
            rows.append((f"word similarity, {name}", "r", f"{_score(score['r'])}, {pairs}"))
    if tasks is not None:
        rows.append(("accuracy, mean of the tasks", "Acc", with_error(tasks)))
        rows += [(f"accuracy, {name}", "", with_error(s)) for name, s in tasks["tasks"].items()]
        if tasks.get("limit") is not None:
            rows.append(("examples of each task, at most", "", str(tasks["limit"])))
    return rows


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
