"""Accuracies on tasks, offline: the harness against log-likelihoods by hand."""

import json
import math
import sys
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
import yaml
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

import token_models
from coupled_adam.errors import UsageError
from coupled_adam.lab.evaluation.downstream import Downstream
from coupled_adam.lab.evaluation.evaluate import evaluate_model
from coupled_adam.lab.evaluation.evaluation_table import evaluation_table

ACCURACY = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
QUESTIONS = [
    {"query": "A list is", "choices": ["mutable", "a function", "immutable"], "gold": 0},
    {"query": "A tuple is", "choices": ["a statement", "immutable"], "gold": 1},
    {"query": "The for statement is used to", "choices": ["iterate", "sleep", "print"], "gold": 0},
    {"query": "An exception is raised by", "choices": ["import", "raise"], "gold": 1},
    {"query": "A class definition defines a", "choices": ["module", "number", "class"], "gold": 2},
    {"query": "The statement return leaves a", "choices": ["function", "loop"], "gold": 0},
]


@pytest.fixture
def model(tmp_path):
    """A random GPT-2 of 64 positions in a folder, with a tokenizer of its own."""
    gpt2 = token_models.gpt2(3, vocab_size=400, n_positions=64, n_embd=32, initializer_range=0.5)
    gpt2.save_pretrained(tmp_path / "model")
    token_models.byte_level(topics.values(), 400).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def write_task(folder, name, documents, **options):
    """A task of the harness: a YAML file and a file of documents, cached in the same folder."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": ACCURACY,
        "metadata": {"version": 1.0},
        **options,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


PERPLEXITY = [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]


@pytest.fixture
def tasks(tmp_path):
    """Two tasks with a tag, and a group of them: multiple choice, and the next word."""
    folder = tmp_path / "tasks"
    write_task(folder, "choose", QUESTIONS, tag="python")
    options = {"output_type": "loglikelihood", "doc_to_target": "{{' ' + choices[gold]}}"}
    options["metric_list"] = [*PERPLEXITY, *ACCURACY]
    write_task(folder, "continue", QUESTIONS, tag="python", **options)
    group = {
        "group": "all_of_python",
        "task": ["choose", "continue"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    (folder / "group.yaml").write_text(yaml.safe_dump(group))
    return folder


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """One task in place of the thousands that the harness itself has, which take long to index."""
    write_task(tmp_path / "harness", "theirs", QUESTIONS)
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "harness" / "manager.py"))


def log_likelihood(model, tokenizer, context, continuation):
    """Of the continuation's tokens, and whether each is the likeliest."""
    before = tokenizer.encode(context)
    ids = tokenizer.encode(context + continuation)
    assert ids[: len(before)] == before
    total, greedy = 0.0, True
    for position in range(len(before), len(ids)):
        with torch.no_grad():
            log_p = model(torch.tensor([ids[:position]])).logits[0, -1].double().log_softmax(0)
        total += log_p[ids[position]].item()
        greedy = greedy and log_p.argmax().item() == ids[position]
    return total, greedy


def by_hand(folder):
    """For each question whether the model chooses right, and whether it would say so itself."""
    model = GPT2LMHeadModel.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    chosen, said = [], []
    for question in QUESTIONS:
        scores = [
            log_likelihood(model, tokenizer, question["query"], f" {choice}")
            for choice in question["choices"]
        ]
        best = max(range(len(scores)), key=lambda k: scores[k][0])
        chosen.append(float(best == question["gold"]))
        said.append(float(scores[question["gold"]][1]))
    return chosen, said


def test_accuracies_by_hand(model, tasks):
    """Without a network, since the tasks are in the folder."""
    chosen, said = by_hand(model)
    assert 0 < sum(chosen) < len(QUESTIONS)  # or the test could not fail
    result = evaluate_model(model, downstream=Downstream(["choose", "continue"], tasks))["lm_eval"]
    expected = {
        name: {
            "accuracy": pytest.approx(np.mean(values)),
            "stderr": pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values))),
            "metric": "acc",
        }
        for name, values in (("choose", chosen), ("continue", said))
    }
    assert result["tasks"] == expected
    errors = [score["stderr"] for score in result["tasks"].values()]
    assert result["accuracy"] == pytest.approx((np.mean(chosen) + np.mean(said)) / 2)
    assert result["stderr"] == pytest.approx(math.sqrt(errors[0] ** 2 + errors[1] ** 2) / 2)
    assert {"choose", "continue", "lm_eval"} == set(result["versions"])
    # As JSON it is the same.
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    limited = evaluate_model(model, downstream=Downstream(["choose"], tasks, limit=2))
    assert limited["lm_eval"]["accuracy"] == np.mean(chosen[:2])
    table = evaluation_table(limited, "model")
    assert any("examples of each task" in row[0] for row in table.rows)


def test_a_tag_is_its_tasks_and_a_group_is_one(model, tasks):
    loaded = GPT2LMHeadModel.from_pretrained(model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    named = Downstream(["choose", "continue"], tasks).evaluate(loaded, tokenizer, 4)
    tag = Downstream(["python"], tasks).evaluate(loaded, tokenizer, 1)
    assert tag["tasks"].keys() == {"choose", "continue"}
    assert tag["accuracy"] == named["accuracy"]
    group = Downstream(["all_of_python"], tasks)
    result = group.evaluate(loaded, tokenizer, 4)
    assert result["tasks"].keys() == {"all_of_python"}
    assert result["accuracy"] == pytest.approx(named["accuracy"])
    # Loaded once, tasks are for any number of models.
    assert group.evaluate(loaded, tokenizer, 4) == result


@pytest.mark.usefixtures("harness")
def test_tasks_of_the_harness_beside_ones_own(tasks):
    assert Downstream(["theirs", "choose"], tasks).names == ["theirs", "choose"]


@pytest.mark.parametrize(
    ("names", "folder", "message"),
    [
        (["choose", "perplexity"], "tasks", "perplexity measures perplexity, but no accuracy"),
        (["no_data"], "tasks", "FileNotFoundError"),
        (["choose"], "missing", "missing is not a folder"),
        (["arc_esy"], "tasks", "'arc_esy' is not a registered task.*lm-eval ls tasks"),
    ],
    ids=["no accuracy", "no data", "no folder", "no such task"],
)
@pytest.mark.usefixtures("harness")
def test_what_cannot_be_evaluated(names, folder, message, tasks, tmp_path):
    options = {"output_type": "loglikelihood", "metric_list": PERPLEXITY}
    write_task(tasks, "perplexity", QUESTIONS, **options)
    write_task(tasks, "no_data", QUESTIONS)
    (tasks / "no_data.jsonl").unlink()
    with pytest.raises(UsageError, match=message):
        Downstream(names, tmp_path / folder)


def test_a_tokenizer_without_bos_and_eos(model, tasks):
    """The model may name what is between documents; without it, the harness would fail midway."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(model)
    assert evaluate_model(model, downstream=Downstream(["choose"], tasks))["lm_eval"]["tasks"]
    config = json.loads((model / "config.json").read_text())
    config |= {"bos_token_id": None, "eos_token_id": None}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"needs a BOS or an EOS token .* has neither"):
        evaluate_model(model, downstream=Downstream(["choose"], tasks))


def test_without_the_harness(tasks, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UsageError, match=r"pip install '.+\[lm-eval\]'"):
        Downstream(["choose"], tasks)
