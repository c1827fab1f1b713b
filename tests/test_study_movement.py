"""What the study says of single updates, and of downstream tasks, on small cases."""

import itertools
import json

import pytest
import torch
from lm_eval.tasks import TaskManager
from study import accuracy, movement
from study.questions import QUESTIONS
from study.run import recipe_of

from coupled_adam import CoupledAdamW
from coupled_adam.lab.data.corpus import prepare_corpus
from coupled_adam.lab.recipe import override

SMALL = {
    "model.vocab_size": 300,
    "model.n_embd": 8,
    "model.n_layer": 1,
    "model.n_head": 2,
    "training.steps": 12,
    "training.evaluate_every": 6,
    "training.batch_size": 4,
    "training.sequence_length": 16,
    "training.warmup": 1,
    "data.separator": None,
    "data.held_out": 0.1,
}


def updates_of(options, gradients):
    """The updates of an optimizer that really moves its matrix, at a learning rate of one."""
    matrix = torch.nn.Parameter(torch.zeros_like(gradients[0], dtype=torch.float64))
    kind = CoupledAdamW if "coupled" in options else torch.optim.AdamW
    optimizer = kind([matrix], lr=1.0, weight_decay=0.0, **options)
    for gradient in gradients:
        before = matrix.detach().clone()
        matrix.grad = gradient.double()
        optimizer.step()
        yield matrix.detach() - before


@pytest.mark.parametrize("name", movement.RULES)
def test_a_rule_computes_what_its_optimizer_would_do(name):
    """Although its matrix is put back to zero before each step."""
    gradients = [*torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))]
    rule = movement.Rule(movement.RULES[name], gradients[0])
    for gradient, expected in zip(gradients, updates_of(movement.RULES[name], gradients)):
        rule.step(gradient)
        torch.testing.assert_close(rule.update.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_window_by_hand(monkeypatch):
    """Three tokens, two bands: sums, paths and ages of rows that move by whole numbers."""
    rule = movement.Rule({"betas": (0.0, 0.9)}, torch.zeros(3, 2))
    monkeypatch.setattr(movement, "RULES", {"rule": {}})
    downhill = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    window = movement.Window.beginning(7, downhill)
    rule.update = torch.tensor([[3.0, 4.0], [0.0, 1.0], [2.0, 0.0]])
    window.add({"rule": rule}, torch.tensor([0, movement.RECENT, movement.RECENT + 1]))
    rule.update = torch.tensor([[3.0, -4.0], [0.0, 1.0], [-1.0, 0.0]])
    window.add({"rule": rule}, torch.tensor([1, 0, movement.RECENT + 2]))
    result = window.result(torch.tensor([0, 0, 1]))
    measured = result["rules"]["rule"]
    assert result["start"] == 7
    # Sums (6, 0), (0, 2), (1, 0): along downhill 6 + 4, of norms sqrt(36 + 4) and sqrt(1 + 4)
    assert measured["cosine"][0] == pytest.approx(10 / (40 * 5) ** 0.5)
    assert measured["directness"] == pytest.approx([(6 / 10 + 1) / 2, 1 / 3])
    assert measured["share"] == pytest.approx([52 / 57, 5 / 57])
    assert measured["in_batch"] == pytest.approx([26 / 52, 0])
    assert measured["recent"] == pytest.approx([26 / 52, 0])
    assert measured["older"] == pytest.approx([0, 1])


def test_windows_of_a_training(text_file, tmp_path, monkeypatch):
    """Shares add up, and early in a training the sums of all rules go downhill."""
    recipe = recipe_of(QUESTIONS["betas"]["a=0.75 0 0.99 n=4"], str(text_file))
    recipe = override(recipe, SMALL)
    corpus = prepare_corpus(recipe, tmp_path / "cache")
    monkeypatch.setattr(movement, "WINDOW", 4)
    windows = movement.measure(recipe, corpus, 1, frozenset([2, 8]))
    assert [window["start"] for window in windows] == [2, 8]
    for window, name in itertools.product(windows, movement.RULES):
        measured = window["rules"][name]
        assert sum(measured["share"]) == pytest.approx(1)
        ages = zip(measured["in_batch"], measured["recent"], measured["older"])
        assert all(sum(age) == pytest.approx(1) for age in ages)
        assert all(0 <= value <= 1 + 1e-6 for value in measured["directness"])
        assert all(-1 <= value <= 1 for value in measured["cosine"])
    # At the beginning of a training nearly every step goes downhill.
    assert all(windows[0]["rules"][name]["cosine"][0] > 0 for name in movement.RULES)


FILES = {
    "arc_easy_test.jsonl": {
        "id": "a",
        "query": "Question: 1 + 1?\nAnswer:",
        "choices": ["2", "3"],
        "gold": 0,
    },
    "arc_challenge_test.jsonl": {
        "query": "Question: why?\nAnswer:",
        "choices": ["so", "no"],
        "gold": 1,
    },
    "hellaswag_val.jsonl": {"query": "A man", "gold": 1, "choices": ["sits.", "runs."]},
    "lambada_test.jsonl": {"text": "The cat sat on the mat"},
    "race_high_test.jsonl": {
        "answers": ["B", "C"],
        "options": [["a", "b", "c", "d"], ["e", "f", "g", "h"]],
        "questions": ["First?", "Second?"],
        "article": "A text.",
    },
    "winogrande_xl_val.jsonl": {
        "sentence": "Ann called Eve, but _ was out.",
        "option1": "Ann",
        "option2": "Eve",
        "answer": "2",
    },
}
TRUTHFULQA = """Question,Best Answer,Correct Answers,Incorrect Answers
"Is it, really?",No,No; Never,Yes; Always
"""


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "downstream"
    folder.mkdir()
    for name, document in FILES.items():
        (folder / name).write_text(json.dumps(document) + "\n")
    (folder / "TruthfulQA_817.csv").write_text(TRUTHFULQA)
    with (folder / "hellaswag_val.jsonl").open("a") as more:
        long = {"query": "A man", "gold": 0, "choices": ["sits.", "does not fit at all."]}
        more.write(json.dumps(long) + "\n")
    return folder


def test_questions_of_the_downstream_tasks(files):
    questions = {
        name: [*reader(files / source)] for name, (source, reader, _) in accuracy.TASKS.items()
    }
    assert questions["arc_easy"][0]["gold"] == 0
    assert questions["lambada"] == [{"query": "The cat sat on the", "gold": " mat"}]
    assert questions["race"] == [
        {"query": "Article: A text.\n\nSecond?", "choices": ["e", "f", "g", "h"], "gold": 2}
    ]
    assert questions["truthfulqa"] == [
        {"query": "Q: Is it, really?\nA:", "choices": ["No", "Yes", "Always"], "gold": 0}
    ]
    assert questions["winogrande"] == [
        {
            "query": "was out.",
            "choices": ["Ann called Eve, but Ann", "Ann called Eve, but Eve"],
            "gold": 1,
        }
    ]


def test_the_harness_reads_the_tasks(files, tmp_path, monkeypatch):
    """And asks what they mean: the ends of WinoGrande behind each beginning, LAMBADA's word.

    An answer that does not fit takes its question with it.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    accuracy.write_tasks(files, tasks, lambda answer: len(answer) < 12)
    names = [f"local_{name}" for name in accuracy.TASKS]
    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(names)["tasks"]

    def requests(name):
        task = loaded[f"local_{name}"]
        (document,) = task.test_docs()
        built = task.construct_requests(document, task.fewshot_context(document, 0))
        return [request.args for request in (built if isinstance(built, list) else [built])]

    assert requests("lambada") == [("The cat sat on the", " mat")]
    assert requests("winogrande") == [
        ("Ann called Eve, but Ann", " was out."),
        ("Ann called Eve, but Eve", " was out."),
    ]
    assert requests("hellaswag") == [("A man", " sits."), ("A man", " runs.")]
