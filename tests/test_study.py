"""The study's runs, in small: they are what they say, and differ in nothing else."""

import dataclasses
import json
import subprocess
from concurrent.futures import Executor, Future
from functools import reduce
from operator import getitem

import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager
from safetensors.torch import load_file
from study import accuracy, experts, figures, masked_lm, muon, rows, run, tables
from study.alternatives import mean_penalty, penalized, recenter, soft_capped, z_loss
from study.documents import TOKENS, document_blocks, document_losses, frequency_bands
from study.evaluation import second_moment_fit
from study.head import FAST
from study.questions import ADAMW, COUPLED, QUESTIONS, RATES, Entry
from study.run import recipe_of, results, train_and_evaluate

from coupled_adam.embeddings.measures import LOGGED
from coupled_adam.errors import PreemptedError, UsageError
from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
from coupled_adam.lab.evaluation.evaluate import evaluate_run
from coupled_adam.lab.models import build_model, output_embeddings
from coupled_adam.lab.recipe import override, recipe_from
from coupled_adam.lab.run import Run
from coupled_adam.lab.training.checkpoints import Checkpoints
from coupled_adam.lab.training.loss import sequence_losses
from coupled_adam.lab.training.train import train
from coupled_adam.rendering.tables import Cell

SMALL = {
    "model.vocab_size": 300,
    "model.n_embd": 8,
    "model.n_layer": 1,
    "model.n_head": 2,
    "training.steps": 4,
    "training.evaluate_every": 2,
    "training.batch_size": 4,
    "training.sequence_length": 16,
    "training.warmup": 1,
    "training.evaluation_batches": 2,
    "training.test_batches": 2,
    "data.separator": None,
    "data.held_out": 0.1,
}


def small(entry, text_file):
    return override(recipe_of(entry, str(text_file)), SMALL)


@pytest.fixture
def base(text_file):
    return small(Entry(ADAMW), text_file)


@pytest.mark.parametrize("arm", [ADAMW, COUPLED], ids=lambda arm: arm["optimizer"])
def test_results_are_those_of_the_laboratory(text_file, tmp_path, arm):
    recipe = small(Entry(arm), text_file)
    corpus = prepare_corpus(recipe, tmp_path / "cache")
    run = Run(recipe, arm["optimizer"], 3, tmp_path / "run")
    numbers = train_and_evaluate(run, corpus, {})
    assert [line["step"] for line in numbers["curve"]] == [2, 4]
    # Averages of averages, in training and in the laboratory: another order of summation.
    assert numbers["valid_loss"] == pytest.approx(numbers["curve"][-1]["valid_loss"], rel=1e-5)
    expected = evaluate_run(run, corpus)
    assert numbers["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-5)
    assert numbers["parameters"] == expected["parameters"]
    for name, measure in LOGGED.items():
        assert numbers[name] == reduce(getitem, measure.path, expected["embeddings"])
    assert ("second_moment" in numbers) == (arm is ADAMW)
    assert numbers["initial_mean_norm"] != numbers["curve"][0]["mean_norm"]


VARIANTS = {
    (entry.variant, entry.overrides.get("model.tied", True)): entry
    for entries in QUESTIONS.values()
    for entry in entries.values()
    if entry.variant is not None
}
"""A run of each variant, with tied and with untied embeddings as far as there are such runs."""


FIRST = dict(reversed(VARIANTS))  # by variant: whether its first entry is tied


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(entry, marks=() if FIRST[entry[0]] == entry[1] else pytest.mark.slow)
        for entry in VARIANTS
    ],
    ids=str,
)
def test_every_variant_trains(text_file, tmp_path, variant):
    if variant[0].startswith("cores:"):  # one of the frameworks, for these runs alone
        pytest.importorskip("bitsandbytes", exc_type=ImportError)
    entry = VARIANTS[variant]
    recipe = small(entry, text_file)
    (arm,) = recipe.arms
    run = Run(recipe, arm, 1, tmp_path / "run")
    corpus = prepare_corpus(recipe, default_cache())
    numbers = train_and_evaluate(run, corpus, {}, entry.extra)
    assert "diverged_at" not in numbers
    json.dumps(numbers, allow_nan=False)
    assert 0 <= numbers["isotropy"] <= 1


def test_every_recipe_is_valid(text_file):
    for entries in QUESTIONS.values():
        for entry in entries.values():
            small(entry, text_file)


@pytest.mark.filterwarnings("ignore:.*was constructed with coupled=False:UserWarning")
@pytest.mark.parametrize("variant", ["switching:RECENTERED_AND_SWITCHED", "muon:MUON_1"])
def test_variants_are_resumed(text_file, tmp_path, monkeypatch, variant):
    """After each step, to the same bits; and not as another variant."""
    recipe = small(Entry(ADAMW, variant=variant), text_file)
    corpus = prepare_corpus(recipe, default_cache())
    whole, cut = (Run(recipe, "adamw", 1, tmp_path / name) for name in ("whole", "cut"))
    train(whole, corpus, run.ON_CPU)
    monkeypatch.setattr(Checkpoints, "any_asked_to_stop", lambda _: True)
    for where in ("after step 1", "after step 2", "after step 3", "at the end"):
        with pytest.raises(PreemptedError, match=where):
            train(cut, corpus, run.ON_CPU)
    ours, theirs = (load_file(r.folder / "model" / "model.safetensors") for r in (whole, cut))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    other = dataclasses.replace(cut, recipe=override(recipe, {"variant": None}))
    with pytest.raises(UsageError, match="holds another run"):
        train(other, corpus, run.ON_CPU)


class InThisProcess(Executor):
    """Another one would have other questions."""

    def __init__(self, *_):
        pass

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


def test_the_command_runs_what_has_no_result(text_file, tmp_path, monkeypatch, capsys):
    """Each run once; a divergence is a result."""
    diverging = Entry(ADAMW, {**SMALL, "training.lr": 1e30})
    entries = {"one": Entry(ADAMW, SMALL), "two n=1": diverging}
    monkeypatch.setattr(run, "QUESTIONS", {"a": entries})
    monkeypatch.setattr(run.concurrent.futures, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "SimLex-999.txt").write_text("near\tclose\tA\t8.5\t2.1\t2.2\t1\t3.0\t1\t0.5\n")
    options = ["--text", text_file, "--word-similarity", tmp_path, "--results", tmp_path / "new"]

    def command(*words):
        words = ["run", *options, "--out", tmp_path / "runs", *words]
        monkeypatch.setattr("sys.argv", [*map(str, words)])
        run.main()
        return capsys.readouterr().out.splitlines()

    assert command("--seeds", 4, "--only", "two*") == ["a: two n=1, seed 4: nan"]
    assert len(command("--seeds", "4,5", "a")) == 3
    assert command("--seeds", "4,5") == []
    made = results("a", tmp_path / "new")
    assert made["one"]["seeds"].keys() == made["two n=1"]["seeds"].keys() == {"4", "5"}
    assert made["one"]["seeds"]["4"].keys() >= {"test_loss", "seconds", "environment"}
    assert made["two n=1"]["seeds"]["4"].keys() == {"tokens", "diverged_at", "environment"}


def test_rates_beside_muon(base):
    """The embeddings and positions have one, the head of an untied model another."""
    recipe = override(base, {"model.tied": False})
    variant, arm = muon.with_rates(4, 0.25), recipe.arms["adamw"]
    groups = variant.build_optimizer(build_model(recipe), recipe, arm).param_groups
    factors = {n: g["lr"] / recipe.training.lr for g in groups for n in g["param_names"]}
    assert factors.pop("lm_head.weight") == 0.25
    assert factors.pop("transformer.wte.weight") == factors.pop("transformer.wpe.weight") == 4
    assert {*factors.values()} == {1}


def test_recentering_preserves_the_function(base):
    torch.manual_seed(0)
    model = build_model(base).double()
    with torch.no_grad():
        output_embeddings(model).add_(1.0)
    blocks = torch.randint(300, (3, 17))
    before = sequence_losses(model, blocks)
    recenter(model)
    assert output_embeddings(model).mean(0).abs().max() < 1e-15
    torch.testing.assert_close(sequence_losses(model, blocks), before, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_in_cache_have_the_same_loss_and_gradients(base, tied):
    """More tokens than fit in one piece, of which the last is not full."""
    torch.manual_seed(0)
    model = build_model(override(base, {"model.tied": tied})).double()
    blocks = torch.randint(300, (19, 17))

    def trained(sequence_losses):
        model.zero_grad()
        losses = sequence_losses(model, blocks)
        (3 * losses.mean()).backward()
        return losses.detach(), [p.grad.clone() for p in model.parameters()]

    losses, gradients = trained(FAST.sequence_losses)
    expected, expected_gradients = trained(sequence_losses)
    torch.testing.assert_close(losses, expected)
    for gradient, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, theirs)
    with torch.inference_mode():
        assert torch.equal(FAST.sequence_losses(model, blocks), expected)
    with pytest.raises(AssertionError, match="only the mean"):
        FAST.sequence_losses(model, blocks)[0].backward()


def test_losses_of_documents(base, text_file, tmp_path):
    """Each document alone, its first tokens only; the bands share the same tokens."""
    corpus = prepare_corpus(base, tmp_path / "cache")
    torch.manual_seed(0)
    model = build_model(base)
    held_out = tmp_path / "held_out.txt"
    lengths = (500, 3, 20_000, 90)
    text = text_file.read_text().replace("\n", " ")
    documents = [text[start : start + size] for start, size in enumerate(lengths)]
    held_out.write_text("\n\n".join(documents))
    blocks, numbers = document_blocks(held_out, corpus.tokenizer_folder, 16)
    assert numbers.unique().tolist() == [0, 1, 2]  # the second is too short
    assert numbers.bincount()[1] == TOKENS // 16
    assert (blocks[[0, *(numbers.diff() == 1).nonzero()[:, 0] + 1], 0] == corpus.end_of_text).all()
    counts = corpus.unigram_counts()
    result = document_losses(model, [held_out], corpus.tokenizer_folder, counts, 16)["held_out"]
    by_block = sequence_losses(model, blocks)
    expected = [by_block[numbers == number].mean().item() for number in range(3)]
    assert result["losses"] == pytest.approx(expected, abs=1e-5)
    assert result["loss"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert sum(result["band_tokens"]) == 16 * len(blocks)
    overall = np.average(result["band_losses"], weights=result["band_tokens"])
    assert overall == pytest.approx(by_block.mean().item(), abs=1e-4)


def test_bands_of_frequency_double():
    counts = np.random.default_rng(0).permutation(300)
    bands = frequency_bands(counts)
    assert np.bincount(bands).tolist() == [16, 16, 32, 64, 128, 44]
    assert (np.diff(bands[np.argsort(-counts)]) >= 0).all()


def test_alternatives_are_what_their_papers_say(base, tmp_path):
    torch.manual_seed(0)
    model = build_model(base)
    logits = torch.randn(2, 3, 300, dtype=torch.float64)
    z = logits.exp().sum(-1)
    penalty = z_loss(1e-4)(model, logits)
    assert penalty.item() == pytest.approx(1e-4 * (z.log() ** 2).mean().item())
    matrix = output_embeddings(model).detach().double()
    penalty = mean_penalty(1e-2)(model, logits)
    mean = matrix.sum(0) / 300
    assert penalty.item() == pytest.approx(1e-2 * (mean @ mean).item(), rel=1e-5)
    blocks = torch.randint(300, (3, 17))
    losses, expected = penalized(mean_penalty(1.0)), sequence_losses(model, blocks)
    difference = losses(model, blocks) - expected
    torch.testing.assert_close(difference, 100 * penalty.expand(3), rtol=1e-4, atol=1e-6)
    model.train(False)  # what is reported has no penalty
    assert torch.equal(losses(model, blocks), expected)
    torch.manual_seed(0)
    capped = soft_capped(2.0)(base)
    ids = torch.randint(300, (2, 16))
    for p in (*model.parameters(), *capped.parameters()):
        p.data *= 30
    plain = model(input_ids=ids).logits
    assert plain.abs().max() > 4
    torch.testing.assert_close(capped(input_ids=ids).logits, 2 * torch.tanh(plain / 2))
    assert output_embeddings(capped) is capped.transformer.wte.weight
    capped.save_pretrained(tmp_path)
    loaded = type(capped).from_pretrained(tmp_path)
    assert torch.equal(loaded(input_ids=ids).logits, capped(input_ids=ids).logits)


def test_coupled_router_keeps_its_mean(base):
    """Its gradient sums to zero over the experts, as the head's does over the vocabulary."""
    torch.manual_seed(0)
    recipe = override(base, {"arms": {"coupled_adam": COUPLED}, "training.weight_decay": 0.0})
    model = experts.build(recipe)
    model.train(False)  # without the load-balancing loss, which is not a function of the softmax
    optimizer = experts.coupled_router(model, recipe, recipe.arms["coupled_adam"])
    (router,) = experts.router_matrices(model)
    (plain,) = (recipe.arms["coupled_adam"].build_optimizer(model, recipe.training),)
    means = []
    for step in (optimizer, plain):
        before = router.detach().mean(0)
        experts.losses(model, torch.randint(300, (4, 17))).mean().backward()
        step.step()
        means.append((router.detach().mean(0) - before).norm().item())
        model.zero_grad()
    assert means[0] < 1e-7
    assert means[1] > 1e-4


def test_masked_tokens_are_the_ones_predicted(base):
    """A model sees 80 % of the chosen tokens as the mask, and no other; each run the same."""
    recipe = override(base, {"training.sequence_length": 40})
    torch.manual_seed(0)
    model = masked_lm.build(recipe)
    blocks = torch.randint(300, (50, 41))
    seen = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    losses = masked_lm.losses(model, blocks)
    hook.remove()
    assert losses.shape == (50,)
    masked = (seen[0] == 300).sum().item()
    changed = (seen[0] != blocks[:, :-1]).sum().item()
    assert masked == pytest.approx(0.8 * 6 * 50, abs=30)
    assert changed - masked == pytest.approx(0.1 * 6 * 50, abs=20)
    assert torch.equal(masked_lm.losses(model, blocks), losses)


def test_a_fit_of_exact_moments():
    """Of 4,096 tokens, of which 50 never occur."""
    probability = np.random.default_rng(0).pareto(1.0, 4096)
    probability[:50] = 0.0
    probability /= probability.sum()
    exact = second_moment_fit(probability, 3e-3 * probability)
    assert exact == pytest.approx({"A": 3e-3, "r_squared": 1.0, "exponent": 1.0})


def test_better_is_bold_and_worse_italic(monkeypatch):
    """Than the first row of a group, by the t-test; of two rows each is marked."""
    losses = {"a": [2.0, 2.1, 2.2], "b": [1.0, 1.2, 1.1], "c": [3.0, 3.2, 3.1], "d": [1.0, None]}
    made = {"environment": {"git_commit": "1f"}}
    runs = {
        name: [made | ({"test_loss": x} if x else {"diverged_at": 7}) for x in of_name]
        for name, of_name in losses.items()
    }
    monkeypatch.setattr(rows, "runs", lambda line: dict(enumerate(runs[line.name])))
    groups = [[rows.Line(name, "", name) for name in names] for names in ("ab", "abcd")]
    better = Cell("1.1 (1)", bold=True)
    assert [row[1] for row in rows.table(groups, ["test_loss"]).rows] == [
        *("_2.1 (1)_", better),
        *("2.1 (1)", better, "_3.1 (1)_", "1 of 2 diverged"),
    ]


def test_pages_are_made_from_the_results():
    for path in tables.PAGES:
        page = path.read_text(encoding="utf-8")
        assert tables.filled(page) == page


@pytest.mark.parametrize("question", QUESTIONS)
def test_results_are_of_the_questions_as_they_are(question):
    """Each run was made with the recipe that its question would be run with now.

    An option that a recipe does not name, because it is newer than the run, has its default; the
    variant of an older run is that of its question.
    """
    for name, entry in results(question).items():
        recipe = recipe_of(QUESTIONS[question][name], entry["recipe"]["data"]["text"])
        recorded = recipe_from(entry["recipe"], name)
        assert recorded in (recipe, dataclasses.replace(recipe, variant=None))
        assert {*map(int, entry["seeds"])} <= {*range(1, 26), 51, 52, 53}


def trainings(lines):
    return [recipe_of(QUESTIONS[line.question][line.name]).training for line in lines]


@pytest.mark.parametrize("lr", RATES)
def test_alternatives_that_other_questions_have_are_of_the_same_runs(lr):
    """What a table borrows is trained as its other rows are."""
    lines = [line for name in tables.ALTERNATIVES if (line := tables.alternative(lr, name))]
    assert len(lines) > 5
    first, *others = trainings(lines)
    assert all(training == first for training in others)
    assert first.lr == lr


@pytest.mark.parametrize("question", ["scaled", "scaled_longer"])
def test_exponents_that_other_questions_have_are_of_the_same_runs(question):
    lines = [line for arm in rows.LABELS for line in tables.exponents(question, arm).values()]
    first, *others = trainings(lines)
    assert all(training == first for training in others)
    assert len({*lines}) == len(lines)


@pytest.mark.parametrize("draw", figures.FIGURES, ids=lambda draw: draw.__name__)
def test_pictures_show_the_results(draw):
    figure = draw()
    assert all(ax.has_data() for ax in figure.axes)
    assert (figures.IMAGES / f"{draw.__name__}.png").exists()


def test_results_that_a_run_writes_are_no_change_of_the_code(tmp_path, monkeypatch):
    (tmp_path / "study/results").mkdir(parents=True)
    result, code = tmp_path / "study/results/a.json", tmp_path / "code.py"
    for path in (result, code):
        path.write_text("1")
    identity = ["-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    monkeypatch.setattr(run, "HERE", tmp_path / "study")
    monkeypatch.setattr(run, "environment", lambda: {"command": [], "git_commit": "1f-dirty"})
    result.write_text("2")
    assert run.machine() == {"git_commit": "1f"}
    code.write_text("2")
    assert run.machine() == {"git_commit": "1f-dirty"}


def test_every_run_of_uncommitted_code_is_marked_on_a_page(monkeypatch):
    expected = {
        json.dumps(run)
        for question in QUESTIONS
        for entry in results(question).values()
        for run in entry["seeds"].values()
        if "-dirty" in run["environment"]["git_commit"]
    }
    marked = set()
    is_committed = rows.is_committed

    def seen(run):
        if not is_committed(run):
            marked.add(json.dumps(run))
        return is_committed(run)

    monkeypatch.setattr(rows, "is_committed", seen)
    for path in tables.PAGES:
        tables.filled(path.read_text(encoding="utf-8"))
    assert marked == expected


QUERY = {"query": "1 + 1?", "choices": ["2", "3"], "gold": 0}
TASKS = {
    "arc_easy_test.jsonl": [QUERY],
    "arc_challenge_test.jsonl": [QUERY],
    "hellaswag_val.jsonl": [QUERY, QUERY | {"choices": ["2", "does not fit"]}],
    "lambada_test.jsonl": [{"text": "The cat sat on the mat"}],
    "race_high_test.jsonl": [
        {
            "article": "A text.",
            "questions": ["First?", "Second?"],
            "options": [["a", "b"], ["e", "f"]],
            "answers": ["A", "B"],
        }
    ],
    "winogrande_xl_val.jsonl": [
        {
            "sentence": "Eve met Ann, as _ was out.",
            "option1": "Eve",
            "option2": "Ann",
            "answer": "2",
        }
    ],
}
ASKED = {
    **{name: ["1 + 1?| 2", "1 + 1?| 3"] for name in ("arc_easy", "arc_challenge", "hellaswag")},
    "lambada": ["The cat sat on the| mat"],
    "race": ["Article: A text.\n\nSecond?| e", "Article: A text.\n\nSecond?| f"],
    "truthfulqa": ["Q: Is it?\nA:| No", "Q: Is it?\nA:| Yes", "Q: Is it?\nA:| Always"],
    "winogrande": ["Eve met Ann, as Eve| was out.", "Eve met Ann, as Ann| was out."],
}


def test_the_harness_asks_the_downstream_tasks(tmp_path, monkeypatch):
    """The last question of an article, the ends of beginnings; what does not fit is left out."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, documents in TASKS.items():
        lines = (json.dumps(document) + "\n" for document in documents)
        (tmp_path / name).write_text("".join(lines))
    header = "Question,Best Answer,Correct Answers,Incorrect Answers\n"
    (tmp_path / "TruthfulQA_817.csv").write_text(f"{header}Is it?,No,No; Never,Yes; Always\n")
    (tmp_path / "tasks").mkdir()
    accuracy.write_tasks(tmp_path, tmp_path / "tasks", lambda answer: len(answer) < 10)
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    tasks = manager.load([f"local_{name}" for name in accuracy.TASKS])["tasks"]
    asked, right = {}, {}
    for name in accuracy.TASKS:
        task = tasks[f"local_{name}"]
        (document,) = task.test_docs()
        built = task.construct_requests(document, task.fewshot_context(document, 0))
        built = built if isinstance(built, list) else [built]
        asked[name], right[name] = ["|".join(r.args) for r in built], document["gold"]
    assert asked == ASKED
    assert right == dict.fromkeys(ASKED, 0) | {"lambada": " mat", "race": 1, "winogrande": 1}
