"""What ``coupled-adam analyze`` says of single tokens, for many kinds of models."""

import json
import shlex
import shutil

import numpy as np
import pytest
import torch
from benchmarks.verified_tokens import measure
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from coupled_adam.cli import main
from coupled_adam.embeddings.analysis import analyze_model
from coupled_adam.embeddings.analysis_inputs import AnalysisInputs
from coupled_adam.embeddings.changes import compare_analyses
from coupled_adam.embeddings.neighbours import find_neighbours
from coupled_adam.embeddings.undertrained import find_undertrained
from coupled_adam.text.tokenizers import document_start

SMALL = {"vocab_size": 420, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
WIDE = {"intermediate_size": 8, "num_key_value_heads": 2, "head_dim": 4}
ARCHITECTURES = {
    "gpt2": {"vocab_size": 420, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "llama": SMALL | WIDE,
    "gemma2": SMALL | WIDE,
    "bert": SMALL | {"intermediate_size": 8},
    "t5": {"vocab_size": 420, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(architecture, trained, tmp_path):
    """The tokens of each are named, and the untrained ones found; rows without a token count."""
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    torch.manual_seed(0)
    kind = AutoModel if architecture in ("bert", "t5") else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(trained[0] / "model").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    held_out = [300, 310, 320]
    drift = torch.randn(8, generator=torch.Generator().manual_seed(3))
    for name, tensor in tensors.items():
        if tensor.shape == (420, 8):
            generator = torch.Generator().manual_seed(4)
            tensor[:] = 3 * normalize(torch.randn(420, 8, generator=generator))
            unused = [*held_out, *range(400, 420)]
            tensor[unused] = normalize(drift, dim=0) + 0.01 * tensor[unused]  # short, and all alike
            tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})
    analyses = analyze_model(str(tmp_path), AnalysisInputs())
    for analysis in analyses:
        answer = find_undertrained(analysis).numbers["undertrained"]
        assert answer["categories"]["none"] == 20
        assert answer["unused_rows"] >= 20
        named = {entry["id"]: entry for entry in answer["tokens"][:3]}
        assert set(named) == set(held_out)
        names = AutoTokenizer.from_pretrained(tmp_path)
        assert all(named[row]["token"] == names.decode([row]) for row in held_out)
        near = find_neighbours(analysis, ["#310"]).numbers["neighbours"][0]
        assert all(other["id"] in unused for other in near["raw"])
    (same, *_) = compare_analyses(analyses, analyses)
    assert min(mover["cosine"] for mover in same.numbers["movers"]) == pytest.approx(1)


def run(capsys, *arguments):
    code = main(["analyze", *map(str, arguments), "--device", "cpu"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_json_and_tables(gpt2, trained, text_file, tmp_path, capsys):
    """Both say the same; two checkpoints of one tokenizer are compared row by row."""
    later = shutil.copytree(gpt2, tmp_path / "later")
    tensors = load_file(later / "model.safetensors")
    tensors["transformer.wte.weight"][350] *= -2
    save_file(tensors, later / "model.safetensors", {"format": "pt"})
    arguments = [gpt2, later, "--compare", "--undertrained"]
    answer = json.loads(run(capsys, *arguments, "--text", text_file, "--json"))
    (changes,) = answer["changes"]
    assert changes["matched"] == 448
    mover = changes["movers"][0]
    assert (mover["id"], mover["norm_ratio"]) == (350, pytest.approx(2))
    assert mover["cosine"] == pytest.approx(-1)
    first, _ = answer["models"]
    reachable = first["undertrained"]["categories"]["ok"]
    assert len(first["undertrained"]["tokens"]) == -(-reachable // 50)  # 2 %, rounded up
    shown = run(capsys, *arguments, "--show", 1)
    for text in ("Under-trained tokens: gpt2, tied", "Tokens that moved most", "linear CKA", "350"):
        assert text in shown


def test_duplicates(tmp_path, capsys):
    """Pairs of rows: those with the same numbers, then those with nearly the same direction."""
    matrix = np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32)
    matrix[20] = matrix[10]
    matrix[40] = 3 * matrix[30]
    matrix[60] = matrix[50] + 0.01
    matrix[[71, 72]] = matrix[10]  # four rows that are the same are one group
    matrix[70] = 0
    np.save(tmp_path / "m.npy", matrix)
    answer = json.loads(run(capsys, tmp_path / "m.npy", "--duplicates", "--json"))["duplicates"]
    groups = [([token["id"] for token in group["tokens"]], group["identical"]) for group in answer]
    assert groups == [([10, 20, 71, 72], True), ([30, 40], False), ([50, 60], False)]
    units = matrix[[50, 60]] / np.linalg.norm(matrix[[50, 60]], axis=1, keepdims=True)
    assert answer[2]["cosine"] == pytest.approx(units[0] @ units[1], abs=1e-5)
    shown = run(capsys, tmp_path / "m.npy", "--duplicates", "--show", 1)
    shown = " ".join(shown.split())
    assert (
        "8 rows have another with a cosine of 0.99 or more, in 3 groups; 4 are identical" in shown
    )
    assert "#20" in shown
    assert "#40" not in shown
    np.save(tmp_path / "m.npy", np.eye(30))
    shown = run(capsys, tmp_path / "m.npy", "--duplicates")
    assert "no two rows have a cosine of 0.99 or more" in shown
    assert "ids and tokens" not in shown


@pytest.mark.parametrize(
    ("factors", "kind", "said"),
    [
        ([1e-14, 1e-14], "tiny_rows", "are shorter than a hundredth of the median norm ("),
        ([1e-4, 1e-4], "tiny_rows", "are shorter than a hundredth of the median norm ("),
        ([0, torch.inf], "dead_rows", "are zero or not finite, and left out of all measures ("),
    ],
)
def test_rows_to_repair(factors, kind, said, gpt2, tmp_path, capsys):
    """As in Falcon 3: what a repair would replace is said, with the command that does it."""
    tensors = load_file(gpt2 / "model.safetensors")
    tensors["transformer.wte.weight"][[7, 9]] *= torch.tensor(factors)[:, None]
    save_file(tensors, gpt2 / "model.safetensors", {"format": "pt"})
    answer = json.loads(run(capsys, gpt2, "--json"))
    rows = {"tiny_rows": [], "dead_rows": [], kind: [7, 9]}
    assert {name: answer[name] for name in rows} == rows
    assert answer["excluded_rows"] == len(rows["dead_rows"])
    shown = " ".join(run(capsys, gpt2).split())
    assert f"2 rows {said}" in shown
    assert f"coupled-adam repair {gpt2} --out NEW gives them values like those of" in shown
    assert main(["repair", str(gpt2), "--out", str(tmp_path / "new"), "--json"]) == 0
    (repaired,) = json.loads(capsys.readouterr().out)["matrices"]
    assert [*repaired["rows"]] == ["7", "9"]
    assert not json.loads(run(capsys, tmp_path / "new", "--json"))[kind]


def test_the_terminal_has_a_verdict_and_no_prose(gpt2, capsys):
    """What is asked for follows it; --explain has all sentences."""
    asked = [gpt2, "--undertrained"]
    answer = json.loads(run(capsys, *asked, "--json"))
    verdict, *prose = answer["diagnosis"]
    shown, explained = (
        " ".join(run(capsys, *asked, *more).split()) for more in ([], ["--explain"])
    )
    assert f"gpt2, tied: {verdict}" in shown
    assert "tokens look untrained." in shown or answer["undertrained"]["limit"] is None
    assert not any(sentence in shown for sentence in prose if "untrained" not in sentence)
    assert all(sentence in explained for sentence in answer["diagnosis"])


def test_without_a_tokenizer_and_with_one_that_is_too_large(gpt2, tmp_path, capsys):
    np.save(tmp_path / "matrix.npy", np.random.default_rng(0).normal(size=(300, 4)))
    answer = json.loads(run(capsys, tmp_path / "matrix.npy", "--undertrained", "--json"))
    assert answer["undertrained"]["order_by"] == "norm"
    shown = run(capsys, tmp_path / "matrix.npy", "--neighbours", "#5")
    assert "#5 " in shown
    arguments = ("--tokenizer", gpt2, "--undertrained")
    answer = json.loads(run(capsys, tmp_path / "matrix.npy", *arguments, "--json"))
    assert sum(answer["undertrained"]["categories"].values()) == 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpt2 --compare", "--compare needs two models, not 1"),
        ("gpt2 --neighbours", "--neighbours: expected at least one argument"),
        ("gpt2 --neighbours 'no such token'", "'no such token' is not a token of this model"),
        ("gpt2 --neighbours '#999'", "'#999' is not a token of this model"),
        ("gpt2 --neighbours ' no such'", "' no such' is not a token of this model"),
        ("bare --neighbours king", "'king' cannot be found without a tokenizer: pass one with"),
        ("gpt2 --tokens", "--tokens: expected at least one argument"),
        ("gpt2 --token-dtype int64", "--token-dtype int64 applies to token files: add --tokens"),
        ("no-model --export m.csv", "--export m.csv must end in .parquet"),
        ("gpt2 --verify", "--verify checks under-trained tokens: add --undertrained"),
        ("gpt2/model.safetensors --undertrained --verify", "is a file with a matrix: name the"),
        ("bare --undertrained --verify", "bare has no tokenizer that can be read"),
    ],
    ids=lambda value: value[:40],
)
def test_unusable_input(arguments, message, gpt2, capsys, monkeypatch):
    """It is found before anything is measured."""
    monkeypatch.setattr("coupled_adam.embeddings.analysis.analyze", None)
    monkeypatch.chdir(gpt2.parent)
    shutil.copytree(gpt2, "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert main(["analyze", *shlex.split(arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_page_without_plotly(gpt2, tmp_path, capsys, monkeypatch):
    """Is refused before the measures, which may take minutes."""
    monkeypatch.setattr("coupled_adam.embeddings.analysis.analyze", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["analyze", str(gpt2), "--explore", str(tmp_path / "page.html")]) == 2
    assert "need packages: pip install pandas" in capsys.readouterr().err


@pytest.fixture
def echo(gpt2):
    """A model made by hand that repeats its last token; rows of tokens it never saw are short."""
    held_out = [300, 310, 320, *range(400, 448)]  # the last of which belong to no token
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(gpt2)
        for name, weight in model.named_parameters():
            if "wpe" in name or "c_proj" in name:  # neither position nor layer adds anything
                weight.zero_()
        rows = model.get_input_embeddings().weight
        rows.copy_(10 * normalize(torch.randn(448, 16, generator=torch.Generator().manual_seed(0))))
        drift = torch.randn(16, generator=torch.Generator().manual_seed(1))
        rows[held_out] = 0.1 * drift + 0.001 * rows[held_out]
    model.save_pretrained(gpt2)
    return gpt2


def test_a_model_is_asked_to_repeat(echo, tmp_path, capsys):
    """Those that look unused and cannot be repeated are under-trained; others are not accused."""
    page, explore = tmp_path / "page.html", tmp_path / "map.html"
    options = [echo, "--undertrained", "--verify"]
    shown = run(capsys, *options, "--html", page, "--explore", explore)
    sentence = "the model gives 3 of them a probability below 1%, which are under-trained"
    assert sentence in " ".join(shown.split())
    heads = [shown.index(heading) for heading in ("repeated", "verdict", "‖e‖")]
    assert heads == sorted(heads)
    for path in (page, explore):
        assert f"written: {path}" in " ".join(shown.split())
    assert sentence in page.read_text()
    assert "<th" in page.read_text().partition("Under-trained tokens: gpt2")[2]
    assert "repeated=" in explore.read_text().rpartition("Plotly.newPlot(")[2]
    answer = json.loads(run(capsys, *options, "--json"))
    assert sentence in answer["diagnosis"][-1]
    named = answer["undertrained"]
    assert named["can_verify"]
    assert len(named["controls_repeated"]) == len(named["tokens"])
    verdicts = {entry["id"]: entry["verdict"] for entry in named["tokens"]}
    accused = {row for row, verdict in verdicts.items() if verdict == "under-trained"}
    assert accused == {300, 310, 320}
    assert {*verdicts.values()} == {"under-trained", "trained"}  # 2 % are more than three
    # By another path: the probability of the token behind itself.
    model = AutoModelForCausalLM.from_pretrained(echo)
    for entry in named["tokens"]:
        logits = model(torch.tensor([[0] + [entry["id"]] * 31])).logits[0, -1]
        assert entry["repeated"] >= logits.softmax(0)[entry["id"]].item() - 1e-6


def test_a_model_that_cannot_repeat_verifies_nothing(gpt2, capsys):
    answer = json.loads(run(capsys, gpt2, "--undertrained", "--verify", "--json"))
    assert not answer["undertrained"]["can_verify"]
    assert {entry["verdict"] for entry in answer["undertrained"]["tokens"]} == {"not verified"}
    assert "cannot be verified with this model: it repeats only 0 of" in answer["diagnosis"][-1]


@pytest.mark.parametrize(
    ("length", "times"), [(160, [159, 53, 7]), (32, [31, 10]), (12, [11]), (3, [])]
)
def test_prompts_fit_the_model(length, times, trained):
    """The token is where None is, at least three times, and follows a prompt's own last piece."""
    from coupled_adam.embeddings.verification import _PROMPTS, _prompts

    tokenizer = AutoTokenizer.from_pretrained(trained[0] / "model")
    made = list(_prompts(tokenizer, document_start(tokenizer), length))
    (a,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    for prompt, (opening, unit) in zip(made, _PROMPTS):
        assert len(prompt) <= length
        assert prompt.count(None) >= 3
        ids = [a if piece is None else piece for piece in prompt]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        whole = opening + unit.replace("{}", "a") * length
        assert whole.startswith(text)
        assert whole[len(text)] == "a"


@pytest.mark.slow(minutes=4)
def test_tokens_held_out_of_a_text_are_verified(tmp_path):
    """A model that is trained here, and learns to repeat in a minute, tells them from others."""
    result = measure(tmp_path, "copies", "adamw")
    named, tenth = result["2%"], result["10%"]
    assert named["precision"] > 0.9
    assert named["recall"] > 0.9
    # Most of the tenth were seen: what is told from the others is not told by the indicator.
    candidates, unseen = tenth["candidates, of which never seen"]
    assert candidates > 2.5 * unseen
    assert tenth["precision"] > 0.7
    assert tenth["recall"] > 0.9
    assert tenth["verdicts, of which never seen"]["trained"][0] > 100
    assert tenth["verdicts, of which never seen"]["trained"][1] == 0
