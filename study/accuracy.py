"""The paper's column Acc for models of the study, from local files of the paper's seven tasks.

The lm-evaluation-harness has these tasks, but reads them from a hub. Here they are written as tasks
of our own: every question is a prompt and its choices, of which a model picks the most likely one,
and LAMBADA asks for the last word. They differ from the harness's in that RACE shows the last
question of an article alone, that TruthfulQA (MC1: one answer is right) shows no examples, and that
questions with an answer that does not fit into the model's context are left out.

    python -m study.accuracy --files downstream/ RUN ...
"""

import argparse
import csv
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from coupled_adam.lab.evaluation.downstream import Downstream
from coupled_adam.lab.evaluation.load_model import block_length, load_model
from coupled_adam.runs import MODEL
from coupled_adam.text.tokenizers import load_tokenizer

from .run import HERE, machine, read_results, write_results

CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
metric_list: [{{metric: acc}}]
"""
"""A task whose documents have a query, choices, and the number of the right one."""

WINOGRANDE = CHOICE.replace("text: query", "text: gold").replace("target: gold", "target: query")
"""The choices are two beginnings of a sentence, and the query is its end."""

LAST_WORD = CHOICE.replace("multiple_choice", "loglikelihood").replace("doc_to_choice: choices", "")


def records(file: Path) -> Iterator[dict[str, Any]]:
    """The documents of a file with JSON in each line."""
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def choices(file: Path) -> Iterator[dict[str, Any]]:
    """ARC and HellaSwag: already in this form."""
    for question in records(file):
        yield {key: question[key] for key in ("query", "choices", "gold")}


def lambada(file: Path) -> Iterator[dict[str, Any]]:
    """A passage, and the word at its end."""
    for document in records(file):
        passage, _, word = document["text"].rpartition(" ")
        yield {"query": passage, "gold": f" {word}"}


def race(file: Path) -> Iterator[dict[str, Any]]:
    """The last question of each article."""
    for exam in records(file):
        yield {
            "query": f"Article: {exam['article']}\n\n{exam['questions'][-1]}",
            "choices": exam["options"][-1],
            "gold": "ABCD".index(exam["answers"][-1]),
        }


def truthfulqa(file: Path) -> Iterator[dict[str, Any]]:
    """The best answer, followed by the incorrect ones."""
    with file.open(encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table):
            wrong = [answer.strip() for answer in row["Incorrect Answers"].split(";")]
            yield {
                "query": f"Q: {row['Question']}\nA:",
                "choices": [row["Best Answer"], *filter(None, wrong)],
                "gold": 0,
            }


def winogrande(file: Path) -> Iterator[dict[str, Any]]:
    """Which of two names makes the end of the sentence more likely?"""
    for question in records(file):
        start, _, end = question["sentence"].partition("_")
        yield {
            "query": end.strip(),
            "choices": [start + question["option1"], start + question["option2"]],
            "gold": int(question["answer"]) - 1,
        }


Reader = Callable[[Path], Iterable[dict[str, Any]]]
TASKS: dict[str, tuple[str, Reader, str]] = {
    "arc_easy": ("arc_easy_test.jsonl", choices, CHOICE),
    "arc_challenge": ("arc_challenge_test.jsonl", choices, CHOICE),
    "hellaswag": ("hellaswag_val.jsonl", choices, CHOICE),
    "lambada": ("lambada_test.jsonl", lambada, LAST_WORD),
    "race": ("race_high_test.jsonl", race, CHOICE),
    "truthfulqa": ("TruthfulQA_817.csv", truthfulqa, CHOICE),
    "winogrande": ("winogrande_xl_val.jsonl", winogrande, WINOGRANDE),
}
"""By name: the file, its reader, and the harness's description of the task."""


def answers(document: dict[str, Any]) -> list[str]:
    """The choices of a question, or the word that is asked for."""
    return document.get("choices") or [document["gold"]]


def write_tasks(files: Path, folder: Path, fits: Callable[[str], bool]) -> None:
    """Write all tasks into a folder, in the harness's format, with the questions that fit."""
    for name, (source, reader, description) in TASKS.items():
        documents = folder / f"{name}.jsonl"
        with documents.open("w", encoding="utf-8") as out:
            out.writelines(
                json.dumps(document) + "\n"
                for document in reader(files / source)
                if all(
                    map(fits, [document["query"]] if name == "winogrande" else answers(document))
                )
            )
        text = description.format(name=f"local_{name}", file=json.dumps(str(documents)))
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def main() -> None:
    """Evaluate runs, and add their accuracies to ``results/accuracy.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folders of finished runs"
    )
    parser.add_argument("--files", required=True, type=Path, help="folder of the tasks' files")
    parser.add_argument("--limit", type=int, help="questions of each task; all by default")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "accuracy.json")
    options = parser.parse_args()
    content = read_results(options.out)
    for run in options.runs:
        model, tokenizer = load_model(run / MODEL, "cpu"), load_tokenizer(run / MODEL)
        context = block_length(model)

        def fits(answer: str, encode: Any = tokenizer.encode, context: int = context) -> bool:
            return len(encode(f" {answer}")) < context

        with tempfile.TemporaryDirectory() as temporary:
            write_tasks(options.files, Path(temporary), fits)
            names = [f"local_{name}" for name in TASKS]
            tasks = Downstream(names, Path(temporary), options.limit)
            measured = tasks.evaluate(model, tokenizer, batch_size=32)
        content[f"{run.parent.name}: {run.name}"] = {**measured, "environment": machine()}
        write_results(options.out, content)


if __name__ == "__main__":
    main()
