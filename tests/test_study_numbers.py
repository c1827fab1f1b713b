"""The numbers of the study in sentences, recomputed from its results.

Tables are made by the generator, and are not computed here a second time but for one. After new
results ``python -m study.tables`` writes the tables, and ``pytest -n 0 --fill`` of this file the
numbers of the sentences; what fails then is an order, or a number of seeds, that no longer holds.
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
from study import finals
from study.questions import FINAL_SETTINGS, HELD_OUT_SETTINGS, SETTINGS
from study.rate import settings, settings_of_the_finals
from study.rows import Line

ROOT = Path(__file__).parent.parent
COMPARISONS, RATE, WIDER = (f"docs/study/{name}.md" for name in ("optimizers", "rate", "wider"))
PRACTICE, README, STUDY = "docs/practice.md", "README.md", "docs/study/README.md"
TABLES, PAPER, ALL_TABLES = "docs/tables.md", "docs/paper.md", "study/tables.md"


# --- the results ---


@functools.cache
def results(question):
    return json.loads((ROOT / f"study/results/{question}.json").read_text())


VALUES = {
    "valid": lambda run: run["valid_loss"],
    "test": lambda run: run["test_loss"],
    "documents": lambda run: run["documents"]["test"]["loss"],
    "mean": lambda run: run["mean_norm_ratio"],
    "documents_of_bands": lambda run: run["documents"]["test"]["band_losses"],
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


def arm_of(question, name):
    """The options of the one arm of a run."""
    (arm,) = results(question)[name]["recipe"]["arms"].values()
    return arm


def differences(name, baseline, value="valid"):
    """Those of the runs of two names, as (question, name), with the same seeds."""
    ours, theirs = seeds(*name, value), seeds(*baseline, value)
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def best_run(question, start, seed=1):
    """The name with the lowest validation loss of a seed, of those that begin so."""
    names = [name for name in results(question) if name.startswith(start)]
    return min(names, key=lambda name: seeds(question, name, "valid")[seed])


def above_and_p(name, baseline, value):
    """How much higher the mean is, with the two-sided p of Student's test."""
    ours, theirs = ([*seeds(*of, value).values()] for of in (name, baseline))
    return np.mean(ours) - np.mean(theirs), stats.ttest_ind(ours, theirs).pvalue


def middle_and_interval(values):
    """The mean, and the ends of its 95 % interval."""
    return [np.mean(values), *stats.ttest_1samp(values, 0).confidence_interval()]


# --- the pages ---


def shows(text, value):
    """Assert that a number is this value, to the digits that it has."""
    decimals = len(text.partition(".")[2])
    assert float(text) == pytest.approx(value, abs=0.51 * 10**-decimals), (text, value)


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


# --- a table ---


def test_a_row_of_a_table():
    """Mean, deviation, p and mark of each cell, computed in another way than the generator does."""
    text = (ROOT / ALL_TABLES).read_text(encoding="utf-8")
    made = re.search(r"<!-- table: betas_longer -->\n(.*?)<!-- end -->", text, re.S)[1]
    header, _, *lines = ([cell.strip() for cell in x.split("|")] for x in made.splitlines())
    labels = {
        f"{'AdamW' if arm == 'adamw' else 'Coupled Adam'}, {beta1}, {beta2}, n = {n[2:]}": name
        for name in results("betas_longer")
        for arm, beta1, beta2, n in (name.split(),)
    }
    baseline = [*seeds("betas_longer", labels[lines[0][1]], "documents").values()]
    values = []
    for label, cell, *_, p, paired, number in (line[1:-1] for line in lines):
        by_seed = seeds("betas_longer", labels[label], "documents")
        losses = [*by_seed.values()]
        shown = cell.strip("*_")
        average, _, deviation = shown.partition(" (")
        shows(average, np.mean(losses))
        assert number == str(len(losses))
        values.append(mean("betas_longer", labels[label]))
        if not deviation:
            assert len(losses) == 1
            continue
        unit = 10 ** -len(average.partition(".")[2])
        assert int(deviation[:-1]) * unit == pytest.approx(np.std(losses, ddof=1), abs=0.51 * unit)
        if line_p := p.strip():
            expected = stats.ttest_ind(losses, baseline, alternative="less").pvalue
            assert float(line_p) == pytest.approx(expected, rel=0.06)
            assert cell.startswith("_") == (expected > 0.95)
            assert cell.startswith("**") == (expected < 0.05)
            pairs = differences(
                ("betas_longer", labels[label]), ("betas_longer", labels[lines[0][1]]), "documents"
            )
            expected = stats.ttest_1samp(pairs, 0, alternative="less").pvalue
            assert float(paired) == pytest.approx(expected, rel=0.06)
    assert header[2] == "L of test documents ↓"
    assert values[1:] == sorted(values[1:])  # by the loss on validation


# --- the betas ---

ADAMW = ("betas", "adamw 0 0.999 n=5")
ADAMW_LONGER = ("betas_longer", "adamw 0 0.999 n=2")
LEAN_LONGER = ("finals", "9768 steps lean2 0 0.99")


def test_the_betas():
    loss = {
        betas: first("betas", f"adamw {betas[0]:g} {betas[1]:g} n=5")
        for betas in itertools.product((0, 0.5, 0.9), (0.95, 0.99, 0.999))
    }
    short = [loss[beta1, 0.95] - loss[beta1, 0.999] for beta1 in (0, 0.5, 0.9)]
    momentum = [loss[0.9, beta2] - loss[0, beta2] for beta2 in (0.95, 0.99, 0.999)]
    said(
        "at beta2 = 0.95 is # to # above that at 0.999, and a beta1 of 0.9 costs # to #",
        *(min(short), max(short), min(momentum), max(momentum)),
    )
    usual = mean("betas_longer", "adamw 0.9 0.95 n=0", "documents")
    lower = usual - mean(*ADAMW_LONGER, "documents")
    said("| Which betas? | ...: # lower than 0.9, 0.95 after 9,768 steps", lower, page=STUDY)
    said(
        "its loss is # above that at 0, 0.999, which may be chance (p = #;",
        *above_and_p(("betas_longer", "adamw 0.9 0.999 n=1"), ADAMW_LONGER, "documents"),
    )
    usual, best = (
        np.array(first("betas", f"adamw {betas} n=5", "documents_of_bands"))
        for betas in ("0.9 0.95", "0 0.99")
    )
    *frequent, _, _, _, rarest = usual - best
    sentence = "loses # on the rarer half of the vocabulary, and # to # on frequent tokens"
    said(sentence, rarest, min(frequent), max(frequent))


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
    said("AdamW's loss at 0.9, 0.95 is # to # higher (one seed)", min(costs), max(costs))


def test_64k_tokens_in_a_step():
    """What the page says of one seed at the better of the rates that were tried."""
    losses = [
        first(question, best_run(question, f"{rule} n="), "documents")
        for question in ("batch_64k", "batch_64k_steps")
        for rule in ("adamw 0.9 0.999", "adamw 0 0.999")
    ]
    said("is # with it and # without; after 300 such steps # and #", *losses)


def test_momentum():
    """The share of the movement without the token; and beta2, for the cosine of rare tokens."""
    (run,) = seeds("movement", "adamw 0.9 0.95 n=4").values()
    assert len(run["windows"]) == 6
    rules = [window["rules"] for window in run["windows"]]
    present, cosine = (
        {rule: np.mean([w[rule][key][-1] for w in rules]) for rule in rules[0]}
        for key in ("in_batch", "cosine")
    )
    late = [100 * (1 - share) for rule, share in present.items() if ", 0.9, " in rule]
    said("With momentum, # to # % of a rare token's movement", min(late), max(late))
    for beta1 in ("0.9", "0"):
        short, long = (cosine[f"AdamW, {beta1}, {beta2}"] for beta2 in (0.95, 0.999))
        assert 0.5 < short / long < 0.81  # "a fifth to a half"
        usual, without = (cosine[f"AdamW, {b}, 0.999"] for b in ("0.9", "0"))
        assert usual > 0.95 * without  # no worse


# --- the finals ---


def best_rate_above(setting, arm, baseline):
    """How much higher its loss on test documents is, with the same seeds, at its own rate."""
    _, ours = finals.at_best_rate(setting, arm)
    return np.mean(finals.differences(ours, baseline, "test_documents"))


def test_the_finals():
    """LEAN minus AdamW, each at its own rate: what three pages say of the table."""
    lean = {
        setting: best_rate_above(setting, finals.LEAN, adamw)
        for setting in FINAL_SETTINGS
        for _, adamw in [finals.at_best_rate(setting, finals.ADAMW)]
    }
    average, low, high = middle_and_interval([*lean.values()])
    longest = middle_and_interval(differences(LEAN_LONGER, ADAMW_LONGER, "documents"))
    assert sorted(seeds(*LEAN_LONGER)) == [1, 2, 3, 4, 5]
    assert max(lean.values()) == lean["512"] > 0.02  # the goal is missed
    said(
        "it is # higher (# to #) in thirteen settings, and # (# to #) after 9,768 steps",
        *(average, low, high, *longest),
        page=STUDY,
    )
    said("With 512 tokens in a step LEAN's loss is # above AdamW's", lean["512"], page=STUDY)
    said(
        "test loss is on average # above that of an equally tuned AdamW (embeddings' betas 0, "
        "0.999): # after 9,768 steps, and at most #, in",
        *(average, longest[0], lean["512"]),
        page=README,
    )
    special = ("1k", "512", "constant")
    assert sum(lean[setting] for setting in special) > 0.5 * sum(lean.values())
    usual = [above for setting, above in lean.items() if setting not in special]
    said("the loss is # higher on average, and # at most. These ten", np.mean(usual), max(usual))


def test_adamw_with_decay():
    """It is the lower one where the rate falls, which LEAN is held against, too."""
    below, above = {}, {}
    for setting in FINAL_SETTINGS:
        if tried := finals.with_decay(setting):
            _, decay = finals.best(tried)
            below[setting] = best_rate_above(setting, finals.ADAMW, decay)
            above[setting] = best_rate_above(setting, finals.LEAN, decay)
    constant, of_adamw = above.pop("constant"), below.pop("constant")
    assert of_adamw < -0.05  # far worse at a constant rate
    said(
        "LEAN's loss minus that of AdamW with decay is # on average there, and # with the constant",
        np.mean([*above.values()]),
        constant,
    )


def test_what_the_finals_decide():
    """By the rules that were written down first, decay and zero-sum updates."""
    shown = []
    for arm, change in (
        (finals.LEAN, "decay=0.02"),
        (finals.LEAN, "free"),
        (finals.ADAMW, "decay=0.02"),
    ):
        changes = {
            setting: np.mean(finals.differences([line], [earlier], "valid_loss"))
            for setting in FINAL_SETTINGS
            for line in [Line("", "finals", f"{setting} {arm} {change}")]
            for earlier in [finals.finalist(setting, arm)]
            if line.name in results("finals")
        }
        assert len(changes) == 11
        shown.append(np.mean([*changes.values()]))
        assert shown[-1] > -0.004  # neither is taken
        if change != "free":
            assert max(changes.values()) == changes["constant"] > 0.01
    said("It rises by # with decay and by # without zero-sum updates, in eleven", *shown[:2])
    small = results("small_batches")
    assert all(name.startswith("512 lean2 0 0.99 a=0.5 x") for name in small)
    half = min(seeds("small_batches", name, "valid")[4] for name in small)
    _, lean = finals.at_best_rate_before("512", finals.LEAN)
    gain = finals.seeds_of(lean, "valid_loss")[4] - half
    assert 0 < gain < 0.01
    said("With 512 tokens a step a = 0.5 gains #, where", gain)


def test_one_moment_for_each_row():
    """Minus LEAN at the same rates, with seed 4."""
    above = {}
    for name in results("row_moments"):
        setting = name.partition(" row_moment")[0]
        ours, lean = ("row_moments", name), ("finals", f"{setting} lean2 0 0.99")
        assert arm_of(*ours)["lr_factor"] == pytest.approx(arm_of(*lean)["lr_factor"])
        above[setting] = seeds(*ours, "documents")[4] - seeds(*lean, "documents")[4]
    assert above.keys() == SETTINGS.keys()
    average, low, high = middle_and_interval([*above.values()])
    assert low < 0  # not shown to be worth them
    assert sorted(above, key=above.get)[-2:] == ["V=16384", "H=128"]
    said("the loss is # higher on average in the eight ..., but from # to #", average, low, high)


def test_the_screening():
    base, *slower = (
        seeds("screening", f"64k lean2 0 0.999{name}", "valid")[11]
        for name in ("", " a=0.5 x0.5", " a=0.5 x0.25")
    )
    said(
        "of the rate, a = 0.5 is still # and # worse in",
        *(loss - base for loss in slower),
        page=ALL_TABLES,
    )


def test_the_second_edition():
    """The geometric mean lowers the loss with every seed."""
    for measure in ("documents", "valid"):
        higher = differences(("geometric", "lean2 0 0.99"), ("geometric", "first 0 0.99"), measure)
        assert len(higher) == 5
        assert max(higher) < 0


# --- the first page ---


def test_the_first_page():
    def change(steps, beta2, before):
        """How the loss changes with the line, by pairs of the same seed."""
        # The longest are of LEAN's second edition.
        runs = [f"{steps} steps {line} 0.9 {beta2}" for line in ("line", "line second", before)]
        after, *_, before = [("first_page", run) for run in runs if run in results("first_page")]
        return differences(after, before, "documents")

    for steps, beta2 in itertools.product((600, 2400, 9768), (0.999, 0.95)):
        assert np.mean(change(steps, beta2, "adamw")) < 0  # as the README says
    # Without one seed, with which torch's betas do badly in few steps
    for steps in (600, 2400):
        losses = seeds("first_page", f"{steps} steps adamw 0.9 0.999", "documents")
        assert max(losses, key=losses.get) == 25
    without = [np.mean(change(steps, 0.999, "adamw")[:4]) for steps in (600, 2400)]
    said("its differences are # after 600 and # after 2,400 steps", *without)
    # A rate of their own for the embeddings is what most of it is, after 600 steps.
    usual = mean("learning_rate", "lr=0.005 adamw")
    own = np.mean([seeds("between", "adamw n=9", "valid")[seed] for seed in (1, 2, 3)])
    said("AdamW at 0.9, 0.95 has a validation loss that is # lower", usual - own)


# --- others with little state, and Muon ---


def test_others_with_little_state():
    _, [lean] = finals.at_best_rate("2400 steps", finals.LEAN)
    names = [
        *(ADAMW, (lean.question, lean.name), ("zero_sum", "ember free n=7")),
        *(("table_rules", "adafactor free n=7"), ("peers", "row_moment 0 0.99 n=5")),
    ]
    assert {len(seeds(*name)) for name in names} == {3}
    losses = [mean(*name, "documents") for name in names]
    said("are # for AdamW at 0, 0.999, # for LEAN, # for Ember, # for Adafactor and # for", *losses)
    assert losses == sorted(losses)
    longer = {
        "adafactor": ("one_pass_longer", "adafactor free n=3"),
        "adamw": ADAMW_LONGER,
        "ember": ("one_pass_longer", "ember free n=2"),
        "lean": LEAN_LONGER,
    }
    losses = [first(*name, "documents") for name in longer.values()]
    assert losses == sorted(losses)
    said("lowest loss: #, with AdamW at #, Ember at # and LEAN at #", *losses)
    deepseek = first("table_rules", best_run("table_rules", "balanced free"), "documents")
    said("Here it is # above AdamW (2,400", deepseek - first(*ADAMW, "documents"))
    without = [n for n in results("peers") if not n.startswith(("centered", "row_moment"))]
    assert min(first("peers", name, "documents") for name in without) > deepseek


def test_tables_beside_muon():
    """Each at the rate with the lowest validation loss of the first seed."""
    losses = {name: seeds("muon_tables", name, "valid") for name in results("muon_tables")}
    lean, adamw = (
        ("muon_tables", min(tried, key=lambda name: losses[name][51]))
        for arm in ("lean", "adamw 0 0.999")
        for tried in ([name for name in losses if name.startswith(f"{arm} f=")],)
    )
    pairs = differences(lean, adamw, "documents")
    assert len(pairs) == 3
    said("minus that of AdamW at 0, 0.999 is # on average", np.mean(pairs))
    # By what was written down, the rule of 15,000 / steps is offered, and 30,000 is not.
    lowest = losses["lean f=4"][51]
    assert lowest == min(loss[51] for name, loss in losses.items() if name.startswith("lean"))
    assert losses["lean f=8"][51] - lowest <= 0.03  # 15,000 / 2,400 = 6.25
    above = losses["lean f=16"][51] - lowest  # 30,000 / 2,400 = 12.5
    assert above > 0.03
    said("next to it the validation loss is # above its lowest", above, page=RATE)


def test_geometry():
    """What is said below the table, and by the README."""
    runs = {
        "adamw": ADAMW_LONGER,
        "coupled": ("betas_longer", "coupled 0.9 0.95 n=0"),
        "lean": LEAN_LONGER,
    }
    isotropy, at_unit_norm, men = (
        {arm: mean(*name, value) for arm, name in runs.items()}
        for value in ("isotropy", "isotropy_unit", "men")
    )
    said(
        "isotropy is # with Coupled Adam and # with LEAN",
        *(isotropy["coupled"], isotropy["lean"]),
        page=README,
    )
    assert at_unit_norm["lean"] == pytest.approx(at_unit_norm["coupled"], abs=0.02)
    assert men["lean"] >= max(men["adamw"], men["coupled"])
    norms = [run["band_norms"] for run in seeds(*LEAN_LONGER).values()]
    assert np.mean([bands[0] for bands in norms]) > np.mean([bands[-1] for bands in norms])


# --- Coupled Adam at the usual betas ---


def test_coupled_adam():
    ours, theirs = ("paper_ratio", "coupled n=0"), ("paper_ratio", "adamw n=0")
    above, p = above_and_p(theirs, ours, "test")
    said("is #, with p = # two-sided", above, p)
    assert 16 * p > 0.05  # a hint among sixteen tests
    ours, theirs = ("between", "coupled n=6"), ("between", "adamw n=9")
    assert [len(seeds(*name)) for name in (ours, theirs)] == [5, 5]
    said("AdamW is ahead by # (p = #, five seeds)", *above_and_p(ours, theirs, "test"))
    cost = [
        mean("warmup", f"warmup=0 {arm} n=0", "test")
        - mean("warmup", f"warmup=100 {arm} n=0", "test")
        for arm in ("adamw", "coupled")
    ]
    said("Without warmup AdamW's loss is # higher, and Coupled Adam's #", *cost)
    higher = []
    for model in ("untied", "rotary", "1.1M"):
        ours, theirs = (
            mean(
                "between_models", min(tried, key=lambda name: mean("between_models", name)), "test"
            )
            for arm in ("coupled", "adamw")
            for tried in [[n for n in results("between_models") if n.startswith(f"{model} {arm} ")]]
        )
        higher.append(ours - theirs)
    said("by # untied (0.63M parameters), # with rotary positions (0.37M) and # at H", *higher)
    coupled, plain = (("tying", f"untied {name}") for name in ("coupled input", "adamw"))
    lower, p = above_and_p(coupled, plain, "test")
    assert lower < 0
    said("coupling the input lowers the loss (p = #;", p / 2)


def test_coupled_adam_at_one_rate():
    """What docs/practice.md says: its loss is lower than AdamW's; with both tuned it is not."""
    for question, name in (
        ("learning_rate", "lr=0.005"),
        *(("scale", f"N=0.4M steps={n}") for n in (1200, 2400)),
    ):
        assert mean(question, f"{name} coupled", "test") < mean(question, f"{name} adamw", "test")
    assert mean("between", "coupled n=6") > mean("between", "adamw n=9")
    assert mean("scaled_longer", "coupled n=5") > mean("scaled_longer", "adamw n=5")


# --- the rule for the rate ---


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


def mean_cost(constants, settings, without=()):
    """Of min(cap, C / steps) in some settings, without the runs of some settings and factors."""
    c, cap = constants
    costs = []
    for setting in settings:
        kept = (
            {f: loss for f, loss in losses.items() if (setting.label, f"{f:.3g}") not in without}
            for losses in setting.losses.values()
        )
        factor = min(cap, max(1, c / setting.steps))
        costs.append(cost_at([losses for losses in kept if len(losses) > 1], factor))
    return np.nanmean(costs)


def test_what_the_rule_costs():
    rule, predecessor = (30_000, 16), (15_000, 16)
    lean = settings_of_the_finals()
    each = [mean_cost(rule, [setting]) for setting in lean]
    said("**30,000 / steps costs # on average and # at most**", np.mean(each), max(each), page=RATE)
    fewest = {setting.label: mean_cost(rule, [setting]) for setting in settings()}
    assert fewest["150 steps"] > fewest["300 steps"] > 0.04
    fitted, held_out = lean[:-1:2], lean[1:-1:2]  # without 9,768 steps
    tested = [mean_cost(constants, held_out) for constants in (rule, predecessor)]
    said("it costs #, and its predecessor, 15,000 / steps, #; most", *tested, page=RATE)
    for constants in (rule, predecessor):
        others = [setting for setting in held_out if setting.label != "512"]
        said("without which both cost #.", mean_cost(constants, others), page=RATE)
    of_adamw = mean_cost(rule, settings_of_the_finals(finals.ADAMW))
    said("at a cost of # on average", of_adamw, page=RATE)
    faster = mean_cost((30_000 * 2**0.5, 16), lean)
    said("√2 times as much would cost #", faster, page=RATE)
    # The fit, with and without the runs that replaced what had been continued beyond the others
    grid = [
        *itertools.product(15_000 * np.sqrt([0.25, 0.5, 1, 2, 4]), 16 * np.sqrt([0.5, 1, 2, 4]))
    ]
    added = {("512", "3.12"), ("1k", "6.25"), ("untied", "16"), ("rotary", "16")}
    added |= {("2400 steps", "11.3")}
    for without in ((), added):
        best = min(grid, key=lambda constants: mean_cost(constants, fitted, without))
        assert best == pytest.approx(rule)
        after, before = (mean_cost(x, held_out, without) for x in (rule, predecessor))
        assert after < before - 0.005


def test_low_rates_in_small_batches():
    """With half the rule's factor of 6.25: what it costs the second edition and the third."""
    second = differences(
        ("final_rates", "512 lean2 0 0.99 x0.5"), ("finals", "512 lean2 0 0.99"), "valid"
    )
    assert len(second) == 3
    said("is # above that at the rule's", np.mean(second), page=RATE)
    (third,) = differences(
        ("formula", "512 low limit later x1"), ("formula", "512 limit later x1"), "valid"
    )
    said("it is # above (one seed)", third, page=RATE)


def test_the_rule_in_settings_that_it_was_not_read_from():
    gains = [
        np.mean(
            differences(
                *(("held_out_rates", f"{setting} C={c}") for c in (30_000, 42_426)), "valid"
            )
        )
        for setting in HELD_OUT_SETTINGS
    ]
    said("edition is # lower with 42,426 / steps", np.mean(gains), page=RATE)
    in_thirteen = mean_cost((42_426, 16), settings_of_the_finals())
    in_thirteen -= mean_cost((30_000, 16), settings_of_the_finals())
    said("42,426 costs # more in the thirteen", in_thirteen, page=RATE)
    in_all = (13 * in_thirteen - sum(gains)) / 15
    assert in_all > 0
    said("over all fifteen 30,000 costs # less", in_all, page=RATE)


def test_when_zero_sum_updates_begin():
    def change(setting):
        later, today = (("formula", f"{setting} {x} x1") for x in ("limit later", "limit"))
        return np.mean(differences(later, today))

    low = [change(f"{setting} low") for setting in ("512", "1.2M", "2400 steps")]
    tuned = [change(setting) for setting in ("constant", "1.2M", "untied", "512", "16k")]
    assert np.mean(low) < -0.005  # the rule of study/README.md
    assert np.mean(tuned) < 0.003
    said(
        "is #, # and # lower in three settings at low rates, and # lower on average over five",
        *(-x for x in low),
        -np.mean(tuned),
        page=STUDY,
    )
    changes = [
        [
            np.mean(finals.differences(third, second, measure))
            for setting in FINAL_SETTINGS
            if results("formula").get(f"{setting} limit later x1")
            for (_, third), (_, second) in [
                (
                    finals.at_best_rate(setting, finals.LEAN),
                    finals.at_best_rate_before(setting, finals.LEAN),
                )
            ]
        ]
        for measure in ("valid_loss", "test_documents")
    ]
    said(
        "loss is # higher than the second's on average (# to #), and the test loss # (# to #)",
        *itertools.chain(*map(middle_and_interval, changes)),
        page=STUDY,
    )


def test_why_the_predecessor_failed():
    each = differences(("rate_rule", "1k adamw x1"), ("rate_rule", "1k adamw x2"))
    assert len(each) == 3
    assert np.mean(each) > 0.03
    said("its validation loss is # above that at twice the factor", np.mean(each), page=RATE)


# --- the wider model ---


def test_wider():
    """The verdicts by what was written down, and the differences of the text."""
    higher = []
    for arm in ("lean", "adamw 0 0.999"):
        valid = {n: first("wider", f"{arm} n={n}") for n in (0, 2, 4)}
        assert min(valid, key=valid.get) == 2
        higher.append(valid[0] - valid[2])
    said("At n = 0 LEAN's loss is # higher, and AdamW's #", *higher, page=WIDER)
    ours, theirs = (seeds("wider", f"{arm} n=2", "test") for arm in ("lean", "adamw 0 0.999"))
    paired = {seed: ours[seed] - theirs[seed] for seed in ours if seed > 1}
    runs = (
        [x for seed, x in paired.items() if seed < 6],
        [x for seed, x in paired.items() if seed > 5],
    )
    assert [middle_and_interval(pairs)[2] < 0.010 for pairs in runs] == [False, True]
    average, low, high = middle_and_interval([*paired.values()])
    assert low < 0 < high
    assert len(paired) == 14
    said("(#, 95 % interval # to +#, fourteen seeds)", average, low, high, page=WIDER)


# --- other pages ---


def test_hashed_bigrams():
    """With each of three seeds all others have a higher loss than LEAN."""
    arms = ("sgd 1280", "adamw 0 0.999 0.02", "sparse adam 0 0.999 0.02")
    others = ("no table", *arms, "row-wise adagrad 0.32", "adagrad 0.32")
    short, long = "600 steps lean 0.04", "2400 steps lean 0.02"
    for lean, names in ((short, [*others, "sparse adam 0.9 0.999 0.08"]), (long, others)):
        for name in names:
            pairs = differences(
                ("hashed_bigrams", lean.rpartition("lean")[0] + name),
                ("hashed_bigrams", lean),
                "documents",
            )
            assert len(pairs) == 3
            assert min(pairs) > 0
    changes = differences(
        ("hashed_bigrams", "600 steps split lean 0.04"), ("hashed_bigrams", short), "documents"
    )
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


def test_all_runs_of_one_adamw():
    """The loss after 20M tokens at the usual betas, with the runs of a later question, too."""
    coupled = [*seeds("paper_ratio", "coupled n=0", "test").values()]
    planned, later = (
        [*seeds(*runs, "test").values()]
        for runs in (("paper_ratio", "adamw n=0"), ("betas_longer", "adamw 0.9 0.95 n=0"))
    )
    adamw = planned + later
    assert len(adamw) == 8
    student, welch = (stats.ttest_ind(coupled, adamw, equal_var=x).pvalue for x in (True, False))
    said(
        "made later, the difference is #, with a two-sided p of # by Student's test, and # by",
        *(np.mean(adamw) - np.mean(coupled), student, welch),
        page=PAPER,
    )
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
            "by # and #.",
            loss[tied, False, adamw] - lean,
            *(loss[kind, False, tuned] - loss[kind, False, "LEAN"] for kind in (True, False)),
            *(loss[kind, False, momentum] - loss[kind, False, "LEAN"] for kind in (True, False)),
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
        "with `zero_sum`, as in LEAN": r"(?<!64k )\blimit later\b",  # 64k has fewer than 100 steps
    }
    ends = {name: [] for name in patterns}
    for path in (ROOT / "study/results").glob("*.json"):
        if path.stem not in ("accuracy", "movement", "muon_rates"):
            for run, name in itertools.product(results(path.stem), patterns):
                if re.search(patterns[name], run):
                    kept = seeds(path.stem, run).values()
                    ends[name] += [r["mean_norm_ratio"] for r in kept if "mean_norm_ratio" in r]
    assert min(map(len, ends.values())) > 10
    for name, numbers in ends.items():
        said(f"| {name} | # to # |", min(numbers), max(numbers), page=PRACTICE)


def test_gradients_that_jump():
    def cost(jump, arm):
        """How far a jump raises the validation loss."""
        return seeds("disturbed", f"{jump} {arm}", "valid")[4] - none[arm]

    arms = ("lean", "adamw 0 0.999", "coupled n=5")
    none = {arm: seeds("disturbed", f"none {arm}", "valid")[4] for arm in arms}
    of_all, of_row = ([cost(jump, arm) for arm in arms] for jump in ("all", "row"))
    said("cost LEAN # of validation loss, AdamW # and Coupled Adam #;", *of_all, page=PRACTICE)
    said("cost LEAN #, AdamW # and Coupled Adam # ([600", *of_row, page=PRACTICE)
    assert max(cost("all clipped", arm) for arm in arms[:2]) < 0.01


def test_what_the_paper_argues():
    theory = json.loads((ROOT / "benchmarks/results/theory.json").read_text())
    head = theory["sums"]["output"]["updates"]
    said("AdamW's have #, in the direction", head["AdamW"], page=PAPER)
    assert max(head["SGD"], head["Coupled Adam"]) < 1e-7
    sets = seeds("paper_ratio", "coupled n=0", "word_similarity")[1].values()
    said("only # pairs of four sets", sum(s["pairs"] for s in sets if s["r"]), page=PAPER)


def test_accuracy():
    """What docs/paper.md says of the downstream tasks."""
    measured = results("accuracy")["betas: adamw 0 0.99 n=5-seed-1"]
    assert len(measured["tasks"]) == 7
    said("[# ± #]", measured["accuracy"], measured["stderr"], page=PAPER)


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


def test_times_of_an_update():
    """Of LEAN, relative to torch's fused AdamW on an H200."""
    record = json.loads((ROOT / "benchmarks/results/gpu/nvidia-h200.json").read_text())
    large, small = (
        result["ratio"][1]
        for shape in ((128256, 4096), (50304, 768))
        for result in record["steps"]
        if (*result["case"].values(),) == (*shape, "bfloat16", 0, False)
        and result["optimizer"] == "LEAN"
    )
    said(
        "update alone takes # of the fused AdamW's time at 128,256 x 4,096 in bfloat16, but # at "
        "50,304 x 768.",
        *(large, small),
        page=README,
    )


def test_the_rate_of_the_recommended_lean():
    """That in the table, and by the rule."""
    (arm,) = results(LEAN_LONGER[0])[LEAN_LONGER[1]]["recipe"]["arms"].values()
    said("LEAN's is # times the core's, where", arm["lr_factor"], page=STUDY)
    said("`steps=` would choose #.", 30_000 / 9768, page=STUDY)


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
    (said_hours,) = re.findall(r"All took about (\d+) hours", (ROOT / STUDY).read_text())
    assert int(said_hours) == pytest.approx(hours, rel=0.1)


LOSS = re.compile(r"\bloss(?!-)")
NUMBER = re.compile(r"(?<![\d.,=] )(?<![\w.,])[-+]?\d\.\d{2,3}(?![\d.]|,\d| %|M)")


@pytest.mark.parametrize("page", [README, PRACTICE, STUDY, COMPARISONS, RATE, WIDER])
def test_a_loss_names_its_model_and_steps(page):
    """Each paragraph and each item of a list in which a loss is a number says of what it is.

    The study's pages say at their top which model they have, unless a sentence says otherwise.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^## What was written down.*?(?=^## )|^```.*?^```", "", text, flags=re.M | re.S)
    says_model = page.startswith("docs/study") and re.search(r"\d\.\d+M\s+parameters", text[:700])
    nameless = [
        block
        for block in re.split(r"\n\n|\n(?=- |\d+\. )", text)
        if not re.match(r"[|#<]", block)
        and LOSS.search(block)
        and NUMBER.search(block)
        and not (
            re.search(r"\bsteps\b", block)
            and (says_model or re.search(r"\d(M|\sparameters)\b", block))
        )
    ]
    assert not nameless
