"""The measures, against their definitions written out in numpy on small matrices."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reference_embeddings
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from coupled_adam import embeddings as measures
from coupled_adam.embeddings import geometry, partition
from coupled_adam.embeddings.diagnosis import NO_VERDICT
from coupled_adam.embeddings.measures import MEASURES
from coupled_adam.embeddings.references import place, references, span


def cloud(rows=50, columns=6, shift=0.3, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(rows, columns)) * generator.uniform(0.2, 2, columns) + shift


def z(c, matrix):
    return sum(np.exp(c @ e) for e in matrix)


def test_isotropy_does_not_depend_on_signs(monkeypatch):
    """An eigensolver that returns other signs changes the published value, not ours."""
    matrix = cloud(shift=1.0)
    before = measures.analyze(matrix)
    vectors = torch.linalg.eigh(torch.from_numpy(matrix.T @ matrix))[1].numpy()
    signed = [z(c, matrix) for c in vectors.T]
    assert before.isotropy_published == pytest.approx(min(signed) / max(signed), rel=1e-12)
    eigh = torch.linalg.eigh
    flip = torch.tensor([-1, 1, -1, 1, 1, -1])
    monkeypatch.setattr(torch.linalg, "eigh", lambda gram: (eigh(gram)[0], eigh(gram)[1] * flip))
    after = measures.analyze(matrix)
    assert after.isotropy == pytest.approx(before.isotropy, rel=1e-12)
    assert after.isotropy_published != pytest.approx(before.isotropy_published)


def test_isotropy_of_large_norms_does_not_overflow():
    """exp(c . e) of these is beyond float64."""
    matrix = cloud() * 1e4
    _, vectors = np.linalg.eigh(matrix.T @ matrix)
    exponents = np.concatenate([matrix @ vectors, -matrix @ vectors], axis=1)
    log_z = np.logaddexp.reduce(exponents, axis=0)
    assert measures.isotropy(matrix) == pytest.approx(np.exp(log_z.min() - log_z.max()))
    assert np.isfinite(measures.isotropy(matrix))


def test_counts_or_probabilities():
    """Their total does not matter; where there is nothing to correlate, there is no number."""
    counts = np.random.default_rng(1).integers(0, 5, 50)
    report = measures.analyze(cloud(), counts)
    p = torch.from_numpy(counts / counts.sum())
    again = measures.analyze(cloud(), p)
    for name in ("norm_frequency_correlation", "norm_frequency_correlation_published"):
        assert getattr(again, name) == pytest.approx(getattr(report, name))
    for matrix, other in ((np.ones((50, 2)), counts), (cloud(), np.ones(50))):
        assert measures.analyze(matrix, other).norm_frequency_correlation is None


def test_unigram_counts():
    tokens = torch.tensor([[3, 1], [1, 0]], dtype=torch.int32)
    assert measures.unigram_counts(tokens, 5).tolist() == [1, 2, 0, 1, 0]
    assert measures.unigram_counts(np.array([], dtype=np.uint16), 3).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"from 0 to 3, but must be between 0 and 2"):
        measures.unigram_counts(tokens, 3)


@settings(max_examples=20)
@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 8),
    seed=st.integers(0, 1000),
    block_rows=st.integers(1, 31),
)
def test_blocks_rotations_and_bounds(rows, columns, seed, block_rows):
    """Block sizes do not matter, nor does a rotation of space; each measure stays in its range."""
    matrix = cloud(rows, columns, seed=seed)
    whole = measures.analyze(matrix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "_BLOCK_BYTES", 8 * columns * block_rows)
        parts = measures.analyze(torch.from_numpy(matrix))
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(columns, columns)))[0]
    turned = measures.analyze(matrix @ rotation)
    for name in ("isotropy", "mean_norm", "mean_norm_ratio", "condition"):
        expected = pytest.approx(getattr(whole, name), rel=1e-6, abs=1e-9)
        assert getattr(parts, name) == expected, name
        # With fewer rows than columns, the eigenvectors of zero are arbitrary, but Z of them is V.
        assert getattr(turned, name) == expected, name
    assert 0 < whole.isotropy <= whole.isotropy_published <= 1
    assert 0 <= whole.mean_norm_ratio <= 1 + 1e-12
    assert 0 <= whole.condition <= 100 + 1e-9


def test_single_row():
    """One token: the mean is the row itself, and Z is e^{+-||e||} along it, 1 across."""
    report = measures.analyze(np.array([[3.0, 4.0]]))
    assert report.mean_norm == pytest.approx(5)
    assert report.mean_norm_ratio == pytest.approx(1)
    assert report.condition == pytest.approx(100)
    assert report.isotropy == pytest.approx(np.exp(-10))
    point = report.centered
    assert point.mean_norm_ratio is point.condition is point.effective_rank is None
    assert point.mean_cosine_similarity is point.participation_ratio is None
    with pytest.raises(ValueError, match="every row of embeddings is zero"):
        measures.analyze(np.zeros((3, 4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_and_arrays(dtype):
    """The values are those of the numbers as stored; parameters and strides do not matter."""
    tensor = torch.from_numpy(cloud()).to(dtype)
    parameter = torch.nn.Parameter(tensor.T.contiguous().T)
    assert measures.analyze(parameter) == measures.analyze(tensor.to(torch.float64).numpy())


def test_large_matrices_have_exponents_in_float32(monkeypatch):
    """Only the isotropy differs, by its seventh digit; of long rows, it is computed in float64."""
    matrix = torch.from_numpy(cloud(400, 64, shift=0.2) / 16).bfloat16()
    expected, alone = _variants(measures.analyze(matrix)), measures.isotropy(matrix)
    long = measures.analyze(matrix * 64)
    monkeypatch.setattr(partition, "_LARGE", 0)
    monkeypatch.setattr(geometry, "_BLOCK_BYTES", 8 * 64 * 50)
    assert measures.isotropy(matrix) != alone
    assert measures.isotropy(matrix) == pytest.approx(alone, rel=1e-6)
    for ours, theirs in zip(_variants(measures.analyze(matrix)), expected):
        for name, value in vars(theirs).items():
            if isinstance(value, float):
                rel = 1e-6 if name.startswith("isotropy") else 1e-11
                assert getattr(ours, name) == pytest.approx(value, rel=rel, abs=1e-14), name
    for ours, theirs in zip(_variants(measures.analyze(matrix * 64)), _variants(long)):
        assert ours.isotropy == pytest.approx(theirs.isotropy, rel=1e-9)


def _variants(report):
    return report, report.centered, report.all_but_the_top


def test_the_matrix_is_not_changed():
    matrix = torch.from_numpy(cloud())
    before = matrix.clone()
    measures.analyze(matrix)
    assert torch.equal(matrix, before)


BAD = [
    (np.zeros((0, 4)), r"shape \[0, 4\]"),
    (torch.zeros(4, 0), r"shape \[4, 0\]"),
    (np.zeros(4), r"shape \[4\]"),
    (np.zeros((2, 3, 4)), r"shape \[2, 3, 4\]"),
    (np.array([[1.0, 2.0], [3.0, np.nan], [4.0, np.inf]]), "row 1 is not finite"),
    (torch.tensor([[1.0, float("inf")]]), "row 0 is not finite"),
    (np.ones((2, 2), dtype=complex), "must be real.*complex128"),
    (torch.ones(2, 2, dtype=torch.complex64), "must be real.*complex64"),
    ([[1.0, 2.0]], "embeddings must be .*list"),
    ({"weight": torch.ones(2, 3)}, "embeddings must be .*dict"),
]


@pytest.mark.parametrize(("matrix", "message"), BAD)
def test_bad_embeddings(matrix, message):
    for measure in (measures.analyze, measures.isotropy, measures.mean_norm_ratio):
        with pytest.raises((ValueError, TypeError), match=message):
            measure(matrix)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("counts", np.ones(3), r"counts has the shape \[3\].*each of the 50"),
        ("counts", np.full(50, -1.0), "negative"),
        ("counts", np.full(50, np.nan), "negative, NaN or infinite"),
        ("counts", np.zeros(50), "at least two tokens"),
        ("counts", np.eye(50)[0], "at least two tokens"),
        ("keep", np.ones(49, bool), r"keep must .*shape \[49\]"),
        ("keep", np.ones(50), "a boolean for each .*dtype float64"),
        ("keep", np.zeros(50, bool), "keep must be True for at least one row"),
        ("directions", 7, "directions=7 must be from 0 to H = 6"),
    ],
)
def test_bad_options(name, value, message):
    with pytest.raises(ValueError, match=message):
        measures.analyze(cloud(), **{name: value})


def test_report_prints_and_round_trips():
    counts = np.arange(50)
    report = measures.analyze(cloud(), counts)
    assert report.unseen_tokens == 1
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False)) == report.to_dict()
    assert report.to_dict()["centered"]["isotropy"] == report.centered.isotropy
    text = str(report)
    assert f"{report.isotropy:.2f}" in text
    assert f"{report.all_but_the_top.participation_ratio:.1f}" in text
    assert "50 x 6" in text
    shown = report._repr_html_()  # in a notebook
    assert f">{span('mean_norm_ratio')}</td>" in shown
    assert html.escape(report.diagnosis) in shown
    without = measures.analyze(cloud())
    assert without.norm_frequency_correlation is None
    assert "frequency" not in str(without)


def by_definition(matrix, counts=None):
    """The measures of a matrix written out: over singular values, pairs, rows."""
    sigma = np.linalg.svd(matrix, compute_uv=False)
    q = sigma / sigma.sum()
    norms = np.array([np.sqrt(e @ e) for e in matrix])
    cosines = [
        (a @ b) / np.sqrt((a @ a) * (b @ b))
        for i, a in enumerate(matrix)
        for b in matrix[:i]
        if a.any() and b.any()
    ]
    mu = matrix.mean(0)
    _, axes = np.linalg.eigh(matrix.T @ matrix)
    both = [*axes.T, *-axes.T]
    partition, at_unit = ([z(c, m) for c in both] for m in (matrix, matrix / norms.mean()))
    expected = {
        "isotropy": min(partition) / max(partition),
        "isotropy_unit": min(at_unit) / max(at_unit),
        "mean_norm": np.sqrt(mu @ mu),
        "mean_norm_ratio": np.sqrt(mu @ mu) / norms.mean(),
        "condition": 100 * sigma[-1] / sigma[0],
        "mean_cosine_similarity": np.mean(cosines),
        "effective_rank": np.exp(-sum(x * np.log(x) for x in q if x > 0)),
        "explained_variance": np.linalg.eigvalsh(np.cov(matrix.T))[-1] / np.trace(np.cov(matrix.T)),
        "participation_ratio": (sigma**2).sum() ** 2 / (sigma**4).sum(),
        "norm_mean": norms.mean(),
        "norm_std": norms.std(),
        "norm_min": norms.min(),
        "norm_max": norms.max(),
    }
    if counts is not None:
        seen = counts > 0
        log_p = np.log(counts[seen] / counts.sum())
        expected["norm_frequency_correlation"] = np.corrcoef(norms[seen], log_p)[0, 1]
        expected["mean_frequency_correlation"] = np.corrcoef((matrix @ mu)[seen], log_p)[0, 1]
        log_p = np.log(counts / counts.sum() + 1e-10)
        expected["norm_frequency_correlation_published"] = np.corrcoef(norms, log_p)[0, 1]
    return expected


def test_all_measures_by_definition():
    """As it is, without the mean, and without the mean and the top two principal directions."""
    matrix = cloud()
    matrix[7] = 0  # a row without a direction
    counts = np.random.default_rng(3).integers(0, 9, 50)
    report = measures.analyze(torch.from_numpy(matrix), counts, directions=2)
    for name, expected in by_definition(matrix, counts).items():
        assert getattr(report, name) == pytest.approx(expected, rel=1e-9), name
    np.testing.assert_allclose(
        report.singular_values, np.linalg.svd(matrix, compute_uv=False), rtol=1e-9
    )
    assert measures.mean_norm_ratio(matrix) == pytest.approx(report.mean_norm_ratio, rel=1e-12)
    wide = cloud(3, 8)  # which has as many singular values as rows
    expected = by_definition(wide)["condition"]
    assert measures.analyze(wide).condition == pytest.approx(expected, rel=1e-6)

    centered = matrix - matrix.mean(0)
    _, _, directions = np.linalg.svd(centered, full_matrices=False)
    topless = centered - centered @ directions[:2].T @ directions[:2]
    for part, other in ((report.centered, centered), (report.all_but_the_top, topless)):
        for name, expected in by_definition(other, counts).items():
            if name == "mean_frequency_correlation":  # of rounding
                assert getattr(part, name) is None
                continue
            # The smallest singular values are zero, but for a rounding that squares enlarge.
            assert getattr(part, name) == pytest.approx(expected, rel=1e-7, abs=1e-5), name
        assert measures.isotropy(other) == pytest.approx(part.isotropy, rel=1e-9)
    np.testing.assert_allclose(measures.subtract_mean(matrix), centered, atol=1e-12)
    np.testing.assert_allclose(measures.all_but_the_top(matrix, 2), topless, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_centering_keeps_the_kind(dtype):
    tensor = torch.nn.Parameter(torch.from_numpy(cloud()).to(dtype))
    for result in (measures.subtract_mean(tensor), measures.all_but_the_top(tensor)):
        assert (result.dtype, result.shape) == (dtype, tensor.shape)
        assert not result.requires_grad
        assert measures.mean_norm_ratio(result) < (1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert measures.subtract_mean(cloud().astype(np.float32)).dtype == torch.float64


def test_rows_that_are_left_out():
    """They have no part in anything: not even if they are not finite."""
    matrix, counts = cloud(), np.arange(50) % 7
    keep = np.random.default_rng(0).random(50) < 0.7
    sets = {"set": measures.WordSimilaritySet((("0", "1"), ("1", "2"), ("2", "4")), (1, 2, 3))}
    broken = matrix.copy()
    broken[~keep] = np.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "_BLOCK_BYTES", 8 * 6 * 8)
        report = measures.analyze(broken, counts, keep=keep)
    expected = measures.analyze(matrix[keep], counts[keep])
    assert report.excluded_rows == (~keep).sum()
    assert report.unseen_tokens == (counts == 0).sum()
    for name in ("isotropy", "mean_norm", "norm_frequency_correlation", "effective_rank"):
        for ours, theirs in ((report, expected), (report.centered, expected.centered)):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9)
    keep[:] = True
    keep[4] = False
    score = measures.analyze(matrix, sets=sets, token_ids=int, keep=torch.from_numpy(keep))
    assert (score.word_similarity.sets["set"].pairs, score.word_similarity.mean) == (2, None)
    broken[9] = np.inf
    keep = np.isfinite(broken).all(1)
    keep[9] = True
    with pytest.raises(ValueError, match="row 9 is not finite"):
        measures.analyze(broken, keep=keep)


def test_word_similarity_of_the_variants():
    """As of matrices that were made by subtracting first."""
    matrix = cloud(shift=2)
    pairs = tuple((str(i), str(i + 1)) for i in range(20))
    ratings = tuple(np.random.default_rng(0).uniform(0, 10, 20))
    sets = {"set": measures.WordSimilaritySet(pairs, ratings)}
    report = measures.analyze(matrix, sets=sets, token_ids=int, directions=2)
    for part, other in (
        (report, matrix),
        (report.centered, measures.subtract_mean(matrix)),
        (report.all_but_the_top, measures.all_but_the_top(matrix, 2)),
    ):
        expected = measures.word_similarity(other, sets, int).sets["set"]
        score = part.word_similarity.sets["set"]
        assert score.r == pytest.approx(expected.r, rel=1e-9)
        assert score.spearman == pytest.approx(expected.spearman, rel=1e-9)
    assert len({round(p.word_similarity.mean, 6) for p in (report, report.centered)}) == 2
    with pytest.raises(ValueError, match="sets needs token_ids"):
        measures.analyze(matrix, sets=sets)


@pytest.mark.slow
def test_memory_is_bounded():
    """A 50,000 x 1024 matrix in bf16 (0.1 GB) is measured with less extra memory than its size."""
    script = """
import resource, torch
from coupled_adam.embeddings import analyze
matrix = torch.empty(50_000, 1024, dtype=torch.bfloat16)
for part in matrix.split(8192):
    part.copy_(torch.randn(part.shape) * 0.02)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
analyze(torch.ones(4, 2))  # load what is loaded once
before = peak()
report = analyze(matrix)
assert 0.9 < report.isotropy <= 1, report
assert peak() - before < matrix.nbytes, (peak() - before) / matrix.nbytes
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_iso_score_is_the_published_one():
    """By the steps of its definition: arXiv 2108.07344, algorithm 1."""
    rows = np.random.default_rng(0).normal(size=(80, 6)) * np.linspace(0.1, 2, 6) + 3
    variances = np.linalg.eigvalsh(np.cov(rows.T))
    n = len(variances)
    normalized = np.sqrt(n) * variances / np.linalg.norm(variances)
    defect = np.linalg.norm(normalized - 1) / np.sqrt(2 * (n - np.sqrt(n)))
    dimensions = (n - defect**2 * (n - np.sqrt(n))) ** 2 / n
    expected = (dimensions - 1) / (n - 1)
    for matrix in (rows, 5 * rows + 2):
        assert measures.analyze(matrix).iso_score == pytest.approx(expected, rel=1e-10)
    assert measures.analyze(np.ones((4, 3))).iso_score is None


def test_modules():
    """A layer's matrix, a model's output embeddings, or its only table; otherwise which to pass."""
    layer = nn.Embedding(20, 4)
    expected = measures.analyze(layer.weight)
    assert measures.analyze(layer) == expected
    assert measures.analyze(nn.Sequential(layer, nn.Linear(4, 2))) == expected
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_embd=4, n_layer=1, n_head=1, tie_word_embeddings=False)
    )
    assert measures.analyze(model) == measures.analyze(model.lm_head.weight)
    assert measures.analyze(model.transformer) == measures.analyze(model.transformer.wte.weight)
    for module, message in (
        (nn.ModuleList([layer, nn.Embedding(5, 4)]), "not clear: pass the matrix itself"),
        (nn.ReLU(), "which matrix of ReLU is meant is not clear"),
    ):
        with pytest.raises(ValueError, match=message):
            measures.analyze(module)


def test_a_model_by_its_path(tmp_path):
    """Without the rows that are zero or not finite, which would make everything NaN."""
    matrix = cloud(60, 6)
    broken = np.concatenate([matrix, np.full((1, 6), np.nan), np.zeros((1, 6))])
    np.save(tmp_path / "matrix.npy", broken)
    report = measures.analyze(tmp_path / "matrix.npy")
    assert (report.excluded_rows, report.vocab_size) == (2, 62)
    expected = measures.analyze(matrix)
    assert report.isotropy == pytest.approx(expected.isotropy, rel=1e-12)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        measures.analyze(str(tmp_path / "missing.npy"))


def normal(rows, columns, scale=1.0, shift=0.0, is_centered=False):
    matrix = scale * np.random.default_rng(0).normal(size=(rows, columns))
    return matrix - is_centered * matrix.mean(0) + shift


CHANCE = "is what chance gives to so many rows: about 1 / √100"
SHIFTED = "For cosine similarity and retrieval"
KEYS = ("test_loss", "mean_norm_ratio")


@pytest.mark.parametrize(
    ("matrix", "said", "not_said"),
    [
        (normal(4000, 16, 0.05, is_centered=True), ["it is 1.00"], [SHIFTED, "chance"]),
        (normal(4000, 16, 0.05, 0.5, True), [SHIFTED, "with the mean removed 1.00"], ["chance"]),
        # As in GloVe's vectors, whose rows are long.
        (normal(4000, 16, 5, is_centered=True), ["at unit mean norm 0.99"], [SHIFTED]),
        (normal(100, 16, 1 / 16), [CHANCE], [SHIFTED]),
        (normal(100, 16, 1 / 16, 0.05), [SHIFTED], ["chance"]),
        (np.eye(2, 40) * 30 + 0.01, ["2 rows cannot use all of 40 directions"], []),
    ],
)
def test_diagnosis(matrix, said, not_said):
    """It tells what the mean, the norms and chance have to do with the measures."""
    diagnosis = measures.analyze(matrix).diagnosis
    assert all(part in diagnosis for part in said)
    assert not any(part in diagnosis for part in not_said)


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ({}, "Nothing differs from the references."),
        (
            {"dead": ["'a'"], "repair": "REPAIR"},
            "1 row is zero or not finite, and left out of all measures ('a'): REPAIR gives them "
            "values like those of the others; nothing else differs from the references.",
        ),
        (
            {"dead": ["#1", "#2"], "tiny": ["'a'"], "left_out": ["head [9, 4] is quantised"]},
            "2 rows are zero or not finite, and left out of all measures (#1, #2); 1 row is "
            "shorter than a hundredth of the median norm ('a'); not measured: head [9, 4] is "
            "quantised; nothing else differs from the references.",
        ),
    ],
)
def test_the_verdict_comes_first(options, verdict):
    """One sentence: what there is to see, and that there is nothing else."""
    usual = normal(4000, 16, 0.05, 0.01) * np.linspace(0.2, 1, 16)
    assert measures.analyze(usual).sentences(**options)[0] == verdict
    far = measures.analyze(normal(4000, 16, 0.05, 3)).sentences(**options)[0]
    assert "elative mean norm" in far
    assert "above all" in far
    assert far.endswith("nothing else differs from the references.")


def test_no_verdict_and_no_product():
    """No matrix is called healthy or not, and nothing is recommended to train with."""
    for matrix in (normal(4000, 16), normal(4000, 16, 1, 1), np.eye(2, 40) + 1):
        diagnosis = measures.analyze(matrix).diagnosis
        assert "health" not in diagnosis
        assert not re.search("train(ing)? with", diagnosis, re.IGNORECASE)
        assert diagnosis.endswith(NO_VERDICT)
    # The figures of that sentence are those of the study's runs of 20M tokens.
    results = Path(__file__).parents[2] / "study" / "results"
    adamw, lean = (
        {key: np.mean([run[key] for run in runs["seeds"].values()]) for key in KEYS}
        for question, arm in (
            ("betas_longer", "adamw 0 0.999 n=1"),
            ("finals", "9768 steps lean2 0 0.99"),
        )
        for runs in (json.loads((results / f"{question}.json").read_text())[arm],)
    )
    assert adamw["test_loss"] == pytest.approx(lean["test_loss"], abs=0.007)
    assert round(adamw["mean_norm_ratio"], 2) == 0.25
    assert lean["mean_norm_ratio"] < 0.001


@pytest.mark.parametrize("value", [0.0, 1e-4, 0.05, 0.2, 0.5, 2.0])
def test_where_a_value_lies(value):
    """Between the two references that are next to it; beyond all, the last of them is named."""
    medians = {r.name: r.medians.get("mean_norm_ratio") for r in references()}
    text = place("mean_norm_ratio", value)
    named = {name for name in medians if f"{name} (" in text or f"which {name}" in text}
    below = [name for name in medians if medians[name] <= value]
    above = [name for name in medians if medians[name] > value]
    expected = {max(below, key=medians.get)} if below else set()
    expected |= {min(above, key=medians.get)} if above else set()
    assert named == expected


def test_the_references_are_those_of_the_committed_runs():
    """Recomputed from study/results, for each arm; those of packages need their packages."""
    for name, pattern in reference_embeddings.ARMS.items():
        (reference,) = (r for r in references() if r.name == name)
        runs = reference_embeddings.runs_of(pattern)
        ratios = [run["mean_norm_ratio"] for run in runs]
        assert reference.matrices == len(ratios) > 5
        assert reference.measures["mean_norm_ratio"] == pytest.approx(
            np.quantile(ratios, [0, 0.5, 1]), rel=1e-3
        )


def frequencies(rows, direction, length):
    """Rows of Zipf's counts, whose place along the mean and whose length depend on these."""
    generator = np.random.default_rng(0)
    counts = np.round(1e6 / np.arange(1, rows + 1)).astype(int)
    log_p = np.log(counts) - np.log(counts).mean()
    matrix = generator.normal(size=(rows, 16)) / 16
    matrix[:, 0] += 1 + direction * log_p
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix * (1 + length * log_p[:, None] / norms), counts


DRIFTED = "Rare tokens lie further along the mean than frequent ones"
AHEAD = "Frequent tokens lie further along the mean than rare ones"
LONGER = "Rare tokens have longer rows than frequent ones"


@pytest.mark.parametrize(
    ("rows", "direction", "length", "said"),
    [
        (3000, -0.2, 0, {DRIFTED, LONGER}),
        (3000, 0.2, 0, {AHEAD}),
        (3000, 0, -0.1, {DRIFTED, LONGER}),
        (3000, 0, 0, set()),  # as at the beginning of a training
        (8, -0.02, 0, set()),  # a correlation of eight tokens is chance
    ],
)
def test_what_a_diagnosis_says_of_frequency(rows, direction, length, said):
    """On the right side, and only if it is more than chance."""
    matrix, counts = frequencies(rows, direction, length)
    report = measures.analyze(matrix, counts)
    assert {s for s in (DRIFTED, AHEAD, LONGER) if s in report.diagnosis} == said


def test_each_measure_is_documented():
    """With its key, on the page; and the registry says what it means."""
    page = (Path(__file__).parents[2] / "docs" / "analyze.md").read_text(encoding="utf-8")
    for key in MEASURES:
        assert f"`{key}`" in page
