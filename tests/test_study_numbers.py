"""The study's numbers, recomputed from its results.

Which runs a row of a table is of is the study's data. Means, deviations, tests and orders are
computed here again, and so is what the pages say of them. When there are more results,
``python -m study.tables`` writes the tables, and ``pytest -n 0 --fill`` of this file the numbers
of the sentences; what fails then is an order, or a number of seeds, that no longer holds.
"""

import functools
import itertools
import json
import re
from pathlib import Path

import memory_table
import numpy as np
import pytest
from scipy import stats
from study import referee, tables
from study.questions import FINAL_SETTINGS, SETTINGS
from study.rate import fitted_anew
from study.referee import finalists
from study.rows import between

from coupled_adam.optim.lean import lean_lr_factor

ROOT = Path(__file__).parent.parent
COMPARISONS, RATE, WIDER, MOMENTUM = (
    f"docs/study/{name}.md" for name in ("optimizers", "rate", "wider", "momentum")
)
PRACTICE, README, STUDY = "docs/practice.md", "README.md", "docs/study/README.md"
TABLES, PAPER = "docs/tables.md", "docs/paper.md"


# --- the results ---


@functools.cache
def results(question):
    return json.loads((ROOT / f"study/results/{question}.json").read_text())


VALUES = {
    "valid": lambda run: run["valid_loss"],
    "test": lambda run: run["test_loss"],
    "documents": lambda run: run["documents"]["test"]["loss"],
    "mean": lambda run: run["mean_norm_ratio"],
    "men": lambda run: run["word_similarity"]["MEN"]["r"],
    "r_mean": lambda run: np.mean([s["r"] for s in run["word_similarity"].values() if s["r"]]),
}
"""What is read of a run, by a short name; other names are its keys."""


def seeds(question, name, value=None):
    """The runs of a name by seed, or what is read of them."""
    of_run = VALUES.get(value, lambda run: run if value is None else run[value])
    return {int(s): of_run(run) for s, run in results(question)[name]["seeds"].items()}


def first(question, name, value="valid"):
    """With the first seed."""
    return seeds(question, name, value)[1]


def mean(question, name, value="valid"):
    return np.mean([*seeds(question, name, value).values()])


def differences(name, baseline, value="valid"):
    """Those of the runs of two names, as (question, name), with the same seeds."""
    ours, theirs = seeds(*name, value), seeds(*baseline, value)
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def best_run(question, start, seed=1):
    """The name with the lowest validation loss of a seed, of those that begin so."""
    names = [name for name in results(question) if name.startswith(start)]
    return min(names, key=lambda name: seeds(question, name, "valid")[seed])


def p_of_pairs(values):
    return stats.ttest_1samp(values, 0).pvalue


def middle_and_interval(values):
    """The mean, and the ends of its 95 % interval."""
    return [np.mean(values), *stats.ttest_1samp(values, 0).confidence_interval()]


# --- the pages ---


@functools.cache
def words(page):
    """The text of a page, with one space wherever there is any."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def rows(table, page=None):
    """The header and the cells of a table's rows, as on the page."""
    pages = [page] if page else [COMPARISONS, "study/tables.md"]
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    made = re.search(rf"<!-- table: {table} -->\n(.*?)<!-- end -->", text, re.S)[1]
    header, _, *lines = (
        [cell.strip() for cell in line[1:-1].split("|")] for line in made.strip().splitlines()
    )
    return header, lines


def shows(text, value):
    """Assert that a number is this value, to the digits that it has."""
    decimals = len(text.partition(".")[2])
    assert float(text) == pytest.approx(value, abs=0.51 * 10**-decimals), (text, value)


def cell_shows(cell, values):
    """Assert that a cell has the mean and the deviation of some values."""
    shown = cell.strip("*_")
    if shown == "< 1e-6":
        assert max(values) < 1e-6
        return
    text, _, digit = shown.partition(" (")
    shows(text, np.mean(values))
    if digit:
        unit = 10 ** -len(text.partition(".")[2])
        spread = int(digit.rstrip(")")) * unit
        assert spread == pytest.approx(np.std(values, ddof=1), abs=0.51 * unit)


def p_shows(cell, p):
    """Assert that a cell has this p, and is empty without one."""
    if np.isnan(p):
        assert not cell
    elif p < 0.001:
        assert cell == "< 0.001"
    else:
        assert float(cell) == pytest.approx(min(p, 1), rel=0.06)


def numbers(cell):
    return [float(number) for number in re.findall(r"[-+]?\d+\.\d+", cell)]


@pytest.fixture(autouse=True)
def _fill(request):
    said.fills = request.config.getoption("fill")


def said(sentence, *expected, page=COMPARISONS):
    """Assert that a page has a sentence once, with these numbers at each #; ... is any text.

    With --fill they are written there, with as many digits and signs as it has.
    """
    pattern = re.escape(sentence).replace(r"\#", r"([-+]?\d+(?:\.\d+)?)").replace(r"\ ", r"\s+")
    text = (ROOT / page).read_text(encoding="utf-8")
    matches = [*re.finditer(pattern.replace(r"\.\.\.", ".*?"), text, re.S)]
    assert len(matches) == 1, f"{page} says it {len(matches)} times: {sentence}"
    (match,) = matches
    assert len(match.groups()) == len(expected)
    if said.fills:
        filled = text
        for i, value in reversed([*enumerate(expected, 1)]):
            sign, digits = "+" * match[i].startswith("+"), len(match[i].partition(".")[2])
            filled = f"{filled[: match.start(i)]}{value:{sign}.{digits}f}{filled[match.end(i) :]}"
        (ROOT / page).write_text(filled, encoding="utf-8")
        return
    for shown, value in zip(match.groups(), expected, strict=True):
        shows(shown, value)


def test_filling(tmp_path, monkeypatch):
    """With --fill a sentence gets the numbers, and keeps its lines and digits."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("It is -0.50 lower,\nand +1 or 2.5 % at most.\n")
    monkeypatch.setattr(said, "fills", False)
    with pytest.raises(AssertionError):
        said("It is # lower, and #", 0.123, 7, page="page.md")
    monkeypatch.setattr(said, "fills", True)
    said("It is # lower, and # ... # %", 0.123, 7.4, 12.34, page="page.md")
    assert (tmp_path / "page.md").read_text() == "It is 0.12 lower,\nand +7 or 12.3 % at most.\n"
    # Which of two such sentences is meant could not be told.
    (tmp_path / "page.md").write_text("It is 1 lower.\nIt is 2 lower.\n")
    with pytest.raises(AssertionError, match="says it 2 times"):
        said("It is # lower", 3, page="page.md")


# --- tables ---

COLUMNS = {
    "L of test documents ↓": "documents",
    "L (validation) ↓": "valid",
    "‖μ‖ʳ ↓": "mean",
    "effective rank ↑": "effective_rank",
    "r of MEN ↑": "men",
}


def columns_show(header, line, question, name, columns=COLUMNS):
    for column, value in columns.items():
        cell_shows(line[header.index(column)], [*seeds(question, name, value).values()])


OF_BETAS = sorted(name for name in tables.TABLES if re.match("betas|batch", name))


@pytest.mark.parametrize("question", OF_BETAS)
def test_betas(question):
    """Each cell, and the order: the best AdamW first, then all others by their loss."""
    header, lines = rows(question)
    names = {between(question, name).label: name for name in results(question)}
    losses = []
    for line in lines:
        columns_show(header, line, question, names[line[0]])
        assert int(line[-1]) == len(seeds(question, names[line[0]]))
        losses.append(mean(question, names[line[0]]))
    assert losses[0] == min(x for x, line in zip(losses, lines) if line[0].startswith("AdamW"))
    if question == "betas":  # where no other optimizer is ahead, as the page says
        assert losses[0] == min(losses)
    assert losses[1:] == sorted(losses[1:])


@pytest.mark.parametrize("table", tables.BY_FACTOR)
def test_by_factor(table):
    """Each cell of the tables by rate; none is left out."""
    _, rules = tables.BY_FACTOR[table]
    (_, *factors), lines = rows(table)
    for label, *cells in lines:
        question, rule = rules[label]
        for factor, cell in zip(factors, cells, strict=True):
            name = f"{rule} {factor.replace(' ', '')}"
            assert bool(cell) == (name in results(question)), (label, factor)
            if cell:
                cell_shows(cell, [*seeds(question, name, "valid").values()])


def test_peers():
    """Each rule at the rate with the most seeds, or else the lowest loss on validation."""
    header, lines = rows("peers")
    losses = []
    for line in lines:
        label, _, n = line[0].rpartition(", n = ")
        question, rule = tables.PEERS[label]
        columns_show(header, line, question, f"{rule} n={n}")
        assert int(line[-1]) == len(seeds(question, f"{rule} n={n}"))
        tried = [name for name in results(question) if name.rpartition(" n=")[0] == rule]
        best = min(tried, key=lambda name: (-len(seeds(question, name)), mean(question, name)))
        assert best == f"{rule} n={n}"
        losses.append(mean(question, best))
    assert losses[1:] == sorted(losses[1:])
    # What has a result is on the page.
    measured = {name.rpartition(" n=")[0] for name in results("peers")}
    assert measured == {rule for question, rule in tables.PEERS.values() if question == "peers"}


def test_recommended():
    """Each cell; the time of a step is that on a GPU."""
    header, lines = rows("recommended", STUDY)
    record = json.loads((ROOT / "benchmarks/results/gpu/nvidia-h200.json").read_text())
    ratios_of = {
        case: {
            result["optimizer"]: result["ratio"][1]
            for result in record["steps"]
            if list(result["case"].values()) == [*case, 0, False]
        }
        for case in (
            (128256, 4096, "float32"),
            (128256, 4096, "bfloat16"),
            (50304, 768, "bfloat16"),
        )
    }
    ratios, large, small = ratios_of.values()
    columns = {
        "test loss of 0.37M parameters after 9,768 steps ↓": "documents",
        "norm of the mean embedding, relative to the mean norm ↓": "mean",
    }
    for line, row in zip(lines, tables.RECOMMENDED, strict=True):
        assert line[0].removesuffix(", compiled") == row.line.label
        columns_show(header, line, row.line.question, row.line.name, columns)
        assert int(line[-1]) == len(seeds(row.line.question, row.line.name))
        shows(line[2], ratios.get(row.timed_as, 1.0))
    said("Compiled, AdamW's update takes #.", ratios["AdamW compiled"], page=STUDY)
    said(
        "update alone takes # of the fused AdamW's time at 128,256 x 4,096 in bfloat16, but # at "
        "50,304 x 768.",
        *(large["LEAN"], small["LEAN"]),
        page=README,
    )


def test_what_lean_gives_up():
    """Each cell of the table of geometry, and the numbers that the pages take from it."""
    _, lines = rows("geometry")
    values = [
        *("isotropy", "isotropy_centered", "isotropy_unit", "mean", "norm_frequency_correlation"),
        *("frequent", "rare", "effective_rank", "men"),
    ]
    bands = {"frequent": 0, "rare": -1}
    shown = {}
    for (label, *cells), row in zip(lines, tables.RECOMMENDED, strict=True):
        assert label == row.line.label
        for cell, value in zip(cells, values, strict=True):
            if cell != "–":  # runs that are older than the measure
                runs = seeds(row.line.question, row.line.name)
                if value in bands:
                    cell_shows(cell, [run["band_norms"][bands[value]] for run in runs.values()])
                else:
                    measured = seeds(row.line.question, row.line.name, value)
                    cell_shows(cell, [*measured.values()])
        shown[label] = [float(cell.partition(" ")[0].replace("–", "nan")) for cell in cells]
    _, adamw, coupled, lean, _ = shown.values()
    said("Coupled Adam is #, # and #", lean[1], adamw[1], coupled[1])
    slower = ("betas_longer", "adamw 0 0.999 n=1")
    said(
        "AdamW has #, and # centered",
        *(mean(*slower, m) for m in ("isotropy", "isotropy_centered")),
    )
    assert lean[5] > lean[6]
    assert adamw[5] < adamw[6]
    assert lean[2] == pytest.approx(coupled[2], abs=0.02)
    said("rank is # with all three", *{round(row[7]) for row in (adamw, coupled, lean)})
    assert lean[8] >= max(adamw[8], coupled[8])
    said("isotropy is # with Coupled Adam and # with LEAN", coupled[0], lean[0], page=README)
    said("isotropy does not follow (#; Coupled Adam has #)", lean[0], coupled[0], page=STUDY)


def test_headline():
    """All tests, corrected for their number."""
    lines = rows("headline")[1]
    family = [
        pair
        for pair in referee.headline()
        if all(line.name in results(line.question) for line in (pair.line, pair.baseline))
    ]
    tests = [
        [seeds(line.question, line.name, "test") for line in (pair.line, pair.baseline)]
        for pair in family
    ]
    p = [
        stats.ttest_ind([*ours.values()], [*theirs.values()]).pvalue
        if min(len(ours), len(theirs)) > 1
        else np.nan
        for ours, theirs in tests
    ]
    order = [i for i in np.argsort(p) if not np.isnan(p[i])]
    steps = [p[i] * (len(order) - place) for place, i in enumerate(order)]
    corrected = dict(zip(order, itertools.accumulate(steps, max)))
    for i, (line, pair, (ours, theirs)) in enumerate(zip(lines, family, tests, strict=True)):
        assert line[:2] == [pair.tokens, f"{pair.line.label} against {pair.baseline.label}"]
        difference, of_test, of_holm, of_pairs, numbers_of_seeds = line[2:]
        shows(difference.strip("*"), np.mean([*ours.values()]) - np.mean([*theirs.values()]))
        assert difference.startswith("**") == (corrected.get(i, 1) < 0.05)
        assert numbers_of_seeds == f"{len(ours)}, {len(theirs)}"
        common = sorted(ours.keys() & theirs.keys())
        pairs = [[side[seed] for seed in common] for side in (ours, theirs)]
        p_shows(of_test, p[i])
        p_shows(of_holm, corrected.get(i, np.nan))
        p_shows(of_pairs, stats.ttest_rel(*pairs).pvalue if len(common) > 1 else np.nan)


def test_all_runs_of_one_adamw():
    """The loss after 20M tokens at the usual betas, with the runs of a later question, too."""
    coupled = [*seeds("paper_ratio", "coupled n=0", "test").values()]
    planned, later = ("paper_ratio", "adamw n=0"), ("betas_longer", "adamw 0.9 0.95 n=0")
    adamw = [loss for runs in (planned, later) for loss in seeds(*runs, "test").values()]
    assert len(adamw) == 8
    student, welch = (stats.ttest_ind(coupled, adamw, equal_var=x).pvalue for x in (True, False))
    said(
        "made later, the difference is #, with a two-sided p of # by Student's test, and # by",
        *(np.mean(adamw) - np.mean(coupled), student, welch),
        page=PAPER,
    )
    planned = [*seeds(*planned, "test").values()]
    alone = stats.ttest_ind(coupled, planned, alternative="less").pvalue
    said("p is # alone", alone, page=PAPER)


@pytest.mark.parametrize(
    ("row", "question", "name"),
    [
        ("0.4M, 1.2M", "learning_rate", "lr=0.005 {}"),
        ("0.4M, 20M", "paper_ratio", "{} n=0"),
        ("0.4M, 48M, one seed", "paper_ratio_longer", "{} n=0"),
    ],
)
def test_the_papers_first_table(row, question, name):
    """What is here beside the paper's."""
    means = [
        mean(question, name.format(arm), value)
        for value in ("test", "isotropy", "mean_norm_ratio", "r_mean")
        for arm in ("adamw", "coupled")
    ]
    said(f"| here: {row} | {' | '.join(['# / #'] * 4)} |", *means, page=PAPER)


BEST = referee.ADAMW_BEST
BY_LABEL = {line.label: line for line in referee.BETAS}


def on_documents(label, split, key):
    """The losses of documents, or of bands, of the runs of a row, by seed, as arrays."""
    line = BY_LABEL[label]
    return {
        seed: np.array(run["documents"][split][key])
        for seed, run in seeds(line.question, line.name).items()
    }


@pytest.mark.parametrize(("split", "column"), [("valid", 1), ("test", 2)])
def test_documents(split, column):
    best = on_documents(BEST.label, split, "losses")
    for line in rows("documents")[1]:
        losses, cell = on_documents(line[0], split, "losses"), line[column]
        assert int(line[3]) == len(losses)
        if line[0] == BEST.label:
            shows(cell, np.mean([*losses.values()]))
            continue
        common = losses.keys() & best.keys()
        by_document = np.mean([losses[seed] - best[seed] for seed in common], axis=0)
        middle, low, high = numbers(cell)
        assert middle == pytest.approx(by_document.mean(), abs=6e-5)
        error = by_document.std(ddof=1) / np.sqrt(len(by_document))
        assert low == pytest.approx(middle - 1.96 * error, abs=5e-4)
        assert high == pytest.approx(middle + 1.96 * error, abs=5e-4)
        assert cell.startswith("**") == (low > 0 or high < 0)


def test_bands():
    shares, *lines = rows("bands")[1]
    best = on_documents(BEST.label, "test", "band_losses")
    tokens = on_documents(BEST.label, "test", "band_tokens")[1]
    assert [f"{share:.0f} %" for share in 100 * tokens / tokens.sum()] == shares[1:]
    for label, *cells in lines:
        losses = on_documents(label, "test", "band_losses")
        if label != BEST.label:
            losses = {seed: losses[seed] - best[seed] for seed in losses.keys() & best.keys()}
        for cell, expected in zip(cells, np.mean([*losses.values()], axis=0), strict=True):
            shows(cell, expected)


def windows(training):
    """What each rule would have done in each window of a training, and the mean over windows."""
    (run,) = seeds("movement", tables.TRAINED_BY[training]).values()
    assert len(run["windows"]) == 6
    rules = [window["rules"] for window in run["windows"]]
    return {
        rule: {key: np.mean([w[rule][key] for w in rules], axis=0) for key in rules[0][rule]}
        for rule in rules[0]
    }


def test_movement():
    """The table on momentum: means over windows, of the rarer half, and over all bands."""
    adamw, lean = windows("adamw"), windows("lean")
    lines = rows("movement", MOMENTUM)[1]
    assert [line[0] for line in lines] == [*lean]
    for rule, *cells in lines:
        expected = [lean[rule]["in_batch"][-1]]
        for training in (adamw, lean):
            expected += [training[rule]["cosine"].mean(), training[rule]["cosine"][-1]]
        for cell, value in zip(cells, expected, strict=True):
            shows(cell, value)


def test_what_the_page_on_momentum_concludes():
    """Late movement, the lower cosines in LEAN's training, and beta2 for rare tokens."""
    adamw, lean = windows("adamw"), windows("lean")
    for rule, measured in lean.items():
        late = 1 - measured["in_batch"][-1]
        assert late > 0.7 if " 0.9, 0.9" in rule else late < 0.095
        assert measured["in_batch"] == pytest.approx(adamw[rule]["in_batch"], abs=0.06)
    for with_momentum, without in (
        ("AdamW, 0.9, 0.95", "AdamW, 0, 0.95"),
        ("AdamW, 0.9, 0.999", "AdamW, 0, 0.999"),
        ("a = 0.75, 0.9, 0.99", "a = 0.75, 0, 0.99"),
    ):
        usual, ours, usual_rare, ours_rare = (
            [over(training[rule]["cosine"]) for rule in (with_momentum, without)]
            for over in (np.mean, lambda cosines: cosines[-1])
            for training in (adamw, lean)
        )
        assert usual[0] > usual[1]
        assert usual_rare[0] > 0.95 * usual_rare[1]
        assert ours[0] / ours[1] == pytest.approx(2 / 3, abs=0.03)
        assert ours_rare[0] / ours_rare[1] == pytest.approx(3 / 4, abs=0.045)
    for training in (adamw, lean):
        for beta1 in ("0.9", "0"):
            short, long = (training[f"AdamW, {beta1}, {b}"]["cosine"][-1] for b in (0.95, 0.999))
            assert 0.5 < short / long < 0.8


# --- settings that were written down first, the rule, and the wider model ---


def test_settings_that_were_written_down_first():
    """The n that validation chooses with seed 4, each loss and difference, and their mean."""
    *lines, last = rows("settings")[1]
    costs = {}
    for setting, *cells in lines:
        setting = setting.strip("`")
        chosen = []
        for arm, n, shown in (("adamw 0 0.999", *cells[:2]), ("lean 0 0.99", *cells[2:4])):
            start = f"{setting} {arm} n="
            tried = [name for name in results("settings") if name.startswith(start)]
            assert len(tried) == 2
            best = best_run("settings", start, seed=4)
            assert best == start + n
            losses = seeds("settings", best, "documents")
            assert sorted(losses) == [4, 5, 6]
            cell_shows(shown, [*losses.values()])
            chosen.append(("settings", best))
        paired = differences(chosen[1], chosen[0], "documents")
        costs[setting] = np.mean(paired)
        shows(cells[4], costs[setting])
        assert float(cells[5].removeprefix("< ")) == pytest.approx(
            p_of_pairs(paired), rel=0.06, abs=1e-3
        )
    average, low, high = middle_and_interval([*costs.values()])
    assert numbers(last[5]) == pytest.approx([average, low, high], abs=5.1e-4)
    p_shows(last[6], p_of_pairs([*costs.values()]))
    said("by # on average, with a 95 % interval of # to # (p = 0.04)", average, low, high)


def changes(ours, theirs, value="valid"):
    """The mean difference of two finalists with the same seeds, by setting."""
    lines = {s: {x.label: (x.question, x.name) for x in finalists(s)} for s in FINAL_SETTINGS}
    return {
        setting: np.mean(differences(named[ours], named[theirs], value))
        for setting, named in lines.items()
        if {ours, theirs} <= named.keys()
    }


FINAL_TABLES = (("finals", "documents"), ("finals_valid", "valid"))


@pytest.mark.parametrize(("table", "value"), FINAL_TABLES)
def test_the_cells_of_the_finals(table, value):
    """Each is a mean of differences from AdamW, and the last row has their means."""
    header, (*lines, last) = rows(table)
    assert [line[0] for line in lines] == [*FINAL_SETTINGS]
    for column, label in enumerate(header[2:-1], 2):
        above = changes(label, "AdamW, 0, 0.999", value)
        for setting, *cells in lines:
            if cell := cells[column - 1]:
                shows(cell, above[setting])
            assert bool(cell) == (setting in above)
        average = middle_and_interval([*above.values()])
        assert numbers(last[column]) == pytest.approx(average, abs=5.1e-4)
        assert last[column].endswith(f", {len(above)} settings")
    for setting, cell, *_ in lines:
        adamw = finalists(setting)[0]
        cell_shows(cell, [*seeds(adamw.question, adamw.name, value).values()])


def test_what_the_finals_decide():
    """By the rules that were written down first: decay, zero-sum updates, and the goal."""
    decay, decay_of_adamw = (
        changes(f"{name}, decay", baseline)
        for name, baseline in (("LEAN", "LEAN"), ("AdamW", "AdamW, 0, 0.999"))
    )
    for tried in (decay, decay_of_adamw):
        assert len(tried) == 11
        assert max(tried.values()) == tried["constant"] > 0.01  # not taken
    said("With it LEAN's is # higher on average, in eleven", np.mean([*decay.values()]))
    said("1.2M parameters, and AdamW's #.", np.mean([*decay_of_adamw.values()]))
    said(
        "both gain from it, LEAN # and # and AdamW # and #. At a constant rate, ... both lose: # "
        "and # in 600 steps",
        *(-decay[s] for s in ("1k", "512")),
        *(-decay_of_adamw[s] for s in ("1k", "512")),
        *(decay["constant"], decay_of_adamw["constant"]),
    )
    free = changes("LEAN, free", "LEAN")
    assert np.mean([*free.values()]) > -0.004  # zero-sum updates stay
    assert len(free) == 11
    said(
        "LEAN's validation loss is # higher on average ... between # lower and # higher.",
        *(np.mean([*free.values()]), -min(free.values()), max(free.values())),
    )
    # The first edition with the same seeds and rates, in the eight settings
    before = changes("LEAN", "AdamW, 0, 0.999", "documents")
    by_edition = [], []
    for setting in SETTINGS:
        first_edition, adamw = (
            seeds("settings", best_run("settings", f"{setting} {arm} n=", seed=4), "documents")
            for arm in ("lean 0 0.99", "adamw 0 0.999")
        )
        second = seeds("finals", f"{setting} lean2 0 0.99", "documents")
        for tried, losses in zip(by_edition, (first_edition, second)):
            tried.append(np.mean([losses[seed] - adamw[seed] for seed in second]))
    assert [*by_edition[1]] == pytest.approx([before[setting] for setting in SETTINGS])
    said(
        "At the earlier rates, ..., it is # higher; and there, in the eight settings alone, #, "
        "where the first edition's is # higher",
        *(np.mean([*before.values()]), *map(np.mean, by_edition[::-1])),
    )


# The optimizers of the finals, and their earlier runs where "finals" does not have them
EARLIER = {
    "adamw 0 0.999": {
        **dict.fromkeys(SETTINGS, "settings"),
        "2400 steps": ("betas", "adamw 0 0.999 n=5"),
        "9768 steps": ("betas_longer", "adamw 0 0.999 n=2"),
    },
    "lean2 0 0.99": {},
    "ember free": {
        **dict.fromkeys(SETTINGS, "ember_and_free"),
        "2400 steps": ("zero_sum", "ember free n=7"),
        "9768 steps": ("one_pass_longer", "ember free n=2"),
    },
}


def at_rates(arm, setting):
    """The runs of an arm in a setting by their factor, the earlier one first."""
    earlier = EARLIER[arm].get(setting, ("finals", f"{setting} {arm}"))
    if isinstance(earlier, str):
        earlier = earlier, best_run(earlier, f"{setting} {arm} n=", seed=4)
    beside = (("final_rates", name) for name in results("final_rates"))
    tried = [earlier, *(run for run in beside if run[1].startswith(f"{setting} {arm} x"))]
    by_factor = {}
    for question, name in tried:
        (options,) = results(question)[name]["recipe"]["arms"].values()
        by_factor[options["lr_factor"]] = question, name
    return by_factor


def at_own_rate(arm, setting):
    """The factor and the runs that the first seed's validation loss chooses."""
    tried = at_rates(arm, setting)
    if setting == "9768 steps":  # the one of five seeds
        return next(iter(tried.items()))
    first_seed = min(seeds(*next(iter(tried.values()))))
    return min(tried.items(), key=lambda entry: seeds(*entry[1], "valid")[first_seed])


def test_the_finals_at_their_own_rates():
    """LEAN, AdamW and Ember, each at the best of the same number of rates."""
    _, (*lines, last) = rows("final_rates")
    assert [line[0] for line in lines] == [*FINAL_SETTINGS]
    by_arm = {arm: {} for arm in ("lean2 0 0.99", "ember free")}
    for setting, factor, loss, *cells, number in lines:
        best, adamw = at_own_rate("adamw 0 0.999", setting)
        assert factor == f"{best:.3g}"
        cell_shows(loss, [*seeds(*adamw, "documents").values()])
        pairs = {}
        for (arm, above), (factor, cell) in zip(by_arm.items(), zip(cells[::2], cells[1::2])):
            best, runs = at_own_rate(arm, setting)
            assert factor == f"{best:.3g}"
            pairs[arm] = differences(runs, adamw, "documents")
            above[setting] = np.mean(pairs[arm])
            shows(cell, above[setting])
        assert number == ", ".join({str(len(several)): None for several in pairs.values()})
    lean, of_ember = by_arm.values()
    for cell, above in zip((last[4], last[6]), by_arm.values()):
        assert numbers(cell) == pytest.approx(middle_and_interval([*above.values()]), abs=5.1e-4)
        assert cell.endswith(f", {len(above)} settings")
    special = ("1k", "512", "constant")
    assert sum(lean[setting] for setting in special) > 0.5 * sum(lean.values())
    usual = [above for setting, above in lean.items() if setting not in special]
    said(
        "it is # higher on average (# to #), and at most #. These",
        *middle_and_interval(usual),
        max(usual),
    )
    # How far the best rate is from the earlier one, in steps of a factor of √2
    moved = {
        arm: {
            setting: round(
                2 * np.log2(at_own_rate(arm, setting)[0] / next(iter(at_rates(arm, setting))))
            )
            for setting in FINAL_SETTINGS
        }
        for arm in ("adamw 0 0.999", "lean2 0 0.99")
    }
    assert sorted(moved["lean2 0 0.99"].values()) == [-1, *[0] * 7, 1, 1, 2, 2, 2]
    assert moved["lean2 0 0.99"]["constant"] == -1
    assert moved["lean2 0 0.99"]["H=128"] == moved["lean2 0 0.99"]["V=16384"] == 2
    assert sorted(moved["adamw 0 0.999"].values()) == [*[0] * 10, 1, 1, 1]
    after_9768 = ("finals", "9768 steps lean2 0 0.99")
    assert sorted(seeds(*after_9768)) == [1, 2, 3, 4, 5]
    longest = middle_and_interval(differences(after_9768, ADAMW_LONGER, "documents"))
    assert longest[1] < 0 < longest[2]
    assert max(lean.values()) == lean["512"] > 0.02
    average, low, high = middle_and_interval([*lean.values()])
    assert average > 0.005
    said(
        "by # on average on the test documents, with a 95 % interval of # to #, and by # at most",
        *(average, low, high, lean["512"]),
    )
    said("its loss is # higher on average (# to #)", average, low, high, page=STUDY)
    said(
        "test loss is on average # above that of an equally tuned AdamW (embeddings' betas 0, "
        "0.999): # after 9,768 steps, and at most #, in",
        *(average, longest[0], lean["512"]),
        page=README,
    )
    said("After 9,768 steps it is # higher (# to #, five seeds)", *longest)
    said("neither with 0.37M parameters (#, # to #, five seeds; its", *longest, page=STUDY)
    small = results("small_batches")
    assert all(name.startswith("512 lean2 0 0.99 a=0.5 x") for name in small)
    half = min(seeds("small_batches", name, "valid")[4] for name in small)
    gain = seeds(*at_own_rate("lean2 0 0.99", "512")[1], "valid")[4] - half
    assert 0 < gain < 0.01
    said("With 512 its validation loss is # lower than that of LEAN", gain)
    ember = middle_and_interval([of_ember[setting] - lean[setting] for setting in of_ember])
    assert ember[1] < 0 < ember[2]  # not separated
    said("is # above LEAN on average in the same settings ... interval of # to #.", *ember)


def test_what_was_compared_with_lean_in_the_same_settings():
    """One moment for each row, no zero-sum updates, and Ember: minus LEAN, with seed 4."""
    *lines, last = rows("beside_lean")[1]
    compared = {
        ("row_moments", "row_moment 0 0.99"): [],
        ("ember_and_free", "lean free 0 0.99"): [],
        ("ember_and_free", "ember free"): [],
    }
    for setting, n, *cells in lines:
        lean = seeds("settings", f"{setting} lean 0 0.99 n={n}", "documents")[4]
        for ((question, name), costs), cell in zip(compared.items(), cells):
            best = best_run(question, f"{setting} {name} n=", seed=4)
            assert cell.endswith(f" ({best.rpartition('=')[2]})")
            assert name == "ember free" or best.endswith(f"n={n}")  # the n that LEAN's loss chose
            costs.append(seeds(question, best, "documents")[4] - lean)
            shows(cell.partition(" ")[0], costs[-1])
    rows_only, free, ember = compared.values()
    for cell, costs in zip(last[2:], compared.values()):
        assert len(costs) == 8
        assert numbers(cell) == pytest.approx(middle_and_interval(costs), abs=5.1e-4)
    *others, largest, most_tokens = rows_only
    said(
        "Without them the loss is # higher on average ..., with an interval of # to #. In the two "
        "largest models, ... it is # and # higher, and in the others # at most",
        *(*middle_and_interval(rows_only), largest, most_tokens, max(others)),
    )
    average, low, high = middle_and_interval(free)
    assert -0.015 < low < 0 < high < 0.015  # "level"
    assert average < 0.005  # zero-sum updates are not worth a cost
    said(
        "Without them the loss is # higher on average (# to #), ... it is between # below and # "
        "above that of LEAN",
        *(average, low, high, -min(free), max(free)),
    )
    said(
        "its loss was the same in eight settings (#, # to #, one seed",
        average,
        low,
        high,
        page=STUDY,
    )
    *others, largest, most_tokens = ember
    average, low, high = middle_and_interval(ember)
    assert low < 0 < 0.015 < high  # not decided
    said(
        "It is # higher on average ..., with an interval of # to #. In the two "
        "largest models it is # higher, and elsewhere between # below and # above",
        *(average, low, high, np.mean([largest, most_tokens]), -min(others), max(others)),
    )
    assert largest == pytest.approx(most_tokens, abs=5e-3)


def test_the_rule_on_the_runs_that_it_was_read_from():
    """Its loss between the rates that were tried, above the lowest, with the seed of most rates."""
    excesses, steps_of, parameters = [], set(), set()
    for path in (ROOT / "study/results").glob("*.json"):
        # Results of other kinds, and those of one question that is newer than the rule.
        others = ("accuracy", "movement", "muon_rates", "wider")
        if path.stem in (*others, "ember_and_free", "parts_longer"):
            continue
        groups = {}
        for name, run in json.loads(path.read_text()).items():
            rule, _, n = name.rpartition(" n=")
            if rule and not re.search("coupled|weighted|half", rule):
                group = groups.setdefault((rule, run["recipe"]["training"]["steps"]), {})
                group[int(n)] = run["seeds"]
        for (_, steps), by_n in groups.items():
            tried = [seed for runs in by_n.values() for seed in runs]
            seed = max(sorted({*tried}), key=tried.count)
            losses = {n: runs[seed]["valid_loss"] for n, runs in by_n.items() if seed in runs}
            if len(losses) > 1:
                at = 2 * np.log2(min(16, max(1, 15_000 / steps)))
                factors = sorted(losses)
                loss = np.interp(at, factors, [losses[n] for n in factors])
                excesses.append(loss - min(losses.values()))
                steps_of.add(steps)
                parameters |= {runs[seed]["parameters"] for runs in by_n.values() if seed in runs}
    said(
        "In # groups of runs of #M to #M parameters and # to 9,768 steps",
        *(len(excesses), min(parameters) / 1e6, max(parameters) / 1e6, min(steps_of)),
        page=RATE,
    )
    assert max(steps_of) == 9768
    within = sum(excess <= 0.01 for excess in excesses)
    said(
        "is # above the lowest, at most #, and within 0.01 in # of them",
        *(np.mean(excesses), max(excesses), within),
        page=RATE,
    )


def test_the_rule():
    """The table of the test that was written down first, and its means, from the names of runs."""
    *settings, of_rule, of_longer, of_10000, of_no_cap, of_50, _ = rows("rate", RATE)[1]
    excesses, longer, rivals = {"adamw": [], "lean": []}, {"adamw": [], "lean": []}, {}
    for setting, steps, factor, *cells in settings:
        question = "rate_rule_wiki" if setting == "wiki" else "rate_rule"
        for arm, best, excess in (("adamw", *cells[:2]), ("lean", *cells[2:])):
            if not best:
                continue
            names = {
                float(name.rpartition("x")[2]): (question, name)
                for name in results(question)
                if name.startswith(f"{setting} {arm} x")
            }
            losses = {multiple: seeds(*name, "valid")[7] for multiple, name in names.items()}
            recipe = results(question)[names[1][1]]["recipe"]["training"]
            rule = min(16, max(1, 15_000 / recipe["steps"]))
            assert int(steps.replace(",", "")) == recipe["steps"]
            assert float(factor) == pytest.approx(rule, rel=5e-3)
            lowest = min(losses, key=losses.get)
            assert float(best) == pytest.approx(rule * lowest, rel=5e-3)
            # The lowest is no edge, unless it is what was written down last.
            assert lowest not in (min(losses), max(losses)) or lowest in (0.25, 4)
            above = differences(names[1], names[lowest])
            assert numbers(excess)[0] == pytest.approx(np.mean(above), abs=5.1e-4)
            assert ("(3 seeds)" in excess) == (len(above) == 3 and lowest != 1)
            excesses[arm].append(np.mean(above))
            if recipe["steps"] >= 600:
                longer[arm].append(np.mean(above))
            tried = sorted(losses)
            for name, at in (
                ("10,000", min(16, max(1, 10_000 / recipe["steps"]))),
                ("15,000", max(1, 15_000 / recipe["steps"])),
                ("50", 50 / recipe["steps"] / recipe["lr"]),
            ):
                loss = np.interp(np.log(at / rule), np.log(tried), [losses[m] for m in tried])
                rivals.setdefault((name, arm), []).append(loss - losses[lowest])
    measured = {("", arm): excesses[arm] for arm in excesses}
    measured |= {("longer", arm): longer[arm] for arm in longer} | rivals
    lines = {"": of_rule, "longer": of_longer, "10,000": of_10000, "15,000": of_no_cap, "50": of_50}
    for name, (*_, adamw, _, lean) in lines.items():
        for arm, cell in (("adamw", adamw), ("lean", lean)):
            ends = [np.mean(measured[name, arm]), max(measured[name, arm])]
            assert numbers(cell) == pytest.approx(ends, abs=5e-4)


def test_what_the_page_on_the_rule_concludes():
    """It fails both tests; LEAN in 150 steps, AdamW in small batches; and where it is right."""
    *settings, _, _, _, _, _, _ = rows("rate", RATE)[1]
    adamw, lean = ({r[0]: numbers(r[i])[0] for r in settings if r[i]} for i in (4, 6))
    assert len(adamw) >= 12
    each = differences(("rate_rule", "150 steps lean x1"), ("rate_rule", "150 steps lean x2"))
    said(
        "parameters, the loss at the rule's factor is # above the one at twice of it (three seeds: "
        "#, # and #). LEAN",
        np.mean(each),
        *each,
        page=RATE,
    )
    each = differences(("rate_rule", "1k adamw x1"), ("rate_rule", "1k adamw x2"))
    assert len(each) == 3
    sentence = (
        "small batches: ... factor is # above the one at twice of it (three seeds: #, # and #)"
    )
    said(sentence, np.mean(each), *each, page=RATE)
    assert max(adamw.values()) > 0.03 < max(lean.values())  # either fails in one setting
    of_2048 = ("1200 steps", "core twice", "linear", "constant", "wiki")
    for excesses in (adamw, lean):
        assert {excesses[setting] for setting in of_2048} == {0.0}
    longer = {r[0] for r in settings if int(r[1].replace(",", "")) >= 600}
    assert longer == {*of_2048, "1k", "512"} <= adamw.keys() & lean.keys()
    rule, twice = (
        seeds("rate_rule", f"4800 steps lean x{multiple}", "valid")[7] for multiple in (1, 2)
    )
    said("steps LEAN's loss is # lower at twice of it", rule - twice, page=RATE)
    costs = [lean[setting] for setting in longer]
    said("the excess is # on average and at most #", np.mean(costs), max(costs), page=RATE)
    # Within the bounds of the test
    assert np.mean(costs) < 0.01
    assert max(costs) < 0.03


def test_what_the_rule_costs():
    """Each cell, computed again from the runs; and what three pages say of the means."""
    *settings, on_average, at_most = rows("rate_costs", RATE)[1]
    costs = np.array([[float(x or "nan") for x in row[-3:]] for row in settings])
    assert len(costs) == 24
    for summary, of in ((on_average, np.nanmean), (at_most, np.nanmax)):
        assert [float(x) for x in summary[-3:]] == pytest.approx(of(costs, axis=0), abs=1.1e-3)
    for label, _, best, rule, *_ in settings:
        steps = int(label.split()[0].replace(",", ""))
        shows(rule, min(16, max(1, 15_000 / steps)))
        assert 1 < float(best) <= 32
    by_label = {row[0]: [float(x or "nan") for x in row[-3:]] for row in settings}
    # Between two rates that were tried, and beyond them
    of_600 = seeds("settings", "1.2M lean 0 0.99 n=6", "valid")[4]
    at_16 = seeds("settings", "1.2M lean 0 0.99 n=8", "valid")[4]
    assert by_label["600 steps"][:2] == pytest.approx([0, 3 * (of_600 - at_16)], abs=6e-4)
    each = differences(("rate_rule", "150 steps lean x1"), ("rate_rule", "150 steps lean x2"))
    assert by_label["150 steps"][0] == pytest.approx(np.mean(each), abs=6e-4)
    # The rule is the best of the three on average, and by far better than the default
    rule, two, sixteen = np.nanmean(costs, axis=0)
    assert rule < sixteen < two / 5
    said("and the cap of 16 costs #.", by_label["150 steps"][0], page=RATE)
    after_9768 = by_label["9,768 steps"][2]
    said("as the rule up to 4,800 steps, and costs # after 9,768", after_9768, page=RATE)


def cost_at(by_seed, factor):
    """The loss at a factor, on a line through the two tried around it or last, minus the lowest.

    The mean over the seeds, without those whose line goes below the lowest: nothing is known then.
    """
    costs = []
    for losses in by_seed:
        tried = sorted(losses)
        first = min(max(np.searchsorted(tried, factor) - 1, 0), len(tried) - 2)
        near = tried[first : first + 2]
        line = np.polyfit(np.log(near), [losses[f] for f in near], 1)
        costs.append(np.polyval(line, np.log(factor)) - min(losses.values()))
    known = [max(cost, 0) for cost in costs if cost > -1e-9]
    return np.mean(known) if known else np.nan


def tried_factors(setting):
    """The steps of a setting, and LEAN's losses by factor for each seed with several factors."""
    if setting in FINAL_SETTINGS:
        lines = at_rates("lean2 0 0.99", setting)
    else:
        lines = {16 * m: ("fewest_steps", f"{setting} lean2 0 0.99 x{m}") for m in (1, 2, 4)}
    runs = {factor: seeds(*line, "valid") for factor, line in lines.items()}
    by_seed = [
        {factor: runs[factor][seed] for factor in runs if seed in runs[factor]}
        for seed in sorted({seed for run in runs.values() for seed in run})
    ]
    recipes = [results(question)[name]["recipe"] for question, name in lines.values()]
    (steps,) = {recipe["training"]["steps"] for recipe in recipes}
    return steps, [losses for losses in by_seed if len(losses) > 1]


def test_what_the_rule_costs_the_second_edition():
    """Each cell, computed again; and what three pages say of the means."""
    *lines, on_average, at_most = rows("rate_costs_second", RATE)[1]
    assert [line[0] for line in lines] == ["150 steps", "300 steps", *FINAL_SETTINGS]
    costs, by_rule = [], {}
    for name, number, best, rule, *cells in lines:
        steps, losses = tried_factors(name)
        assert number == str(len(losses))
        factors = (*(min(16, max(1, c / steps)) for c in (30_000, 15_000)), 2, 16)
        assert rule == f"{factors[0]:.3g}" == f"{lean_lr_factor(steps):.3g}"
        means = {f: np.mean([x[f] for x in losses if f in x]) for f in losses[0]}
        shows(best, min(means, key=means.get))
        costs.append([cost_at(losses, factor) for factor in factors])
        by_rule[name] = costs[-1][0]
        for cell, cost in zip(cells, costs[-1], strict=True):
            if np.isnan(cost):
                assert not cell
            else:
                shows(cell, cost)
    for summary, of in ((on_average, np.nanmean), (at_most, np.nanmax)):
        assert [float(x) for x in summary[-4:]] == pytest.approx(of(costs, axis=0), abs=6e-4)
    fewest = [by_rule.pop(name) for name in ("150 steps", "300 steps")]
    said("costs much**: # after 150 and # after 300", *fewest, page=RATE)
    ends = np.mean([*by_rule.values()]), max(by_rule.values())
    said("**30,000 / steps costs # on average and # at most**", *ends, page=RATE)


def test_why_the_rule_has_changed():
    """With 512 tokens a step, after 9,768 steps, and why not beside Muon."""
    predecessor = seeds("final_rates", "512 lean2 0 0.99 x0.5", "valid")
    today = seeds("finals", "512 lean2 0 0.99", "valid")
    assert sorted(today) == [4, 5, 6]
    assert min(predecessor.values()) > max(today.values()) + 0.1
    said(
        "is #, # and # with three seeds, and at today's #, # and #",
        *(predecessor[seed] for seed in (4, 5, 6)),
        *(today[seed] for seed in (4, 5, 6)),
        page=RATE,
    )
    later = seeds("formula", "512 low limit later x1", "valid")
    said("it has # at the lower factor (one seed)", *later.values(), page=RATE)
    by_factor = [seeds(*run, "valid")[1] for run in at_rates("lean2 0 0.99", "9768 steps").values()]
    slowest, middle, fastest = by_factor
    said(
        "is # lower than at 1.4, which ... have, and # lower than at 4 (one seed)",
        *(slowest - middle, fastest - middle),
        page=RATE,
    )
    beside_muon = [seeds("muon_tables", f"lean f={f}", "valid")[51] for f in (16, 4)]
    above = -np.diff(beside_muon)[0]
    assert above > 0.03
    said("next to it, the validation loss is # above its lowest", above, page=RATE)


def test_the_constants_fitted_anew():
    """To every other setting, and tested in the others."""

    def mean_cost(constants, names, without=()):
        c, cap = constants
        costs = []
        for name in names:
            steps, losses = tried_factors(name)
            kept = [{f: x[f] for f in x if (name, f"{f:.3g}") not in without} for x in losses]
            factor = min(cap, max(1, c / steps))
            costs.append(cost_at([x for x in kept if len(x) > 1], factor))
        return np.nanmean(costs)

    names = [name for name in FINAL_SETTINGS if name != "9768 steps"]
    predecessor, anew = (15_000, 16), fitted_anew()
    grid = [
        *itertools.product(15_000 * np.sqrt([0.25, 0.5, 1, 2, 4]), 16 * np.sqrt([0.5, 1, 2, 4]))
    ]
    assert anew == pytest.approx((30_000, 16))
    # With and without the runs that replaced what had been continued beyond the others
    added = {("512", "3.12"), ("1k", "6.25"), ("untied", "16"), ("rotary", "16")}
    added |= {("2400 steps", "11.3")}
    for without in ((), added):
        best = min(grid, key=lambda constants: mean_cost(constants, names[::2], without))
        assert best == pytest.approx(anew)
        before, after = (mean_cost(x, names[1::2], without) for x in (predecessor, anew))
        assert after < before - 0.005
    before, after = (mean_cost(x, names[1::2]) for x in (predecessor, anew))
    said("it costs # on average, and its predecessor #.", after, before, page=RATE)
    for constants in (predecessor, anew):
        others = [name for name in names[1::2] if name != "512"]
        said("without them both cost #.", mean_cost(constants, others), page=RATE)
    said(
        "finals it costs # on average, and √2 times as much would cost #.",
        mean_cost(anew, FINAL_SETTINGS),
        mean_cost((30_000 * 2**0.5, 16), FINAL_SETTINGS),
        page=RATE,
    )


def test_the_second_edition():
    """The geometric mean does not cost a loss: it lowers it, with every seed."""
    for measure in ("documents", "valid"):
        higher = differences(("geometric", "lean2 0 0.99"), ("geometric", "first 0 0.99"), measure)
        assert len(higher) == 5
        assert max(higher) < 0
    higher = differences(("geometric", "lean2 0 0.99"), ("geometric", "first 0 0.99"), "documents")
    said("is lower, by # on average; it was written", -np.mean(higher), page=STUDY)


def test_the_first_page():
    """The two lines of the README: each cell, and that nothing has been left out."""
    _, lines = rows("first_page", STUDY)

    def changes(steps, beta2, before, after="line"):
        """How the loss changes with the line."""
        names = (f"{steps} steps {line} 0.9 {beta2}" for line in (after, before))
        return differences(*(("first_page", name) for name in names), "documents")

    shown = []
    for steps, betas, before, after, difference, interval, number in lines:
        steps, beta2 = steps.replace(",", ""), betas.partition(", ")[2]
        names = [f"{steps} steps {line} 0.9 {beta2}" for line in ("adamw", "line")]
        for cell, name in zip((before, after), names, strict=True):
            cell_shows(cell, [*seeds("first_page", name, "documents").values()])
        pairs = changes(steps, beta2, "adamw")
        assert len(pairs) == int(number) == (5 if int(steps) < 9768 else 3)
        middle, low, high = middle_and_interval(pairs)
        assert middle < 0  # as the README says: the line lowers the loss
        shows(difference, middle)
        for text, value in zip(interval.split(" to "), (low, high), strict=True):
            shows(text, value)
        shown += names
    earlier = [name for name in results("first_page") if "line 15000" in name]
    assert sorted(shown + earlier) == sorted(results("first_page"))
    # Without one seed, with which torch's betas do badly in few steps
    before = {
        n: seeds("first_page", f"{n} steps adamw 0.9 0.999", "documents") for n in (600, 2400)
    }
    assert {max(losses, key=losses.get) for losses in before.values()} == {25}
    without = [np.mean(changes(steps, 0.999, "adamw")[:4]) for steps in before]
    said("are # after 600 and # after 2,400 steps", *without, page=STUDY)
    left = [-np.mean(changes(9768, beta2, "adamw")) for beta2 in (0.999, 0.95)]
    said("the line's loss is # lower at torch's betas, 0.9, 0.999, and # lower", *left, page=STUDY)
    # Against the line with the predecessor of the rule for the rate
    by_rule = [
        np.mean(changes(steps, beta2, "line 15000"))
        for steps in (2400, 9768)
        for beta2 in (0.999, 0.95)
    ]
    said(
        "on test documents by # and # after 2,400 steps, ... and lowered it by # and # after 9,768",
        *(by_rule[0], by_rule[1], -by_rule[2], -by_rule[3]),
        page=STUDY,
    )
    # A rate of their own for the embeddings is what most of it is, after 600 steps.
    usual, own = (
        mean(question, name)
        for question, name in (("learning_rate", "lr=0.005 adamw"), ("between", "adamw n=9"))
    )
    first_three = [seeds("between", "adamw n=9", "valid")[seed] for seed in (1, 2, 3)]
    assert own == pytest.approx(np.mean(first_three), abs=0.005)
    lower = usual - np.mean(first_three)
    said(
        "23 times as high, AdamW at 0.9, 0.95 has a validation loss that is # lower",
        lower,
        page=STUDY,
    )
    assert pytest.approx(23, abs=0.5) == 2 ** (9 / 2)


def test_hashed_bigrams():
    """Each optimizer of the table at the rate that validation chose with the first seed."""
    _, lines = rows("hashed_bigrams", TABLES)
    shown, losses = set(), {}
    for line, arm in zip(lines, tables.HASHED_BIGRAMS.values(), strict=True):
        for steps, (rate, cell, number) in ((600, line[2:5]), (2400, line[5:8])):
            start = f"{steps} steps {arm}"
            tried = [
                n for n in results("hashed_bigrams") if n == start or n.startswith(f"{start} ")
            ]
            shown |= {*tried}
            if not tried:
                assert not cell
                continue
            valid, test = (
                {
                    name: [run["documents"][split]["loss"] for run in by_seed.values()]
                    for name in tried
                    if (by_seed := seeds("hashed_bigrams", name))
                }
                for split in ("valid", "test")
            )
            best = min(tried, key=lambda name: valid[name][0])
            assert next(iter(seeds("hashed_bigrams", best))) == 31
            cell_shows(cell, test[best])
            assert len(test[best]) == int(number)
            losses[arm, steps] = test[best]
            if arm == "no table":
                continue
            rates = sorted(float(name.removeprefix(f"{start} ")) for name in tried)
            assert best == f"{start} {rate.strip(chr(92) + '*')}"
            assert rate.endswith("*") == (float(best.split()[-1]) in (rates[0], rates[-1]))
            of_states = {run["state_bytes"] for run in seeds("hashed_bigrams", best).values()}
            assert line[1] == f"{of_states.pop() / 1e6:,.0f}"
    split = "600 steps split lean 0.04"
    assert shown | {split} == {*results("hashed_bigrams")}

    # What is said below the table: how much higher the others' losses are than LEAN's
    def higher(arms, lean):
        above = [
            differences(("hashed_bigrams", name), ("hashed_bigrams", lean), "documents")
            for name in (lean.rpartition("lean")[0] + arm for arm in arms)
        ]
        assert all(len(pairs) == 3 and min(pairs) > 0 for pairs in above)
        assert [*map(np.mean, above)] == sorted(map(np.mean, above)), "in the order of the page"
        return [np.mean(pairs) for pairs in above]

    short, long = "600 steps lean 0.04", "2400 steps lean 0.02"
    (worth,), (worth_later,) = higher(["no table"], short), higher(["no table"], long)
    said(
        "lowers the loss by # after 600 steps, and by # after 2,400",
        *(worth, worth_later),
        page=TABLES,
    )
    arms = ("sgd 1280", "adamw 0 0.999 0.02", "sparse adam 0 0.999 0.02")
    adagrads = ("row-wise adagrad 0.32", "adagrad 0.32")
    above = higher([*arms, *adagrads, "sparse adam 0.9 0.999 0.08"], short)
    said(
        "After 600 steps that of SGD is # higher, that of AdamW with dense gradients #, that of "
        "SparseAdam with the best betas #, that of row-wise Adagrad #, that of Adagrad #, and that "
        "of SparseAdam as it comes #.",
        *above,
        page=TABLES,
    )
    said(
        "After 2,400 steps that of SGD is # higher, that of AdamW #, that of SparseAdam #, that of "
        "row-wise Adagrad #, and that of Adagrad #;",
        *higher([*arms, *adagrads], long),
        page=TABLES,
    )
    changes = differences(("hashed_bigrams", split), ("hashed_bigrams", short), "documents")
    said("after 600 steps by less than # (0.37M parameters, three", 0.001, page=TABLES)
    assert max(map(abs, changes)) < 0.001
    assert len(changes) == 3
    costs = [
        next(iter(seeds("hashed_bigrams", f"600 steps lean {rate}").values()))["documents"]
        for rate in (0.08, 0.04)
    ]
    cost = costs[0]["valid"]["loss"] - costs[1]["valid"]["loss"]
    said("factor of 2 after 600 steps, where it costs # of validation loss", cost, page=TABLES)
    assert pytest.approx(2 * 0.04) == 16 * 5e-3  # by the rule, relative to the core's 5e-3
    said("and of # after 2,400", 30_000 / 2400 * 5e-3 / 0.02, page=TABLES)


def test_tables_beside_muon():
    """Each cell; the rate is that with the lowest validation loss of the first seed."""
    _, lines = rows("muon_tables", COMPARISONS)
    *by_rate, documents, drift, numbers_of_seeds = lines
    first = {
        name: next(iter(seeds("muon_tables", name, "valid").values()))
        for name in results("muon_tables")
    }
    with_runs = {name.rpartition(" f=")[0] for name in first}
    arms = [arm for arm in tables.BESIDE_MUON.values() if arm in with_runs]
    chosen = {}
    for column, arm in enumerate(arms, 1):
        tried = {name: loss for name, loss in first.items() if name.startswith(f"{arm} f=")}
        best = chosen[arm] = min(tried, key=tried.get)
        for line in by_rate:
            name = f"{arm} f={line[0].rpartition(' ')[2]}"
            assert bool(line[column]) == (name in tried)
            if line[column]:
                shows(line[column].strip("*"), tried[name])
                assert line[column].startswith("**") == (name == best)
        cell_shows(documents[column], [*seeds("muon_tables", best, "documents").values()])
        assert int(numbers_of_seeds[column]) == len(seeds("muon_tables", best))
    lean, adamw, usual = (("muon_tables", chosen[arm]) for arm in arms[:3])
    assert chosen["lean"] == "lean f=4"
    assert float(drift[1].partition(" ")[0]) < 0.001 < float(drift[2].partition(" ")[0])
    pairs = differences(lean, adamw, "documents")
    assert len(pairs) > 1
    said("LEAN's loss on test documents minus that of AdamW at 0, 0.999 is #", np.mean(pairs))
    said("AdamW at 0.8, 0.95 is # above", *differences(usual, lean, "documents"))
    # By what was written down, the rule is offered.
    next_to_the_rule = min((2, 4, 8), key=lambda f: abs(np.log(f / (15_000 / 2400))))
    above = first[f"lean f={next_to_the_rule}"] - first["lean f=4"]
    assert above <= 0.03
    said("(f = #), LEAN's validation loss is # above its lowest", next_to_the_rule, above)


def test_the_screening():
    """Each cell is a difference of two runs, in the four settings of the header."""
    header, lines = rows("screening")
    assert header[1:] == ["1.2M", "1k", "2400 steps", "64k", "on average"]
    names = {
        "AdamW, 0, 0.999": "adamw 0 0.999",
        "a = 0.5": "lean2 0 0.999 a=0.5",
        "embeddings decay by 0.02": "lean2 0 0.999 decay=0.02",
        "β₂ = 0.99": "lean2 0 0.99",
        "columns weighted by the rows": "weighted 0 0.999",
    }
    cells = {row[0]: row[1:] for row in lines}
    for label, name in names.items():
        above = [
            seeds("screening", f"{setting} {name}", "valid")[11]
            - seeds("screening", f"{setting} lean2 0 0.999", "valid")[11]
            for setting, cell in zip(header[1:], cells[label][:4], strict=False)
            if cell
        ]
        shown = [cell for cell in cells[label][:4] if cell]
        assert len(shown) >= 3
        for cell, value in zip([*shown, cells[label][4]], [*above, np.mean(above)], strict=True):
            shows(cell, value)
    # What is said below the table
    assert max(float(cell) for cell in cells["embeddings decay by 0.02"][:4]) < 0
    assert float(cells["embeddings decay by 0.02"][4]) < -0.004
    with_decay, without = (
        float(cells[f"AdamW, 0, 0.999{name}"][4]) for name in (", embeddings decay by 0.02", "")
    )
    assert with_decay < without - 0.004
    said(
        "which lowered its loss by # each on average",
        -float(cells["embeddings decay by 0.02"][4]),
        page=STUDY,
    )
    free = [float(cell) for cell in cells["updates need not sum to zero"]]
    assert free[4] == float(cells["embeddings decay by 0.02"][4])
    assert sum(cell < 0 for cell in free[:4]) == 3
    said(
        "differs from 0.999 in two only, in which it is lower by # and #.",
        *(-float(cells["β₂ by the tokens of a step"][column]) for column in (1, 3)),
        page="study/tables.md",
    )
    base, *slower = (
        seeds("screening", f"64k lean2 0 0.999{name}", "valid")[11]
        for name in ("", " a=0.5 x0.5", " a=0.5 x0.25")
    )
    said(
        "the exponent of 0.5 is still # and # worse there",
        *(loss - base for loss in slower),
        page="study/tables.md",
    )
    for label, much in (("a = 0.5", 1), ("columns weighted by the rows", 0.3)):
        costs = [float(cell) for cell in cells[label][:4]]
        assert max(costs[:3]) < 0
        assert costs[3] > much
    assert float(cells["β₂ = 0.99"][4]) < 0


def test_wider():
    """Each cell of the wider model's table, its differences, and what other pages take from it."""
    for label, *losses, n, test, norm, number in rows("wider", WIDER)[1]:
        arm, chooser = tables.WIDER[label]
        valid = {n: seeds("wider", f"{arm} n={n}", "valid")[int(chooser)] for n in (0, 2, 4)}
        for cell, loss in zip(losses, valid.values(), strict=True):
            shows(cell, loss)
        assert int(n) == min(valid, key=valid.get)
        tests, means = (
            [x for seed, x in seeds("wider", f"{arm} n={n}", measure).items() if seed > 5]
            for measure in ("test", "mean")
        )
        assert int(number) == len(tests)
        cell_shows(test, tests)
        cell_shows(norm, means)
    lean, adamw, usual = "lean", "adamw 0 0.999", "adamw 0.9 0.95"
    higher = []
    for arm in (lean, adamw):
        valid = {n: first("wider", f"{arm} n={n}") for n in (0, 2, 4)}
        assert min(valid, key=valid.get) == 2
        higher.append(valid[0] - valid[2])
    said("At 1, LEAN is # higher, and AdamW #", *higher, page=WIDER)
    ours, theirs = (seeds("wider", f"{arm} n=2", "test") for arm in (lean, adamw))
    paired = {seed: ours[seed] - theirs[seed] for seed in ours if seed > 1}
    runs = (
        [x for seed, x in paired.items() if seed < 6],
        [x for seed, x in paired.items() if seed > 5],
    )
    for (_, each, middle, interval), pairs in zip(
        rows("wider_pairs", WIDER)[1], (*runs, [*paired.values()]), strict=True
    ):
        average, low, high = middle_and_interval(pairs)
        assert low < 0  # not "broken"
        assert numbers(each) == (pytest.approx(pairs, abs=6e-4) if each else [])
        shows(middle, average)
        assert numbers(interval) == pytest.approx([low, high], abs=6e-4)
    is_made = [middle_and_interval(pairs)[2] < 0.010 for pairs in runs]
    assert is_made == [False, True]  # as the page says
    for page in (STUDY, WIDER):
        said("-#, 95 % interval -# to +#, fourteen", -average, -low, high, page=page)
    said("at most # lower or # higher", -low, high, page=WIDER)
    said("run alone has p = #", p_of_pairs(runs[1]), page=WIDER)
    best = {arm: seeds("wider", f"{arm} n={n}", "test")[6] for arm, n in ((usual, 4), ("ember", 0))}
    said("0.95** is # above LEAN", best[usual] - ours[6], page=WIDER)
    said(
        "# above LEAN and # above AdamW",
        best["ember"] - ours[6],
        best["ember"] - theirs[6],
        page=WIDER,
    )


# --- what the pages say ---

ADAMW = ("betas", "adamw 0 0.999 n=5")
LEAN = ("one_pass", "plain delayed n=4")
ADAMW_LONGER = ("betas_longer", "adamw 0 0.999 n=2")
LEAN_LONGER = ("one_pass_longer", "plain delayed n=1")


def test_another_eps():
    """No loss on the test documents is far from the first seed's at 1e-8."""
    changes = [
        abs(first("betas_eps", name, "documents") - first("betas", usual, "documents"))
        for name, usual in ((name, name.partition(" ")[2]) for name in results("betas_eps"))
    ]
    assert len(changes) == 4
    said("change the loss on the test documents by # at most", max(changes))


def test_what_the_page_says_of_one_pass():
    gains = [
        first("one_pass", f"plain delayed n={n}", "documents")
        - first("one_pass", f"weighted delayed n={n}", "documents")
        for n in (3, 4, 5)
    ]
    said("gains # to # on the test documents after [2,400", min(gains), max(gains))
    plain, half, weighted = (
        first("one_pass_64k", best_run("one_pass_64k", rule), "documents")
        for rule in ("plain", "half", "weighted")
    )
    said("and loses # in [75", weighted - plain)
    assert half > plain
    higher = differences(LEAN_LONGER, ADAMW_LONGER)
    assert len(higher) == 5
    said("On validation LEAN is # higher (p = #, paired)", np.mean(higher), p_of_pairs(higher))
    _, low, high = middle_and_interval(differences(LEAN_LONGER, ADAMW_LONGER, "documents"))
    middle, half_width = (low + high) / 2, (high - low) / 2
    said("the difference is #, with a 95 % interval of ± #.", middle, half_width)
    said("had # ± #)", middle, half_width, page=STUDY)
    slower = ("betas_longer", "adamw 0 0.999 n=1")
    assert mean(*ADAMW_LONGER) < mean(*slower)
    at_rates = [
        first("betas_longer", f"adamw {betas} n={n}")
        for betas in ("0 0.99", "0.9 0.999")
        for n in (0, 1, 2)
    ]
    said("2 is #, # and # at 0, 0.99, and #, # and # at 0.9, 0.999 (0.37M", *at_rates)
    slow, fast = (first("betas_longer", f"adamw 0.9 0.999 n={n}", "documents") for n in (1, 2))
    with_momentum, without = (
        [*seeds("betas_longer", name, "documents").values()]
        for name in ("adamw 0.9 0.999 n=1", "adamw 0 0.999 n=2")
    )
    gain = np.mean(with_momentum) - np.mean(without)
    said(
        "without momentum the loss is # lower still, which may be chance (p = #)",
        *(gain, stats.ttest_ind(with_momentum, without).pvalue),
    )
    said("# lower than at n = 1, which is a third of those #", slow - fast, gain)
    assert (slow - fast) / gain == pytest.approx(1 / 3, abs=0.05)
    higher = differences(LEAN, ADAMW, "documents")
    said(
        "after 2,400 steps by # on the test documents (n = 4 and 5, the same three seeds, p = #,",
        *(np.mean(higher), p_of_pairs(higher)),
    )


def test_ember():
    """On the test documents: between AdamW and LEAN after 2,400 steps, and level after 9,768."""
    ember, longer = ("zero_sum", "ember free n=7"), ("one_pass_longer", "ember free n=2")
    above, below = differences(ember, ADAMW, "documents"), differences(LEAN, ember, "documents")
    assert len(above) == len(below) == 3
    said(
        "is # above AdamW's (p = #) and # below LEAN's (p = #; three seeds each, paired)",
        *(np.mean(above), p_of_pairs(above), np.mean(below), p_of_pairs(below)),
    )
    for name in (ADAMW_LONGER, LEAN_LONGER):
        pairs = differences(longer, name, "documents")
        assert len(pairs) == 5
        assert p_of_pairs(pairs) > 0.3


def test_other_models_at_the_usual_betas():
    """How much higher AdamW's loss is on the test documents, with one seed."""
    costs = []
    for question in ("betas_untied", "betas_rotary", "betas_H=32", "betas_H=128"):
        losses = []
        for betas in ("0.9 0.95", "0 0.999"):
            tried = [name for name in results(question) if name.startswith(f"adamw {betas} ")]
            assert len(tried) in ((2, 3) if question in ("betas_untied", "betas_rotary") else (1,))
            name = best_run(question, f"adamw {betas} ")
            losses.append(first(question, name, "documents"))
        costs.append(losses[0] - losses[1])
    said("the test documents is # to # higher at 0.9, 0.95 (one seed)", min(costs), max(costs))


def test_untuned_rates_and_schedules():
    """At the usual betas: Coupled Adam and AdamW at their best n, and another schedule."""
    ours, theirs = (
        [*seeds("between", name, "test").values()] for name in ("coupled n=6", "adamw n=9")
    )
    assert len(ours) == len(theirs) == 5
    said(
        "best n AdamW is ahead by # (p = #, five seeds)",
        *(np.mean(ours) - np.mean(theirs), stats.ttest_ind(ours, theirs).pvalue),
    )
    gains = []
    for arm in ("coupled", "adamw"):
        cosine, stable = (
            [*seeds(question, name, "test").values()]
            for question, name in (
                ("learning_rate", f"lr=0.005 {arm}"),
                ("schedules", f"wsd {arm}"),
            )
        )
        gains += [np.mean(cosine) - np.mean(stable), stats.ttest_ind(cosine, stable).pvalue]
    said("Coupled Adam's by # (p = #), and AdamW's by # (p = #;", *gains)
    for lr, ns in (("0.0025", (9, 7, 7)), ("0.01", (9, 7, 5))):
        for arm, n in zip(("adamw", "a=0.5", "coupled"), ns, strict=True):
            tried = [name for name in results("between_rates") if f"lr={lr} {arm} " in name]
            assert len(tried) == 2
            assert min(tried, key=lambda name: mean("between_rates", name)).endswith(f"n={n}")


def test_what_the_page_says_of_zero_sum():
    centered = ("peers", "centered adamw 0 0.999 n=5")
    adamw, lean, ember = (
        differences(*names, "documents")
        for names in (
            (centered, ADAMW),
            (LEAN, ("zero_sum", "plain delayed free n=4")),
            (("zero_sum", "ember zero sum n=5"), ("zero_sum", "ember free n=5")),
        )
    )
    assert [len(adamw), len(lean), len(ember)] == [3, 3, 1]
    said(
        "loss on the test documents by # (p = #), LEAN's by # (n = 4, p = #; three seeds each, "
        "paired) and Ember's by # (n = 5, one seed;",
        *(np.mean(adamw), p_of_pairs(adamw), np.mean(lean), p_of_pairs(lean), ember[0]),
    )
    others = (p_of_pairs(differences(centered, ADAMW, measure)) for measure in ("valid", "test"))
    said("AdamW's p are smaller, # and #.", *others)
    free = first("parts_longer", "plain delayed free n=1", "documents")
    said("after 9,768 steps # higher (n = 1", free - first(*LEAN_LONGER, "documents"))
    # Untied and with one seed: a cost for Ember, and none for AdamW and LEAN.
    untied = functools.partial(first, "zero_sum_untied", value="documents")
    cost = untied("ember zero sum n=4") - untied("ember free n=4")
    said("Ember's was # higher (n = 4, one", cost)
    assert untied("adam zero sum n=4") < first("betas_untied", "adamw 0 0.999 n=4", "documents")
    assert untied("plain delayed n=4") < untied("plain delayed free n=4")


def test_the_best_rate_by_width():
    """The vertices of parabolas through three losses; the highest n is the best at H = 128."""
    vertices = []
    for width in (32, 64):
        losses = [first("width", f"H={width} lean 0 0.99 n={n}") for n in (4, 6, 8)]
        a, b, _ = np.polyfit((4, 6, 8), losses, 2)
        vertices.append(-b / (2 * a))
    said("lowest at n = # for H = 32 and at # for H = 64", *vertices)
    widest = [name for name in results("width") if "H=128" in name]
    assert min(widest, key=lambda name: first("width", name)).endswith("n=8")


def test_64k_tokens_in_a_step():
    """What the page says of one seed at the better of the rates that were tried."""
    losses = [
        first(question, best_run(question, f"{rule} n="), "documents")
        for question in ("batch_64k", "batch_64k_steps")
        for rule in ("adamw 0.9 0.999", "adamw 0 0.999")
    ]
    said(
        "In 75 steps of 64k tokens (n = 9, ...) AdamW has # on the test documents with momentum "
        "and # without (# [without at n = 8]...), and after 300 such steps # and #",
        *losses[:2],
        mean("settings", "64k adamw 0 0.999 n=8", "documents"),
        *losses[2:],
    )


def test_what_the_page_says_of_peers():
    """The losses on the test documents, and how far what has no second moment is above LEAN."""
    names = [
        *(ADAMW, ("zero_sum", "ember free n=7"), ("zero_sum", "plain delayed free n=4")),
        *(("table_rules", "adafactor free n=7"), LEAN, ("peers", "row_moment 0 0.99 n=5")),
        ("peers", "centered adamw 0 0.999 n=5"),
    ]
    assert {len(seeds(*name)) for name in names} == {3}
    said(
        "AdamW at 0, 0.999 has #, Ember #, LEAN without zero-sum updates #, Adafactor #, LEAN #, "
        "and one moment for each row #. AdamW itself with zero-sum updates has #. After 9,768 "
        "steps Adafactor (n = 3) has # and AdamW (n = 2) # with the first seed",
        *(mean(*name, "documents") for name in names),
        first("one_pass_longer", "adafactor free n=3", "documents"),
        first(*ADAMW_LONGER, "documents"),
    )
    deepseek = first("table_rules", best_run("table_rules", "balanced free"), "documents")
    above = deepseek - first(*ADAMW, "documents")
    said("rule** is # above AdamW on the test documents", above)
    without = [n for n in results("peers") if not n.startswith(("centered", "row_moment"))]
    above = min(first("peers", name, "documents") for name in without)
    said("is # or more above LEAN on the test documents", above - first(*LEAN, "documents"))


TEN_SETTINGS = (
    ("betas", "a=0.75 0 0.99 n=4", "adamw 0 0.999 n=5"),
    ("betas_longer", "a=0.75 0 0.99 n=2", "adamw 0 0.999 n=2"),
    ("batch_16k", "a=0.75 0 0.99 n=7", "adamw 0 0.999 n=7"),
    ("batch_64k_steps", "a=0.75 0 0.99 n=7", "adamw 0 0.999 n=7"),
    ("betas_untied", "a=0.75 0 0.99 n=4", "adamw 0 0.999 n=4"),
    ("betas_rotary", "a=0.75 0 0.99 n=6", "adamw 0 0.999 n=6"),
    ("betas_H=32", "a=0.75 0 0.99 n=2", "adamw 0 0.999 n=2"),
    ("betas_H=128", "a=0.75 0 0.99 n=2", "adamw 0 0.999 n=2"),
    ("betas_V=16384", "a=0.75 0 0.99 n=2", "adamw 0 0.999 n=2"),
    ("batch_64k", "a=0.75 0 0.99 n=9", "adamw 0 0.999 n=9"),
)


def test_the_mean_over_settings():
    """Of the differences between the runs with the same seeds, on the test documents."""
    costs = [
        np.mean(differences((question, lean), (question, adamw), "documents"))
        for question, lean, adamw in TEN_SETTINGS
    ]
    said(
        "On average it is # above AdamW at 0, 0.999, with a 95 % interval of # to # (p = #); "
        "without 75 steps of 64k tokens it is # (# to #)",
        *(*middle_and_interval(costs), p_of_pairs(costs), *middle_and_interval(costs[:-1])),
    )


def test_48_million_tokens():
    names = [("betas_48M", name) for name in ("a=0.75 0 0.99 n=2", "adamw 0 0.999 n=2")]
    said(
        "After 23,436 steps (one seed, n = 2) a = 0.75 had # there, and AdamW #",
        *(first(*name, "documents") for name in names),
    )


def test_new_tokens():
    """What docs/practice.md says of few steps, and of finetuning, tied and untied."""
    path = ROOT / "benchmarks/results/new_tokens.json"
    by_rate = {}  # losses by setting and rate
    for run in json.loads(path.read_text())["results"]:
        if run["question"] != "size" and run["optimizer"]:
            setting = (run.get("tied"), run.get("frozen"), run["optimizer"])
            losses = by_rate.setdefault(setting, {}).setdefault(run["factor"], [])
            losses.append(run.get("test", run["valid"])["loss"])
    assert all(len(rates) >= 4 for rates in by_rate.values())
    # The best rate on validation is the one that has all seeds.
    for frozen, sentence in (
        (False, 'Train all rows with `LEAN | {"lr_factor": #}`'),
        (True, "use # where a hook freezes the old rows"),
    ):
        for tied in (True, False):
            rates = by_rate[tied, frozen, "LEAN"]
            said(sentence, max(rates, key=lambda rate: len(rates[rate])), page=PRACTICE)
    loss = {
        setting: np.mean([losses for losses in rates.values() if len(losses) == 3])
        for setting, rates in by_rate.items()
    }
    adamw, tuned, momentum = "AdamW", "AdamW, betas 0, 0.999", "LEAN, betas 0.9, 0.999"
    for tied in (True, False):
        lean = loss[tied, False, "LEAN"]
        said(
            "**With all rows trained**... LEAN's test loss was # below that of AdamW with the "
            "usual betas, and # and # below that of AdamW with betas 0, 0.999. Momentum raised it "
            "by #.",
            loss[tied, False, adamw] - lean,
            *(loss[kind, False, tuned] - loss[kind, False, "LEAN"] for kind in (True, False)),
            loss[tied, False, momentum] - lean,
            page=PRACTICE,
        )
        frozen = [value for (t, masked, _), value in loss.items() if (t, masked) == (tied, True)]
        assert max(frozen) - min(frozen) < 0.02
    said("**With the old rows frozen**, all were within # (80 steps", 0.02, page=PRACTICE)
    scratch = {rule: value for (tied, _, rule), value in loss.items() if tied is None}
    usual = scratch["AdamW, betas 0.9, 0.999"]
    assert scratch[momentum] < usual < scratch["LEAN"]  # so momentum helps in few steps


def test_the_mean_norm_at_the_end_of_each_run():
    """What docs/practice.md says of the mean norm ratio: over all runs of the study."""
    patterns = {
        "AdamW": r"(?<!centered )\badamw\b",
        "Coupled Adam": r"\bcoupled\b(?! input)",
        "with `zero_sum`": r"\blean\b(?! free)|\ba=(?!.*free)",
    }
    ends = {name: [] for name in patterns}
    for path in (ROOT / "study/results").glob("*.json"):
        if path.stem not in ("accuracy", "movement", "muon_rates"):
            for run, name in itertools.product(results(path.stem), patterns):
                if re.search(patterns[name], run):
                    kept = seeds(path.stem, run).values()
                    ends[name] += [r["mean_norm_ratio"] for r in kept if "mean_norm_ratio" in r]
    assert min(map(len, ends.values())) > 150
    for name in ("AdamW", "Coupled Adam"):
        said(f"| {name} | # to # |", min(ends[name]), max(ends[name]), page=PRACTICE)
    said("| with `zero_sum`, ... below # here |", max(ends["with `zero_sum`"]), page=PRACTICE)


def test_how_much_was_run():
    """On one core: all but the wider model's."""
    runs = [
        run
        for path in (ROOT / "study/results").glob("*.json")
        for of_name in results(path.stem).values()
        for run in of_name.get("seeds", {}).values()
        if not run["environment"].get("gpus")
    ]
    hours = sum(run.get("seconds", 0) for run in runs) / 3600
    numbers_of_runs = r"the about ([\d,]+) runs of these pages took (\d+) hours of one core"
    said_runs, said_hours = re.search(numbers_of_runs, words(STUDY)).groups()
    assert int(said_runs.replace(",", "")) == pytest.approx(len(runs), rel=0.05)
    assert int(said_hours) == pytest.approx(hours, rel=0.03)


def test_what_the_paper_argues():
    theory = json.loads((ROOT / "benchmarks/results/theory.json").read_text())
    head = theory["sums"]["output"]["updates"]
    said("AdamW's have #, in the direction", head["AdamW"], page=PAPER)
    assert max(head["SGD"], head["Coupled Adam"]) < 1e-7


def test_accuracy():
    """What docs/paper.md says of the downstream tasks."""
    for name in ("betas: adamw 0 0.99 n=5-seed-1", "betas: a=0.75 0 0.999 n=4-seed-1"):
        measured = results("accuracy")[name]
        assert len(measured["tasks"]) == 7
        said("[# ± #]", measured["accuracy"], measured["stderr"], page=PAPER)


OF_LOSSES = ("optimizers", "rate", "wider")
LOSS = re.compile(r"\bloss(?!-)")
NUMBER = re.compile(r"(?<![\d.,=] )(?<![\w.,])[-+]?\d\.\d{2,3}(?![\d.]|,\d| %|M)")


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/practice.md", *(f"docs/study/{p}.md" for p in ("README", *OF_LOSSES))],
)
def test_a_loss_names_its_model_and_steps(page):
    """Each paragraph and each item of a list in which a loss is a number says of what it is."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^## What was written down.*?(?=^## )|^```.*?^```", "", text, flags=re.M | re.S)
    nameless = [
        block
        for block in re.split(r"\n\n|\n(?=- |\d+\. )", text)
        if not re.match(r"[|#<]", block)
        and LOSS.search(block)
        and NUMBER.search(block)
        and not (re.search(r"\bsteps\b", block) and re.search(r"\d(M|\sparameters)\b", block))
    ]
    assert not nameless


def test_what_a_reader_gains():
    """The memory of models that people train."""
    sizes = json.loads((ROOT / "benchmarks/results/memory_table.json").read_text())
    assert memory_table.markdown(sizes) in (ROOT / README).read_text()
    assert memory_table.markdown_beside(sizes) in (ROOT / "docs/beside.md").read_text()
    said("Gemma 4 has #B parameters", sizes["Gemma 4"]["parameters"] / 1e9, page=README)
    # What the script says of a model, by its formulas: all that is not embeddings, twice
    model = memory_table.build(memory_table.MODELS["GPT-2 124M"])
    assert memory_table.state_bytes(model) == sizes["GPT-2 124M"]
    table = model.get_input_embeddings().weight
    rest = sum(p.numel() for p in model.parameters()) - table.numel()
    assert sizes["GPT-2 124M"]["LEAN"] == 8 * rest + 4 * (50257 + 2 * 768)


def test_coupled_adam_at_one_rate():
    """What docs/practice.md says: its loss is lower than AdamW's; with both tuned it is not."""
    for question, name in (
        ("learning_rate", "lr=0.005"),
        *(("scale", f"N=0.4M steps={n}") for n in (1200, 2400)),
    ):
        assert mean(question, f"{name} coupled", "test") < mean(question, f"{name} adamw", "test")
    assert mean("between", "coupled n=6") > mean("between", "adamw n=9")
    assert mean("scaled_longer", "coupled n=5") > mean("scaled_longer", "adamw n=5")


def test_how_late_momentum_moves_rare_tokens():
    """The share of the movement without the token, of all rules with momentum."""
    shares = [1 - float(row[1]) for row in rows("movement", MOMENTUM)[1] if ", 0.9, " in row[0]]
    said(
        "most of the movement, # to # %, comes in steps",
        100 * min(shares),
        100 * max(shares),
        page=MOMENTUM,
    )


def test_the_rate_of_the_recommended_lean():
    """That in the table, and by the rule."""
    (lean,) = (row.line for row in tables.RECOMMENDED if row.line.label == "LEAN")
    (arm,) = results(lean.question)[lean.name]["recipe"]["arms"].values()
    assert arm["lr_factor"] == 2**0.5
    said(
        "`LEAN`'s is # times the core's, where `steps=` would choose #",
        arm["lr_factor"],
        30_000 / 9768,
        page=STUDY,
    )
