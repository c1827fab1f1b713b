"""``coupled-adam analyze``: models, files and counts in; a table, JSON and a page out."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from coupled_adam.cli import main
from coupled_adam.embeddings import analysis, analyze, single_tokens, unigram_counts
from coupled_adam.embeddings.references import references, span
from coupled_adam.text import tokenizers
from coupled_adam.text.tokenizers import text_tokens
from lab.browser import needs_browser, told_by
from processes import Process

# In WordSim's format; which of the words are single tokens is up to the tokenizer.
PAIRS = "the\ta\t5.0\nthe\tof\t1.0\nin\tof\t7.5\nto\tunfathomable\t3.0\nis\tto\t2.5\nif\tto\t4.5\n"


@pytest.fixture
def sets(tmp_path):
    folder = tmp_path / "sets"
    folder.mkdir()
    (folder / "wordsim_similarity_goldstandard.txt").write_text(PAIRS)
    (folder / "wordsim_relatedness_goldstandard.txt").write_text(PAIRS.replace("7.5", "0.5"))
    return folder


def run(capsys, *arguments):
    """The exit code, and what went to standard output and standard error."""
    code = main(["analyze", *map(str, arguments)])
    return code, *capsys.readouterr()


def as_json(capsys, *arguments):
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_json_is_all_there_is_on_standard_output(gpt2):
    """From a process of its own: no library, no bar and no log writes between."""
    process = Process([sys.executable, "-m", "coupled_adam", "analyze", gpt2, "--json"])
    out, err = process.communicate()
    assert process.returncode == 0, err
    numbers = json.loads(out)
    weight = GPT2LMHeadModel.from_pretrained(gpt2).transformer.wte.weight
    expected = analyze(weight).to_dict()
    assert {name: numbers[name] for name in expected} == expected  # in full precision
    assert (numbers["role"], numbers["tensor"]) == ("tied", "transformer.wte.weight")
    assert (numbers["dtype"], numbers["padding_rows"]) == ("float32", 48)
    assert numbers["unseen_tokens"] is None


def test_text_and_sets(gpt2, sets, text_file, capsys, monkeypatch):
    """The tokens of a text are counted some documents at a time, in bounded memory."""
    lengths = []

    def recorded(tokens, rows):
        lengths.append(len(tokens))
        return unigram_counts(tokens, rows)

    with monkeypatch.context() as small:
        small.setattr(tokenizers, "_BATCH", 1000)
        small.setattr(analysis, "unigram_counts", recorded)
        numbers = as_json(capsys, gpt2, "--text", text_file, "--word-similarity", sets)
    assert len(lengths) > 5
    assert max(lengths) < sum(lengths) / 3
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    weight = GPT2LMHeadModel.from_pretrained(gpt2).transformer.wte.weight
    counts = unigram_counts(text_tokens(text_file, tokenizer), len(weight))
    report = analyze(weight, counts)
    assert numbers["norm_frequency_correlation"] == report.norm_frequency_correlation
    assert numbers["unseen_tokens"] == (counts == 0).sum() >= 48
    assert numbers["all_but_the_top"]["isotropy"] == report.all_but_the_top.isotropy
    score = numbers["word_similarity"]["sets"]["WordSim-353 similarity"]
    token_id = single_tokens(tokenizer)
    usable = [pair for pair in PAIRS.splitlines() if all(map(token_id, pair.split("\t")[:2]))]
    assert 3 < score["pairs"] == len(usable) < score["total"] == 6


def test_padding_and_unseen_rows_are_left_out(gpt2, text_file, capsys):
    weight = GPT2LMHeadModel.from_pretrained(gpt2).transformer.wte.weight
    numbers = as_json(capsys, gpt2, "--exclude", "padding")
    assert numbers["excluded_rows"] == numbers["padding_rows"] == 48
    assert numbers["isotropy"] == pytest.approx(analyze(weight[:400]).isotropy, rel=1e-12)
    assert numbers["vocab_size"] == 448
    both = as_json(capsys, gpt2, "--text", text_file, "--exclude", "padding", "unseen")
    assert both["excluded_rows"] == both["unseen_tokens"] > 48
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    seen = unigram_counts(text_tokens(text_file, tokenizer), 448) > 0
    assert both["mean_norm"] == pytest.approx(analyze(weight[seen]).mean_norm, rel=1e-12)


def test_counts_and_token_files(gpt2, tmp_path, capsys):
    """Of a vocabulary without the padding; a wrong file is refused, not guessed at."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 400, 5000).astype(np.uint16)
    tokens[:2500].tofile(tmp_path / "a.bin")
    tokens[2500:].tofile(tmp_path / "b.bin")
    np.save(tmp_path / "counts.npy", np.bincount(tokens, minlength=400))
    files = (tmp_path / "a.bin", tmp_path / "b.bin")
    counted = as_json(capsys, gpt2, "--tokens", *files)
    assert counted == as_json(capsys, gpt2, "--counts", tmp_path / "counts.npy")
    assert counted["unseen_tokens"] == 48
    assert -1 < counted["norm_frequency_correlation"] < 1
    tokens.astype(np.int64).tofile(tmp_path / "wide.bin")
    wide = (gpt2, "--tokens", tmp_path / "wide.bin")
    assert counted == as_json(capsys, *wide, "--token-dtype", "int64")
    assert "--token-dtype of analyze" in run(capsys, *wide)[2]
    np.save(tmp_path / "long.npy", np.ones(449))
    np.save(tmp_path / "one.npy", np.array(3))
    np.full(10, 448, np.uint16).tofile(tmp_path / "c.bin")
    (tmp_path / "odd.bin").write_bytes(b"odd")
    for arguments, message in {
        ("--counts", "long.npy"): "[449], but must hold one number for each of the 448 rows",
        ("--counts", "one.npy"): "has the shape [], but must hold one number for each",
        ("--counts", "missing.npy"): f"No such file or directory: '{tmp_path}/missing.npy",
        ("--tokens", "c.bin"): "token ids range from 448 to 448, but must be between 0 and 447",
        ("--tokens", "missing.bin"): f"error: --tokens {tmp_path}/missing.bin: No such file",
        ("--tokens", "odd.bin"): "odd.bin is damaged, or does not hold uint16: it has 3 bytes",
    }.items():
        code, out, err = run(capsys, gpt2, arguments[0], tmp_path / arguments[1])
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert message in err
    code, _, err = run(capsys, gpt2, "--counts", "a", "--text", "b")
    assert (code, "--counts and --text exclude each other" in err) == (2, True)


def test_runs_and_their_checkpoints(trained, tmp_path, capsys):
    """A run brings its counts; one that still trains is read from its checkpoint."""
    folder, _ = trained
    first, second = as_json(capsys, folder)
    assert (first["role"], second["role"]) == ("input", "output")
    assert second["norm_frequency_correlation"] is not None
    assert first["padding_rows"] == 0
    assert as_json(capsys, folder / "model")[0]["isotropy"] == first["isotropy"]
    training = shutil.copytree(folder, tmp_path / "training")
    shutil.rmtree(training / "model")
    again = as_json(capsys, training)
    for one, other in zip((first, second), again):
        assert other["tensor"] == f"state_dict.model.{one['tensor']}"
        assert other["padding_rows"] is None
        assert other["isotropy"] == one["isotropy"]
        assert other["norm_frequency_correlation"] == one["norm_frequency_correlation"]


def test_references_stand_beside_each_measure(tmp_path, capsys, monkeypatch):
    """It fits 80 columns; --all names the references and their values."""
    matrix = np.random.default_rng(0).normal(size=(500, 8)) / 100 + 1
    np.save(tmp_path / "drifted.npy", matrix)
    page = tmp_path / "page.html"
    monkeypatch.setenv("COLUMNS", "80")
    _, shown, _ = run(capsys, tmp_path / "drifted.npy", "--html", page)
    assert all(len(line) <= 80 or str(tmp_path) in line for line in shown.splitlines())
    (ratio, *_) = (line for line in shown.splitlines() if "‖μ‖ʳ" in line)
    assert ratio.endswith(span("mean_norm_ratio"))
    assert "relative mean norm 1.000 is above all 7 references" in " ".join(shown.split())
    assert f"written: {page}" in " ".join(shown.split())
    _, shown, _ = run(capsys, tmp_path / "drifted.npy", "--all")
    for reference in references():
        assert reference.name in shown
        assert reference.name.replace("'", "&#39;") in page.read_text()


def test_what_a_page_shows(gpt2, tmp_path, capsys):
    """Neighbours and duplicates, too; names are short."""
    page = tmp_path / "page.html"
    code, shown, err = run(capsys, gpt2, "--neighbours", "#5", "--duplicates", "--html", page)
    assert code == 0, err
    assert f"written: {page}" in " ".join(shown.split())
    for said in (
        "Nearest by cosine: gpt2, tied",
        "Duplicates: gpt2, tied",
        "μ: their mean",
    ):
        assert said in page.read_text()


def test_several_models_side_by_side(gpt2, trained, sets, tmp_path, capsys):
    """In the terminal, and in a page that escapes the names it is given."""
    odd = tmp_path / "<b>odd"
    shutil.copytree(gpt2, odd)
    save_file({"E": torch.randn(30, 4, dtype=torch.float64)}, tmp_path / "plain.safetensors")
    page = tmp_path / "page.html"
    models = (odd, trained[0])
    arguments = ("--word-similarity", sets, "--html", page, "--all")
    code, shown, err = run(capsys, *models, *arguments)
    assert code == 0, err
    assert "<b>odd, tied" in shown
    assert "run, input" in shown
    assert "without mean and top principal directions" in " ".join(shown.split())
    text = page.read_text()
    assert "<b>" not in text
    assert "&lt;b&gt;odd, tied" in text
    assert text.count('src="data:image/svg+xml;base64,') == 4  # one has counts
    code, shown, _ = run(capsys, tmp_path / "plain.safetensors")
    assert code == 0
    assert "30 x 4" in shown


@pytest.mark.pixels
@pytest.mark.slow
@needs_browser
def test_page_in_a_browser(gpt2, trained, tmp_path, capsys):
    """The pictures decode, and nothing is wider than the window or fetched."""
    page = tmp_path / "page.html"
    long = shutil.copytree(gpt2, tmp_path / "a_name_that_is_longer_than_a_narrow_window_is_wide")
    assert run(capsys, long, trained[0], "--html", page)[0] == 0
    probe = """[
        document.images.length, [...document.images].filter(i => !i.naturalWidth).length,
        document.querySelectorAll("#measures td").length > 60,
        document.documentElement.scrollWidth <= innerWidth,
        performance.getEntriesByType("resource").filter(e => !e.name.startsWith("data:")).length,
      ]"""
    for told in told_by(page, probe, tmp_path / "profile"):
        assert told == [4, 0, True, True, 0]


def test_tokenizers_that_do_not_match(gpt2, gpt2_options, sets, text_file, tmp_path, capsys):
    """A vocabulary larger than the matrix: only what needs the tokenizer is refused."""
    small = tmp_path / "small"
    GPT2LMHeadModel(GPT2Config(**gpt2_options | {"vocab_size": 100})).save_pretrained(small)
    AutoTokenizer.from_pretrained(gpt2).save_pretrained(small)
    assert as_json(capsys, small)["padding_rows"] == 0
    for arguments, message in {
        ("--text", text_file): "must be between 0 and 99",
        ("--word-similarity", sets): "does the tokenizer belong",
    }.items():
        code, out, err = run(capsys, small, *arguments)
        assert (code, out) == (2, "")
        assert f"{small}: " in err
        assert message in err
    np.save(tmp_path / "matrix.npy", np.random.default_rng(0).normal(size=(448, 4)))
    code, _, err = run(capsys, tmp_path / "matrix.npy", "--word-similarity", sets)
    assert (code, "is a file without a tokenizer: pass one with --tokenizer" in err) == (2, True)
    numbers = as_json(
        capsys, tmp_path / "matrix.npy", "--word-similarity", sets, "--tokenizer", gpt2
    )
    assert numbers["padding_rows"] == 48
    assert numbers["word_similarity"]["sets"]["WordSim-353 similarity"]["pairs"] > 3


@pytest.mark.parametrize("command", ["analyze", "evaluate", "repair"])
@pytest.mark.parametrize(
    ("name", "reason"), [("empty.txt", "there is no text in it"), ("missing.txt", "No such file")]
)
def test_a_text_is_named_as_it_was_given(command, name, reason, gpt2, tmp_path, capsys):
    """By the option: these commands know no recipe, and no ``data.text``."""
    (tmp_path / "empty.txt").write_text("")
    options = ["--text", str(tmp_path / name)]
    if command == "repair":
        options += ["--out", str(tmp_path / "repaired")]
    assert main([command, str(gpt2), *options]) == 2
    assert f"error: --text {tmp_path / name}: {reason}" in capsys.readouterr().err
    assert not (tmp_path / "repaired").exists()


def test_unusable_input(gpt2, tmp_path, capsys):
    np.save(tmp_path / "one.npy", np.eye(3))
    np.save(tmp_path / "large.npy", 1e200 * np.eye(3))
    for arguments, message in {
        ("missing/model/here",): "there is no such file, folder or model",
        (gpt2, "--tensor", "wpe"): "has no matrix 'wpe'; it contains transformer.wte.weight",
        (gpt2, "--exclude", "unseen"): "--exclude unseen needs --counts, --text or --tokens",
        (tmp_path / "large.npy",): "is too large: scale the matrix",
        (tmp_path / "one.npy", "--tensor", "x"): "one.npy has no matrix 'x'",
        (gpt2, "--tokenizer", tmp_path): f"--tokenizer {tmp_path} has no tokenizer",
        (gpt2, "--word-similarity", tmp_path): "has no word-similarity set",
        (gpt2, "--exclude", "some"): "--exclude: invalid choice: 'some'",
    }.items():
        code, out, err = run(capsys, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert message in err


def test_a_damaged_tokenizer_that_is_not_needed(gpt2, tmp_path, capsys):
    """Padding cannot be told from tokens then, which is said."""
    model = shutil.copytree(gpt2, tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{")
    with pytest.warns(UserWarning, match="model has no tokenizer that can be read .* goes on with"):
        assert as_json(capsys, model)["padding_rows"] is None


def test_a_tokenizer_by_its_file(gpt2, tmp_path, capsys):
    """Where the model asks for its author's code, and wherever else."""
    model = shutil.copytree(gpt2, tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Special", "auto_map": {"AutoTokenizer": ["a.Special", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "config.json").write_text('{"model_type": "unknown"}')
    numbers = as_json(capsys, model, "--tokenizer", model / "tokenizer.json")
    assert numbers["padding_rows"] == as_json(capsys, gpt2)["padding_rows"]
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    assert "bad.json has no tokenizer" in run(capsys, model, "--tokenizer", bad)[2]


def test_names_with_control_characters(tmp_path, capsys):
    """Reach no terminal as they are: in headings, commands, warnings and errors."""
    folder = tmp_path / "ev\x1b[31mil\rname"
    folder.mkdir()
    matrix = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32) + 1
    matrix[3] = 0
    np.save(folder / "m\x1b[2J.npy", matrix)
    file = folder / "a\x1b[1m.safetensors"
    save_file({"embed_tokens.weight": torch.from_numpy(matrix)}, file)
    out = tmp_path / "new\x1b[5m.npy"
    bare = str(folder / "m\x1b[2J.npy")
    shown = [run(capsys, file, "--undertrained", "--neighbours", "#5")]
    shown.append(run(capsys, bare, bare, "--compare"))
    shown.append(run(capsys, bare, "--tensor", "\x1b[1m"))
    for arguments in ([bare, "--out", str(out)], [str(file), "--out", str(tmp_path / "x")]):
        code = main(["repair", *arguments, "--device", "cpu"])
        shown.append((code, *capsys.readouterr()))
    assert [code for code, *_ in shown] == [0, 0, 2, 0, 2]
    said = [text for _, *texts in shown for text in texts]
    assert not any(character in text for text in said for character in "\x1b\r")
    assert any("coupled-adam repair" in " ".join(text.split()) for text in said)


@pytest.mark.parametrize("option", ["--compare", "--duplicates", "--html"])
def test_models_of_one_folder_name(option, tmp_path, capsys):
    """Two checkpoints of one step are told apart wherever they are named."""
    names = ["run-a/checkpoint-9", "run-b/checkpoint-9"]
    for seed, name in enumerate(names):
        (tmp_path / name).mkdir(parents=True)
        matrix = torch.randn(60, 4, generator=torch.Generator().manual_seed(seed))
        save_file({"embed_tokens.weight": matrix}, tmp_path / name / "model.safetensors")
    page = tmp_path / "page.html"
    options = [option, page] if option == "--html" else [option]
    code, out, _ = run(capsys, *(tmp_path / name for name in names), *options)
    shown = page.read_text() if option == "--html" else out.partition("references")[2]
    assert code == 0
    for name in names:
        assert f"{name}, input" in " ".join(shown.split())


@pytest.mark.parametrize("kind", ["checkpoint", "matrix.npy", "weights.safetensors"])
@pytest.mark.parametrize("is_first", [False, True])
def test_comparisons_without_a_tokenizer(kind, is_first, gpt2, tmp_path, capsys):
    """On one side: rows go by their ids, and have the names of the other side."""
    other, weight = tmp_path / kind, GPT2LMHeadModel.from_pretrained(gpt2).transformer.wte.weight
    moved = weight.detach().clone()
    moved[300] *= -1
    if kind == "matrix.npy":
        np.save(other, moved.numpy())
    elif kind == "checkpoint":
        other.mkdir()
        save_file({"wte.weight": moved}, other / "model.safetensors")
    else:
        save_file({"wte.weight": moved}, other)
    pair = (other, gpt2) if is_first else (gpt2, other)
    (change,) = as_json(capsys, *pair, "--compare")["changes"]
    first = change["movers"][0]
    text = AutoTokenizer.from_pretrained(gpt2).decode([300])
    assert (first["id"], first["token"], first["cosine"]) == (300, text, pytest.approx(-1))
    assert change["matched"] == 448
    assert repr(text) in run(capsys, *pair, "--compare")[1]


DEGENERATE = {
    "one row": np.eye(1, 5),
    "one alive": np.eye(9, 5) * (np.arange(9) == 3)[:, None],
    "two rows": np.eye(2, 5),
    "no finite row": np.full((9, 5), np.nan),
    "one finite row": np.where(np.arange(9)[:, None] == 3, np.eye(9, 5), np.inf),
    "zero": np.zeros((9, 5)),
    "all equal": np.ones((9, 5)),
    "one column": np.arange(9.0)[:, None],
    "no column": np.zeros((9, 0)),
    "no row": np.zeros((0, 5)),
}
QUESTIONS = ["--all", "--duplicates", "--undertrained", "--neighbours #3", "--json", "--html HTML"]
QUESTIONS += ["--compare", "--explore HTML", "--export PARQUET"]


@pytest.mark.parametrize("matrix", DEGENERATE)
@pytest.mark.filterwarnings("error")
def test_degenerate_matrices(matrix, tmp_path, capsys):
    """Every question is answered, or refused in one line that names the file."""
    path = tmp_path / "matrix.npy"
    np.save(path, DEGENERATE[matrix])
    for number, question in enumerate(QUESTIONS):
        places = {"HTML": tmp_path / f"{number}.html", "PARQUET": tmp_path / f"{number}.parquet"}
        options = [places.get(word, word) for word in question.split()]
        code, out, err = run(capsys, path, *[path] * (question == "--compare"), *options)
        if code == 0:
            assert "nan" not in out.lower()
        else:
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert str(path) in err or "#3" in err
    if matrix in ("one row", "one alive", "one finite row"):
        assert "no two rows" in run(capsys, path, "--duplicates")[1]
