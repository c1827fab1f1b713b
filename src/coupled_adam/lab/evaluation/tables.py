"""An evaluation as a table for the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from coupled_adam.embeddings.tables import measure_rows, sources
from coupled_adam.lab.evaluation.downstream import with_error
from coupled_adam.rendering.tables import terminal_table


def evaluation_table(result: Mapping[str, Any], name: str) -> Table:
    """The content of an ``evaluation.json``; values outside of the healthy range are yellow."""
    sides = {"output" if result.get("input_embeddings") else "": result.get("embeddings")}
    if result.get("input_embeddings"):
        sides["input"] = result["input_embeddings"]
    measured = measure_rows([side or {} for side in sides.values()])
    notes = sources([("", measured)])
    table = terminal_table(name, "\n".join(["Healthy ranges:", *notes]) if notes else "")
    table.caption_justify = "left"
    table.add_column("")
    table.add_column("", no_wrap=True)
    for header in sides:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("healthy", no_wrap=True)
    for label, symbol, text in _facts(result):
        table.add_row(label, symbol, text)
    for row in measured:
        values = row.marked(lambda text: Text(text, "yellow"), Text)
        table.add_row(row.label, row.symbol, *values, row.healthy)
    for label, symbol, text in _scores(result):
        table.add_row(Text(label), symbol, text)
    return table


def _facts(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows about the model and its test loss."""
    rows = [("parameters", "N", f"{result['parameters']:,}")]
    if result.get("test_loss") is not None:
        loss, tokens = result["test_loss"], result.get("test_tokens")
        rows.append(("test loss, nats per token", "L", f"{loss:.4f}"))
        if tokens is not None:
            rows.append(("  over tokens", "", f"{tokens:,}"))
    return rows


def _scores(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows about the sets of word similarity, and the downstream tasks."""
    rows = []
    similarity, tasks = result.get("word_similarity"), result.get("lm_eval")
    if similarity is not None:
        rows.append(("word similarity, mean of the sets", "r̄", _score(similarity["mean"])))
        for name, score in similarity["sets"].items():
            pairs = f"{score['pairs']}/{score['total']}"
            rows.append((f"  {name}", "r", f"{_score(score['r'])}, {pairs}"))
    if tasks is not None:
        rows.append(("accuracy, mean of the tasks", "Acc", with_error(tasks)))
        rows += [(f"  {name}", "", with_error(score)) for name, score in tasks["tasks"].items()]
        if tasks.get("limit") is not None:
            rows.append(("  examples of each task, at most", "", str(tasks["limit"])))
    return rows


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
