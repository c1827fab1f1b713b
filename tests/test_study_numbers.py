"""The study's numbers, recomputed from the results without the code that writes its tables."""

import functools
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/study/optimizers.md").read_text(encoding="utf-8")
TABLES = PAGE + (ROOT / "study/tables.md").read_text(encoding="utf-8")
BEST = "AdamW, 0, 0.99"
ELSEWHERE = {
    ("1.2M", "AdamW, 0.9, 0.95"): ("between", "adamw n=9"),
    ("1.2M", "Coupled Adam, 0.9, 0.95"): ("between", "coupled n=6"),
    ("1.2M", "a = 0.5, 0.9, 0.95"): ("between", "a=0.5 n=7"),
    ("4.9M", "AdamW, 0.9, 0.95"): ("scaled_longer", "adamw n=5"),
    ("4.9M", "Coupled Adam, 0.9, 0.95"): ("scaled_longer", "coupled n=5"),
    ("4.9M", "a = 0.5, 0.9, 0.95"): ("between_longer", "a=0.5 n=3"),
    ("20M", "AdamW, 0.9, 0.95"): ("paper_ratio", "adamw n=0"),
    ("20M", "Coupled Adam, 0.9, 0.95"): ("paper_ratio", "coupled n=0"),
    ("20M", "a = 0.5, 0.9, 0.95"): ("paper_ratio", "a=0.5 n=2"),
    ("20M", "AdamW, 0, 0.999"): ("betas_longer", "adamw 0 0.999 n=1"),
    ("20M", "AdamW, 0.9, 0.95 (five seeds)"): ("betas_longer", "adamw 0.9 0.95 n=0"),
    ("20M", "AdamW, 0, 0.99"): ("betas_longer", "adamw 0 0.99 n=1"),
    ("20M", "AdamW, 0.9, 0.999"): ("betas_longer", "adamw 0.9 0.999 n=1"),
    ("20M", "a = 0.75, 0, 0.99"): ("betas_longer", "a=0.75 0 0.99 n=2"),
    ("20M", "LEAN"): ("one_pass_longer", "plain delayed n=1"),
    ("20M", "Ember"): ("one_pass_longer", "ember free n=2"),
}
CHOSEN = {
    "betas": (
        *("adamw 0 0.99 n=5", "adamw 0 0.999 n=5", "adamw 0.9 0.999 n=5", "adamw 0.9 0.95 n=5"),
        *("coupled 0.9 0.999 n=4", "coupled 0.9 0.95 n=4"),
        *("a=0.5 0 0.99 n=4", "a=0.75 0 0.99 n=4"),
    ),
    "betas_longer": ("adamw 0.9 0.95 n=0", "adamw 0 0.999 n=1", "a=0.75 0 0.99 n=2"),
}


@functools.cache
def results(question):
    return json.loads((ROOT / f"study/results/{question}.json").read_text())


def runs(question, name):
    content = results(question)
    return {int(seed): run for seed, run in content[name]["seeds"].items()}


def betas(label, question="betas"):
    """The runs of a label such as "AdamW, 0, 0.999, n = 5"; without n, of the chosen one."""
    name = label.replace("a = ", "a=").replace("Coupled Adam", "coupled").replace("AdamW", "adamw")
    arm, beta1, beta2, *n = name.split(", ")
    start = f"{arm} {beta1} {beta2} "
    if n:
        return runs(question, start + n[0].replace(" ", ""))
    (chosen,) = (name for name in CHOSEN[question] if name.startswith(start))
    return runs(question, chosen)


def rows(table, page=TABLES):
    """The cells of a table's rows, as on the page."""
    text = re.search(rf"<!-- table: {table} -->\n(.*?)<!-- end -->", page, re.S)[1]
    lines = [line[1:-1].split("|") for line in text.strip().splitlines()]
    return [[cell.strip() for cell in line] for line in lines]


def numbers(cell):
    return [float(number) for number in re.findall(r"[-+]?\d+\.\d+", cell)]


COLUMNS = {
    "L of test documents ↓": lambda run: run["documents"]["test"]["loss"],
    "L (validation) ↓": lambda run: run["valid_loss"],
    "‖μ‖ʳ ↓": lambda run: run["mean_norm_ratio"],
    "effective rank ↑": lambda run: run["effective_rank"],
    "r of MEN ↑": lambda run: run["word_similarity"]["MEN"]["r"],
}
IN_THE_README = {
    "test loss of 0.37M parameters after 9,768 steps ↓": lambda run: run["test_loss"],
    "norm of the mean embedding, relative to the mean norm ↓": COLUMNS["‖μ‖ʳ ↓"],
}


def check(cell, values):
    """Mean and deviation are those of the values, to the digits that are shown."""
    shown = cell.strip("*_")
    if shown == "< 1e-6":
        assert max(values) < 1e-6
        return
    mean, _, digit = shown.partition(" (")
    decimals = len(mean.partition(".")[2])
    assert float(mean) == pytest.approx(np.mean(values), abs=0.51 * 10**-decimals)
    if digit:
        spread = int(digit.rstrip(")")) * 10**-decimals
        assert spread == pytest.approx(np.std(values, ddof=1), abs=0.51 * 10**-decimals)


def check_columns(header, line, seeds, columns):
    for name, value in columns.items():
        check(line[header.index(name)], [value(run) for run in seeds.values()])


OF_BETAS = sorted(set(re.findall(r"<!-- table: ((?:betas|batch)[\w=]*) -->", TABLES)))


@pytest.mark.parametrize("question", OF_BETAS)
def test_betas(question):
    """Each cell, and the order: the best AdamW first, then all others by their loss."""
    header, _, *lines = rows(question)
    seeds = [betas(line[0], question) for line in lines]
    for line, of_line in zip(lines, seeds):
        assert int(line[-1]) == len(of_line)
        check_columns(header, line, of_line, COLUMNS)
    losses = [np.mean([run["valid_loss"] for run in of_line.values()]) for of_line in seeds]
    of_adamw = [loss for loss, line in zip(losses, lines) if line[0].startswith("AdamW")]
    assert losses[0] == min(of_adamw)
    if question == "betas":  # where no other optimizer is ahead, as the page says
        assert losses[0] == min(losses)
    assert losses[1:] == sorted(losses[1:])


def test_another_eps():
    """No loss on the test documents is far from the first seed's at 1e-8."""
    changes = []
    for full in results("betas_eps"):
        name = full.partition(" ")[2]
        losses = [
            of[1]["documents"]["test"]["loss"]
            for of in (runs("betas_eps", full), runs("betas", name))
        ]
        changes.append(abs(losses[0] - losses[1]))
    assert len(changes) == 4
    (most,) = re.search(r"test\s+documents by (0\.\d{3}) at most", PAGE).groups()
    assert float(most) == pytest.approx(max(changes), abs=5.1e-4)


ONE_PASS = {
    "one_pass": "betas",
    "one_pass_longer": "betas_longer",
    "one_pass_16k": "batch_16k",
    "one_pass_64k": "batch_64k",
}


PEERS = {
    "AdamW, 0, 0.999": ("betas", "adamw 0 0.999"),
    "LEAN": ("one_pass", "plain delayed"),
    "LEAN without zero-sum": ("zero_sum", "plain delayed free"),
    "Ember": ("zero_sum", "ember free"),
    "Ember, zero-sum": ("zero_sum", "ember zero sum"),
    "Adafactor": ("table_rules", "adafactor free"),
    "DeepSeek-V4.1's": ("table_rules", "balanced free"),
    "DeepSeek-V4.1's without momentum": ("table_rules", "balanced 0 free"),
    "AdamW, 0, 0.999, zero-sum": ("peers", "centered adamw 0 0.999"),
    "a moment for each row": ("peers", "row_moment 0 0.99"),
    "a moment for each row, beta2 0.999": ("peers", "row_moment 0 0.999"),
    "columns of norm 1": ("peers", "columns 0 0.95"),
    "columns, momentum 0.9": ("peers", "columns 0.9 0.95"),
    "rows of norm 1": ("peers", "rows 0 0.95"),
    "rows, momentum 0.9": ("peers", "rows 0.9 0.95"),
    "matrix of norm 1": ("peers", "matrix 0 0.95"),
    "matrix, momentum 0.9": ("peers", "matrix 0.9 0.95"),
    "signs, momentum 0.9": ("peers", "sign 0.9 0.95"),
    "Lion": ("peers", "lion 0.9 0.99"),
}


@pytest.mark.parametrize("table", [*ONE_PASS, "zero_sum_untied", "peers_by_rate", "width"])
def test_by_factor(table):
    """Each cell of the tables by rate; none is left out."""
    before = ONE_PASS.get(table, "betas_untied")
    header, _, *lines = rows(table)
    here = {
        "AdamW, 0, 0.999": (before, "adamw 0 0.999"),
        "AdamW, 0, 0.999, zero-sum": (table, "adam zero sum"),
        "plain, exact": (before, "a=0.75 0 0.99"),
        "LEAN": (table, "plain delayed"),
        "LEAN without zero-sum": (table, "plain delayed free"),
        "Ember": ("zero_sum" if table == "one_pass" else table, "ember free"),
        "Ember, zero-sum": (table, "ember zero sum"),
    }
    here |= {
        f"{kind}, delayed": (table, f"{kind} delayed") for kind in ("plain", "half", "weighted")
    }
    if table == "peers_by_rate":
        here = PEERS
    elif table == "width":
        here = {f"H = {h}": ("width", f"H={h} lean 0 0.99") for h in (32, 64, 128)}
    for label, *cells in lines:
        question, rule = here[label]
        for factor, cell in zip(header[1:], cells):
            name = f"{rule} {factor.replace(' ', '')}"
            assert bool(cell) == (name in results(question)), (label, factor)
            if cell:
                check(cell, [run["valid_loss"] for run in runs(question, name).values()])


def valid(question, name):
    """The validation losses by seed."""
    return {seed: run["valid_loss"] for seed, run in runs(question, name).items()}


def test_what_the_page_says_of_one_pass():
    def said(pattern):
        return [float(x) for x in re.search(pattern, " ".join(PAGE.split())).groups()]

    def first(question, name):
        return valid(question, name)[1]

    gains = [
        first("one_pass", f"plain delayed n={n}") - first("one_pass", f"weighted delayed n={n}")
        for n in (3, 4, 5)
    ]
    assert said(r"gain (\S+) to (\S+) after \[2,400") == pytest.approx(
        [min(gains), max(gains)], abs=5.1e-4
    )
    plain, half, weighted = (
        min(first("one_pass_64k", n) for n in results("one_pass_64k") if n.startswith(rule))
        for rule in ("plain", "half", "weighted")
    )
    assert said(r"and lose (\S+) in \[75") == pytest.approx([weighted - plain], abs=5.1e-3)
    assert half > plain
    adamw, lean = valid("betas", "adamw 0 0.999 n=5"), valid("one_pass", "plain delayed n=4")
    longer = valid("betas_longer", "adamw 0 0.999 n=1")
    after = valid("one_pass_longer", "plain delayed n=1")
    differences = [after[seed] - longer[seed] for seed in after]
    assert len(differences) == 5
    assert said(r"parameters it is (\S+) higher after 2,400 steps \(n = 4 and 5") == pytest.approx(
        [np.mean([*lean.values()]) - np.mean([*adamw.values()])], abs=5.1e-4
    )
    lower, p = said(r"On validation LEAN is (\S+) lower \(p = (\S+), paired\)")
    assert lower == pytest.approx(-np.mean(differences), abs=5.1e-4)
    assert p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=0.051)
    of_documents = [
        run["documents"]["test"]["loss"]
        - runs("betas_longer", "adamw 0 0.999 n=1")[seed]["documents"]["test"]["loss"]
        for seed, run in runs("one_pass_longer", "plain delayed n=1").items()
    ]
    low, high = stats.ttest_1samp(of_documents, 0).confidence_interval()
    shown = said(r"the difference is (\S+), with a 95 % interval of ± (\S+?)\. ")
    assert shown == pytest.approx([(low + high) / 2, (high - low) / 2], abs=5.1e-4)
    for page in ("README.md", "docs/study/README.md", "docs/study/optimizers.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert f"({shown[0]:.3f} ± {shown[1]:.3f}, five seeds)" in text
    assert said(r"with the only seed that has it \((\S+), (\S+) at n = 1\)") == pytest.approx(
        [first("betas_longer", f"adamw 0 0.999 n={n}") for n in (2, 1)], abs=5.1e-4
    )
    ember, rival = (
        [valid(*name)[seed] for seed in (1, 2, 3)]
        for name in (("zero_sum", "ember free n=7"), ("one_pass", "plain delayed n=4"))
    )
    below, p = said(r"and (\S+) below LEAN at the rate with three seeds \(p = (\S+), paired\)")
    assert below == pytest.approx(np.mean(rival) - np.mean(ember), abs=5.1e-4)
    assert p == pytest.approx(stats.ttest_rel(ember, rival).pvalue, abs=5.1e-3)
    few = [
        first("one_pass_16k", "plain delayed n=7")
        - np.mean([*valid("batch_16k", "adamw 0 0.999 n=7").values()]),
        plain - first("batch_64k", "adamw 0 0.999 n=9"),
    ]
    assert said(r" (\S+) higher after 300 steps .* and (\S+) higher after 75") == pytest.approx(
        few, abs=5.1e-4
    )


def test_what_the_page_says_of_zero_sum():
    text = PAGE.split("## What zero-sum updates cost")[1].split("\n## ")[0]
    text = " ".join(text.split())
    said = re.search(
        r"AdamW's by (\S+) .* LEAN's by (\S+) .* p = (\S+), paired\) and Ember's by (\S+) ",
        text,
    )
    adamw, lean, p, ember = map(float, said.groups())
    rivals = (
        (adamw, ("peers", "centered adamw 0 0.999 n=5"), ("betas", "adamw 0 0.999 n=5")),
        (lean, ("one_pass", "plain delayed n=4"), ("zero_sum", "plain delayed free n=4")),
        (ember, ("zero_sum", "ember zero sum n=5"), ("zero_sum", "ember free n=5")),
    )
    for cost, *names in rivals:
        with_it, without = (valid(*name) for name in names)
        differences = [with_it[seed] - without[seed] for seed in without]
        assert cost == pytest.approx(np.mean(differences), abs=5.1e-4)
        if cost == lean:
            assert p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=5.1e-3)


def test_zero_sum_untied():
    """What the page says of one seed: a cost for Ember, and none for AdamW and LEAN."""
    (shown,) = re.search(r"Ember's was (\S+)\shigher \(n = 4, one", PAGE).groups()

    def first(question, name):
        return valid(question, f"{name} n=4")[1]

    cost = first("zero_sum_untied", "ember zero sum") - first("zero_sum_untied", "ember free")
    assert float(shown) == pytest.approx(cost, abs=5.1e-4)
    assert first("zero_sum_untied", "adam zero sum") < first("betas_untied", "adamw 0 0.999")
    free = first("zero_sum_untied", "plain delayed free")
    assert first("zero_sum_untied", "plain delayed") < free


def test_the_best_rate_by_width():
    """The vertices of parabolas through three losses; the highest n is the best at H = 128."""
    text = " ".join(PAGE.split())
    shown = re.search(r"lowest at n = (\S+) for H = 32 and at (\S+) for H = 64", text).groups()
    for width, vertex in zip((32, 64), map(float, shown), strict=True):
        losses = [valid("width", f"H={width} lean 0 0.99 n={n}")[1] for n in (4, 6, 8)]
        a, b, _ = np.polyfit((4, 6, 8), losses, 2)
        assert vertex == pytest.approx(-b / (2 * a), abs=0.051)
    widest = {name: valid("width", name)[1] for name in results("width") if "H=128" in name}
    assert min(widest, key=widest.get).endswith("n=8")


def test_settings_that_were_written_down_first():
    """The n that validation chooses with seed 4, each loss and difference, and their mean."""
    *lines, mean = rows("settings")[2:]
    differences = []
    for setting, *cells in lines:
        losses = []
        for arm, n, shown in (("adamw 0 0.999", *cells[:2]), ("lean 0 0.99", *cells[2:4])):
            start = f"{setting.strip('`')} {arm} n="
            tried = [name for name in results("settings") if name.startswith(start)]
            assert len(tried) == 2
            best = min(tried, key=lambda name: runs("settings", name)[4]["valid_loss"])
            assert best == start + n
            of_seed = {
                seed: COLUMNS["L of test documents ↓"](run)
                for seed, run in runs("settings", best).items()
            }
            assert sorted(of_seed) == [4, 5, 6]
            check(shown, [*of_seed.values()])
            losses.append([of_seed[seed] for seed in (4, 5, 6)])
        test = stats.ttest_rel(losses[1], losses[0])
        differences.append(np.mean(np.subtract(losses[1], losses[0])))
        assert float(cells[4]) == pytest.approx(differences[-1], abs=5.1e-4)
        assert float(cells[5].removeprefix("< ")) == pytest.approx(test.pvalue, rel=0.06, abs=1e-3)
    test = stats.ttest_1samp(differences, 0)
    expected = [np.mean(differences), *test.confidence_interval()]
    assert numbers(mean[5]) == pytest.approx(expected, abs=5.1e-4)
    assert float(mean[6]) == pytest.approx(test.pvalue, rel=0.06)
    of = {line[0].strip("`"): difference for line, difference in zip(lines, differences)}
    shapes = [of[name] for name in ("untied", "rotary", "H=32", "H=128", "V=16384")]
    page = (ROOT / "docs/practice.md").read_text(encoding="utf-8").split("## What `LEAN` costs")[1]
    shown = [
        numbers(line.split("|")[3]) for line in page.splitlines() if "written-down-first" in line
    ]
    expected_there = [[of[n]] for n in ("64k", "16k", "1.2M")] + [[min(shapes), max(shapes)]]
    assert shown == [pytest.approx(numbers_, abs=5.1e-4) for numbers_ in expected_there]
    readmes = [
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/study/README.md")
    ]
    of_mean, *of_others = (" ".join(page.split()) for page in (*readmes, PAGE))
    eight = (
        "After 75 to 1,200 steps, in eight settings of 0.16M to 1.2M parameters, the loss of `LEAN`"
    )
    assert f"{eight} is {expected[0]:.2f} higher" in of_mean
    low_and_high = " to ".join(f"{number:.3f}" for number in expected[1:])
    assert f"{expected[0]:.3f} higher on average ({low_and_high})" in of_others[0]
    assert (
        f"by {expected[0]:.3f} on average, with a 95 % interval of {low_and_high}" in of_others[1]
    )


def test_64k_tokens_in_a_step():
    """What the page says of one seed at the better of the rates that were tried."""
    text = (
        " ".join(PAGE.split()).split("In 75 steps of 64k tokens (n = 9")[1].split("In 150 steps")[0]
    )
    shown = [float(number) for number in re.findall(r"[45]\.\d{3}", text)]
    rules = 2 * ["adamw 0.9 0.999", "adamw 0 0.999"]
    expected = []
    for question, rule in zip(2 * ["batch_64k"] + 2 * ["batch_64k_steps"], rules, strict=True):
        tried = [
            runs(question, name)[1]
            for name in results(question)
            if name.rpartition(" n=")[0] == rule
        ]
        best = min(tried, key=lambda run: run["valid_loss"])
        expected.append(best["documents"]["test"]["loss"])
    assert shown == pytest.approx(expected, abs=5.1e-4)


def test_peers():
    """Each rule at the rate with the most seeds, or else the lowest loss on validation."""
    header, _, *lines = rows("peers")
    losses = []
    for line in lines:
        question, rule = PEERS[line[0].rpartition(", n = ")[0]]
        name = f"{rule} n={line[0].rpartition(' ')[2]}"
        seeds = runs(question, name)
        assert int(line[-1]) == len(seeds)
        check_columns(header, line, seeds, COLUMNS)
        tried = {
            other: valid(question, other)
            for other in results(question)
            if other.rpartition(" n=")[0] == rule
        }
        best = min(tried, key=lambda other: (-len(tried[other]), np.mean([*tried[other].values()])))
        assert name == best
        losses.append(np.mean([*valid(question, name).values()]))
    assert losses[1:] == sorted(losses[1:])
    # What has a result is on the page.
    of_peers = {name.rpartition(" n=")[0] for name in results("peers")}
    assert of_peers == {rule for question, rule in PEERS.values() if question == "peers"}


def test_readme():
    """Each cell; the time of a step is that on a GPU."""
    header, _, *lines = rows("readme", (ROOT / "README.md").read_text(encoding="utf-8"))
    expected = {
        "AdamW, betas 0.9, 0.95": ("betas_longer", "adamw 0.9 0.95 n=0", None),
        "AdamW, betas 0, 0.999": ("betas_longer", "adamw 0 0.999 n=1", None),
        "Coupled Adam": ("paper_ratio", "coupled n=0", "Coupled Adam"),
        "LEAN": ("one_pass_longer", "plain delayed n=1", "LEAN"),
        "Ember, compiled": ("one_pass_longer", "ember free n=2", "Ember compiled"),
    }
    record = json.loads((ROOT / "benchmarks/results/gpu/nvidia-h200.json").read_text())
    ratios = {
        result["optimizer"]: result["ratio"][1]
        for result in record["steps"]
        if list(result["case"].values()) == [128256, 4096, "float32", 0, False]
    }
    assert [line[0] for line in lines] == [*expected]
    for line in lines:
        question, name, optimizer = expected[line[0]]
        seeds = runs(question, name)
        assert int(line[header.index("seeds")]) == len(seeds)
        check_columns(header, line, seeds, IN_THE_README)
        assert float(line[2]) == pytest.approx(ratios.get(optimizer, 1.0), abs=5.1e-3)


def test_what_lean_gives_up():
    """Each cell of the table of geometry, and the numbers that the pages take from it."""
    _, _, *lines = rows("geometry")
    names = {
        "AdamW, betas 0.9, 0.95": ("betas_longer", "adamw 0.9 0.95 n=0"),
        "AdamW, betas 0, 0.999": ("betas_longer", "adamw 0 0.999 n=1"),
        "Coupled Adam": ("paper_ratio", "coupled n=0"),
        "LEAN": ("one_pass_longer", "plain delayed n=1"),
        "Ember": ("one_pass_longer", "ember free n=2"),
    }
    of_run = [
        *(lambda run, key=key: run[key] for key in ("isotropy", "isotropy_centered")),
        *(lambda run, key=key: run[key] for key in ("isotropy_unit", "mean_norm_ratio")),
        lambda run: run["norm_frequency_correlation"],
        *(lambda run, band=band: run["band_norms"][band] for band in (0, -1)),
        lambda run: run["effective_rank"],
        lambda run: run["word_similarity"]["MEN"]["r"],
    ]
    assert [line[0] for line in lines] == [*names]
    shown = {}
    for label, *cells in lines:
        for cell, value in zip(cells, of_run, strict=True):
            if cell != "–":  # runs that are older than the measure
                check(cell, [value(run) for run in runs(*names[label]).values()])
        *means, men = (cell.partition(" ")[0] for cell in cells)
        shown[label] = [mean if mean == "–" else f"{float(mean):.2f}" for mean in means] + [men]
    adamw, coupled, lean = (shown[n] for n in ("AdamW, betas 0, 0.999", "Coupled Adam", "LEAN"))
    text = " ".join(PAGE.split("## What LEAN gives up")[1].split("\n## ")[0].split())
    assert (
        f"Its isotropy is {lean[0]}, AdamW's at 0, 0.999 is {adamw[0]}, and Coupled Adam's is "
        f"{coupled[0]}" in text
    )
    assert f"centred they are {lean[1]}, {adamw[1]} and {coupled[1]}" in text
    assert f"longer than with AdamW ({lean[5]} and {adamw[5]}), and ρ is +{lean[4]}" in text
    assert f"instead of {adamw[4]}; Coupled Adam has +{coupled[4]}" in text
    assert f"LEAN has {lean[2]} and Coupled Adam {coupled[2]}" in text
    assert f"(MEN: {lean[8]}, {adamw[8]} and {coupled[8]})" in text
    readmes = (ROOT / name for name in ("README.md", "docs/study/README.md"))
    readme, of_study = (" ".join(page.read_text(encoding="utf-8").split()) for page in readmes)
    assert f"isotropy is {coupled[0]} with Coupled Adam and {lean[0]} with LEAN" in readme
    assert f"isotropy does not follow ({lean[0]}; Coupled Adam has {coupled[0]})" in of_study


def test_the_rule_on_the_runs_that_it_was_read_from():
    """Its loss between the rates that were tried, above the lowest, with the seed of most rates."""
    page = (ROOT / "docs/study/rate.md").read_text(encoding="utf-8")
    excesses, steps_of, parameters = [], set(), set()
    for path in (ROOT / "study/results").glob("*.json"):
        if path.stem in ("accuracy", "movement", "muon_rates", "scaled", "wider"):
            continue
        groups = {}
        for name, run in json.loads(path.read_text()).items():
            rule, _, n = name.rpartition(" n=")
            if rule and not re.search("coupled|weighted|half", rule):
                group = groups.setdefault((rule, run["recipe"]["training"]["steps"]), {})
                group[int(n)] = run["seeds"]
        for (_, steps), by_n in groups.items():
            seeds = sorted({seed for seeds in by_n.values() for seed in seeds})
            seed = max(seeds, key=lambda seed: sum(seed in of_n for of_n in by_n.values()))
            losses = {n: of_n[seed]["valid_loss"] for n, of_n in by_n.items() if seed in of_n}
            if len(losses) > 1:
                at = 2 * np.log2(min(16, max(1, 15_000 / steps)))
                tried = sorted(losses)
                loss = np.interp(at, tried, [losses[n] for n in tried])
                excesses.append(loss - min(losses.values()))
                steps_of.add(steps)
                parameters |= {of_n[seed]["parameters"] for of_n in by_n.values() if seed in of_n}
    text = " ".join(page.split())
    groups, within = re.search(
        r"In (\d+) groups of runs .* within 0\.01 in (\d+) of", text
    ).groups()
    assert (int(groups), int(within)) == (len(excesses), sum(e <= 0.01 for e in excesses))
    shown = re.search(r"is (\S+) above the lowest, at most (\S+),", text).groups()
    assert [*map(float, shown)] == pytest.approx([np.mean(excesses), max(excesses)], abs=5.1e-4)
    assert {min(steps_of), max(steps_of)} == {75, 9768}
    smallest, largest = re.search(r"of (\S+)M to (\S+)M parameters and 75 to 9,768", text).groups()
    assert float(smallest) == pytest.approx(min(parameters) / 1e6, abs=0.0051)
    assert float(largest) == pytest.approx(max(parameters) / 1e6, abs=0.051)
    practice = " ".join((ROOT / "docs/practice.md").read_text(encoding="utf-8").split())
    (above,) = re.search(r"factor of 2 is (\S+) above that with 23", practice).groups()
    constant, tuned = (valid("scaled", f"adamw n={n}") for n in (2, 9))
    difference = np.mean([constant[seed] - tuned[seed] for seed in constant])
    assert float(above) == pytest.approx(difference, abs=5.1e-3)


def test_the_rule():
    """The table of the test that was written down first, and its means, from the names of runs."""
    page = (ROOT / "docs/study/rate.md").read_text(encoding="utf-8")
    *settings, of_rule, of_10000, of_no_cap, of_50, _ = rows("rate", page)[2:]
    excesses, rivals = {"adamw": [], "lean": []}, {}
    for setting, factor, *cells in settings:
        question = "rate_rule_wiki" if setting == "wiki" else "rate_rule"
        for arm, best, excess in (("adamw", *cells[:2]), ("lean", *cells[2:])):
            if not best:
                continue
            names = [name for name in results(question) if name.startswith(f"{setting} {arm} x")]
            seeds = {float(name.rpartition("x")[2]): valid(question, name) for name in names}
            losses = {multiple: of_seed[7] for multiple, of_seed in seeds.items()}
            recipe = results(question)[names[0]]["recipe"]["training"]
            rule = min(16, max(1, 15_000 / recipe["steps"]))
            assert float(factor) == pytest.approx(rule, rel=5e-3)
            lowest = min(losses, key=losses.get)
            assert float(best) == pytest.approx(rule * lowest, rel=5e-3)
            # The lowest is no edge, unless it is what was written down last.
            assert lowest not in (min(losses), max(losses)) or lowest in (0.25, 4)
            common = seeds[1].keys() & seeds[lowest].keys()
            above = np.mean([seeds[1][seed] - seeds[lowest][seed] for seed in common])
            assert numbers(excess)[0] == pytest.approx(above, abs=5.1e-4)
            assert ("(3 seeds)" in excess) == (len(common) == 3 and lowest != 1)
            excesses[arm].append(above)
            tried = sorted(losses)
            for name, at in (
                ("10,000", min(16, max(1, 10_000 / recipe["steps"]))),
                ("15,000", max(1, 15_000 / recipe["steps"])),
                ("50", 50 / recipe["steps"] / recipe["lr"]),
            ):
                loss = np.interp(np.log(at / rule), np.log(tried), [losses[m] for m in tried])
                rivals.setdefault((name, arm), []).append(loss - losses[lowest])
    lines = {"": of_rule, "10,000": of_10000, "15,000": of_no_cap, "50": of_50}
    for name, (_, _, _, adamw, _, lean) in lines.items():
        for arm, cell in (("adamw", adamw), ("lean", lean)):
            measured = rivals.get((name, arm), []) if name else excesses[arm]
            assert bool(cell) == bool(measured)
            if not cell:
                continue
            assert numbers(cell) == pytest.approx([np.mean(measured), max(measured)], abs=5.1e-4)


def test_wider():
    """Each cell of the wider model's table, its differences, and what other pages take from it."""
    page = (ROOT / "docs/study/wider.md").read_text(encoding="utf-8")
    arms = {"AdamW, 0, 0.999": "adamw 0 0.999", "LEAN": "lean"}
    arms |= {"AdamW, 0.9, 0.95": "adamw 0.9 0.95", "Ember": "ember"}
    valid_losses = {}
    for label, *losses, n, test, mean, seeds in rows("wider", page)[2:]:
        for cell, tried in zip(losses, (0, 2, 4), strict=True):
            name = f"{arms[label]} n={tried}"
            assert bool(cell) == (name in results("wider"))
            if cell:
                valid_losses[label, tried] = valid("wider", name)[1]
                check(cell, [valid_losses[label, tried]])
        of_n = runs("wider", f"{arms[label]} n={n}").values()
        assert int(seeds) == len(of_n)
        check(test, [run["test_loss"] for run in of_n])
        check(mean, [run["mean_norm_ratio"] for run in of_n])
    for label in ("LEAN", "AdamW, 0, 0.999"):
        assert min((0, 2, 4), key=lambda n: valid_losses[label, n]) == 2
    lean, adamw = (runs("wider", f"{arm} n=2") for arm in ("lean", "adamw 0 0.999"))
    differences = [lean[seed]["test_loss"] - adamw[seed]["test_loss"] for seed in (2, 3, 4, 5)]
    text = " ".join(page.split())
    said = text.split("seeds 2 to 5: ")[1].split(".  ")[0]
    expected = [*differences, np.mean(differences)]
    expected += [*stats.ttest_1samp(differences, 0).confidence_interval()]
    assert numbers(said)[:7] == pytest.approx(expected, abs=5.1e-4)
    low, high = expected[5:]
    assert low < 0  # not "broken"
    assert high > 0.010  # nor "made"
    higher = [
        valid_losses[label, 0] - valid_losses[label, 2] for label in ("LEAN", "AdamW, 0, 0.999")
    ]
    assert numbers(text.split("at 1, LEAN is")[1])[:2] == pytest.approx(higher, abs=5.1e-4)
    usual = runs("wider", "adamw 0.9 0.95 n=2")[1]["test_loss"]
    (above,) = re.search(r"0\.95\*\* is (\S+) above both", text).groups()
    for others in (lean, adamw):
        assert float(above) == pytest.approx(usual - others[1]["test_loss"], abs=5.1e-3)
    of_seeds = [
        np.std([run["test_loss"] for run in side.values()], ddof=1) for side in (lean, adamw)
    ]
    assert numbers(text.split("Seeds differ by")[1])[0] == pytest.approx(
        np.mean(of_seeds), abs=1e-3
    )
    interval = f"{low:.3f} to +{high:.3f}, four seeds"
    for name in ("README.md", "docs/study/README.md"):
        assert interval in " ".join((ROOT / name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("split", ["valid", "test"])
def test_documents(split):
    column = {"valid": 1, "test": 2}[split]
    best = betas(BEST)
    for label, *cells in rows("documents")[2:]:
        found, cell = betas(label), cells[column - 1]
        assert int(cells[2]) == len(found)
        if label == BEST:
            means = [np.mean(run["documents"][split]["losses"]) for run in found.values()]
            assert numbers(cell)[0] == pytest.approx(np.mean(means), abs=6e-5)
            continue
        seeds = [seed for seed in found if seed in best]
        losses = [
            np.subtract(*(side[seed]["documents"][split]["losses"] for side in (found, best)))
            for seed in seeds
        ]
        by_document = np.mean(losses, axis=0)
        mean, low, high = numbers(cell)
        assert mean == pytest.approx(by_document.mean(), abs=6e-5)
        error = by_document.std(ddof=1) / np.sqrt(len(by_document))
        assert low == pytest.approx(mean - 1.96 * error, abs=5e-4)
        assert high == pytest.approx(mean + 1.96 * error, abs=5e-4)
        assert cell.startswith("**") == (low > 0 or high < 0)


def test_headline():
    lines = rows("headline")[2:]
    tests = []
    for tokens, pair, *_ in lines:
        sides = []
        for label in pair.split(" against "):
            elsewhere = ELSEWHERE.get((tokens, label))
            seeds = runs(*elsewhere) if elsewhere else betas(label)
            sides.append({seed: run["test_loss"] for seed, run in seeds.items()})
        tests.append(sides)
    p = [
        stats.ttest_ind([*ours.values()], [*theirs.values()]).pvalue
        if min(len(ours), len(theirs)) > 1
        else np.nan
        for ours, theirs in tests
    ]
    order = [i for i in np.argsort(p) if not np.isnan(p[i])]
    steps = [p[i] * (len(order) - place) for place, i in enumerate(order)]
    corrected = dict(zip(order, itertools.accumulate(steps, max)))
    for i, ((ours, theirs), line) in enumerate(zip(tests, lines)):
        shown, of_test, of_holm, of_pairs, seeds = line[2:]
        difference = np.mean([*ours.values()]) - np.mean([*theirs.values()])
        assert float(shown.strip("*")) == pytest.approx(difference, abs=5.1e-4)
        assert seeds == f"{len(ours)}, {len(theirs)}"
        common = sorted(ours.keys() & theirs.keys())
        pairs = [[side[seed] for seed in common] for side in (ours, theirs)]
        paired = stats.ttest_rel(*pairs).pvalue if len(common) > 1 else np.nan
        for cell, value in (
            (of_test, p[i]),
            (of_holm, corrected.get(i, np.nan)),
            (of_pairs, paired),
        ):
            if np.isnan(value):
                assert not cell
            elif value < 0.001:
                assert cell == "< 0.001"
            else:
                assert float(cell) == pytest.approx(min(value, 1), rel=0.06)
        assert shown.startswith("**") == (corrected.get(i, 1) < 0.05)


def test_bands():
    shares, *lines = rows("bands")[2:]
    best = betas(BEST)
    tokens = np.array(best[1]["documents"]["test"]["band_tokens"])
    assert [f"{share:.0f} %" for share in 100 * tokens / tokens.sum()] == shares[1:]
    for label, *cells in lines:
        found = betas(label)
        bands = {
            seed: np.array(run["documents"]["test"]["band_losses"]) for seed, run in found.items()
        }
        if label != BEST:
            for seed in [*bands]:
                if seed not in best:
                    bands.pop(seed)
                else:
                    bands[seed] = bands[seed] - best[seed]["documents"]["test"]["band_losses"]
        expected = np.mean([*bands.values()], axis=0)
        assert [float(cell) for cell in cells] == pytest.approx(expected, abs=5.1e-4)


def test_what_the_page_says_of_peers():
    """The losses on the test documents, and how far what has no second moment is above LEAN."""
    text = PAGE.split("**What has a number for each row")[1].split("\n## ")[0]
    names = [
        *(("betas", "adamw 0 0.999 n=5"), ("zero_sum", "ember free n=7")),
        *(("zero_sum", "plain delayed free n=4"), ("table_rules", "adafactor free n=7")),
        *(("one_pass", "plain delayed n=4"), ("peers", "row_moment 0 0.99 n=5")),
        ("peers", "centered adamw 0 0.999 n=5"),
    ]
    measured = [[run["documents"]["test"]["loss"] for run in runs(*of).values()] for of in names]
    assert {len(losses) for losses in measured} == {3}
    after_20m = [("one_pass_longer", "adafactor free n=3"), ("betas_longer", "adamw 0 0.999 n=1")]
    measured += [[runs(*of)[1]["documents"]["test"]["loss"]] for of in after_20m]
    shown = [float(number) for number in re.findall(r"4\.\d{3}", text)]
    assert shown == pytest.approx([np.mean(losses) for losses in measured], abs=5.1e-4)
    (deepseek,) = re.search(r"rule\*\* is (0\.\d+) above AdamW", text).groups()
    best = min(
        valid("table_rules", name)[1]
        for name in results("table_rules")
        if name.startswith("balanced free")
    )
    assert float(deepseek) == pytest.approx(best - valid("betas", names[0][1])[1], abs=5.1e-3)
    without = [
        np.mean([run["documents"]["test"]["loss"] for run in runs("peers", name).values()])
        for name in results("peers")
        if not name.startswith(("centered", "row_moment"))
    ]
    (above,) = re.search(r"is (0\.\d+) or more above LEAN", text).groups()
    assert min(without) - np.mean(measured[4]) == pytest.approx(float(above), abs=5.1e-3)


TEN_SETTINGS = (
    ("betas", "a=0.75 0 0.99 n=4", "adamw 0 0.999 n=5"),
    ("betas_longer", "a=0.75 0 0.99 n=2", "adamw 0 0.999 n=1"),
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
    differences = []
    for question, *names in TEN_SETTINGS:
        lean, adamw = (
            {seed: run["documents"]["test"]["loss"] for seed, run in runs(question, name).items()}
            for name in names
        )
        common = lean.keys() & adamw.keys()
        differences.append(np.mean([lean[seed] - adamw[seed] for seed in common]))
    text = re.search(
        r"On average it is (\S+) above AdamW at 0, 0\.999, with a 95 % interval of (\S+) to (\S+) "
        r"\(p = (\S+)\).*without them it is (\S+) \((\S+) to (\S+)\)",
        " ".join(PAGE.split()),
    )
    shown = [*map(float, text.groups())]
    for (mean, low, high), of in ((shown[:3], differences), (shown[4:], differences[:-1])):
        test = stats.ttest_1samp(of, 0)
        assert mean == pytest.approx(np.mean(of), abs=5.1e-4)
        assert (low, high) == pytest.approx(test.confidence_interval(), abs=5.1e-4)
    assert shown[3] == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=5.1e-3)


def test_48_million_tokens():
    text = PAGE.split("After 23,436 steps")[1].split("\n\n")[0]
    of_each = [("betas_48M", name) for name in ("a=0.75 0 0.99 n=2", "adamw 0 0.999 n=2")]
    of_each += [("paper_ratio_longer", name) for name in ("coupled n=0", "adamw n=0")]
    measured = [run["test_loss"] for name in of_each for run in runs(*name).values()]
    shown = [float(number) for number in re.findall(r"4\.\d{3}", text)]
    assert shown == pytest.approx(measured, abs=5.1e-4)


def test_practice():
    """The table of docs/practice.md on which to choose."""
    page = (ROOT / "docs/practice.md").read_text(encoding="utf-8")
    text = page.split("## Which of them")[1].split("- **`LEAN`**")[0]
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()]
    lines = [line for line in lines if len(line) == 6][2:]
    expected = [
        (("scaled_longer", "adamw n=5"), ("betas_longer", "adamw 0.9 0.95 n=0")),
        (("betas", "adamw 0 0.999 n=5"), ("betas_longer", "adamw 0 0.999 n=1")),
        (("scaled_longer", "coupled n=5"), ("paper_ratio", "coupled n=0")),
        (("between_longer", "a=0.5 n=3"), ("paper_ratio", "a=0.5 n=2")),
        (("one_pass", "plain delayed n=4"), ("one_pass_longer", "plain delayed n=1")),
    ]
    assert len(lines) == len(expected)
    for (_, _, *cells), names in zip(lines, expected):
        for (loss, mean), name in zip((cells[:2], cells[2:]), names):
            measured = runs(*name).values()
            assert len(measured) == (5 if name[0] in ("betas_longer", "one_pass_longer") else 3)
            of_loss = np.mean([run["valid_loss"] for run in measured])
            of_mean = np.mean([run["mean_norm_ratio"] for run in measured])
            assert float(loss) == pytest.approx(of_loss, abs=5.1e-4)
            decimals = len(mean.partition(".")[2])
            assert float(mean) == pytest.approx(of_mean, abs=0.51 * 10**-decimals)


def test_new_tokens():
    """What docs/practice.md says of few rows, of few steps, and of finetuning, tied and untied."""
    path = ROOT / "benchmarks/results/new_tokens.json"
    of_seed = {}  # losses by setting and rate
    for run in json.loads(path.read_text())["results"]:
        if run["question"] != "size" and run["optimizer"]:
            setting = (run.get("tied"), run.get("frozen"), run["optimizer"])
            losses = of_seed.setdefault(setting, {}).setdefault(run["factor"], [])
            losses.append(run.get("test", run["valid"])["loss"])
    assert all(len(by_rate) >= 4 for by_rate in of_seed.values())
    # The best rate on validation is the one that has all seeds.
    loss = {
        setting: np.mean([losses for losses in by_rate.values() if len(losses) == 3])
        for setting, by_rate in of_seed.items()
    }
    adamw, tuned, momentum = "AdamW", "AdamW, betas 0, 0.999", "LEAN, betas 0.9, 0.999"
    page = " ".join((ROOT / "docs/practice.md").read_text(encoding="utf-8").split())
    text = page.split("**With all rows trained**")[1]
    usual, of_tied, of_untied, higher = map(float, re.findall(r" (0\.\d\d) ", text)[:4])
    for tied, below_tuned in ((True, of_tied), (False, of_untied)):
        lean = loss[tied, False, "LEAN"]
        measured = [loss[tied, False, rule] - lean for rule in (adamw, tuned, momentum)]
        assert measured == pytest.approx([usual, below_tuned, higher], abs=5.1e-3)
    (within,) = re.search(r"rows frozen\*\*, all were within (0\.\d+) after", text).groups()
    for tied in (True, False):
        frozen = [value for (t, masked, _), value in loss.items() if (t, masked) == (tied, True)]
        assert max(frozen) - min(frozen) < float(within)
    above, below = re.search(
        r"`LEAN` was (\S+) above .* `LEAN` was (\S+) below AdamW", text
    ).groups()
    scratch = {rule: value for (tied, _, rule), value in loss.items() if tied is None}
    usual_momentum = scratch["AdamW, betas 0.9, 0.999"]
    assert scratch["LEAN"] - usual_momentum == pytest.approx(float(above), abs=5.1e-3)
    assert usual_momentum - scratch[momentum] == pytest.approx(float(below), abs=5.1e-3)


def test_movement():
    """The table on momentum: means over windows, of the rarer half, and over all bands."""
    page = (ROOT / "docs/study/momentum.md").read_text(encoding="utf-8")
    windows = {}
    for training, name in (("adamw", "adamw 0.9 0.95 n=4"), ("lean", "a=0.75 0 0.99 n=4")):
        (run,) = runs("movement", name).values()
        windows[training] = [window["rules"] for window in run["windows"]]
    lines = rows("movement", page)[2:]
    assert len(lines) == len(windows["lean"][0])
    for rule, *cells in lines:
        expected = [np.mean([window[rule]["in_batch"][-1] for window in windows["lean"]])]
        for of_run in windows.values():
            cosines = [window[rule]["cosine"] for window in of_run]
            expected += [np.mean(cosines), np.mean([of_window[-1] for of_window in cosines])]
        assert [float(cell) for cell in cells] == pytest.approx(expected, abs=5.1e-3)


def test_what_the_page_on_momentum_concludes():
    """Late movement, the lower cosines in LEAN's training, and beta2 for rare tokens."""
    rules = {}
    for training, name in (("adamw", "adamw 0.9 0.95 n=4"), ("lean", "a=0.75 0 0.99 n=4")):
        (run,) = runs("movement", name).values()
        windows = [window["rules"] for window in run["windows"]]
        assert len(windows) == 6
        rules[training] = {
            rule: {
                key: np.mean([w[rule][key] for w in windows], axis=0) for key in windows[0][rule]
            }
            for rule in windows[0]
        }
    adamw, lean = rules["adamw"], rules["lean"]
    for rule, measured in lean.items():
        late = 1 - measured["in_batch"][-1]
        assert late > 0.7 if " 0.9, 0.9" in rule else late < 0.095
        assert measured["in_batch"] == pytest.approx(adamw[rule]["in_batch"], abs=0.06)
    for with_momentum, without in (
        ("AdamW, 0.9, 0.95", "AdamW, 0, 0.95"),
        ("AdamW, 0.9, 0.999", "AdamW, 0, 0.999"),
        ("a = 0.75, 0.9, 0.99", "a = 0.75, 0, 0.99"),
    ):
        assert adamw[with_momentum]["cosine"].mean() > adamw[without]["cosine"].mean()
        ratio = lean[with_momentum]["cosine"].mean() / lean[without]["cosine"].mean()
        assert ratio == pytest.approx(2 / 3, abs=0.03)
        assert adamw[without]["cosine"].mean() == pytest.approx(
            lean[without]["cosine"].mean(), rel=0.05
        )
    for training in rules.values():
        for beta1 in ("0.9", "0"):
            short, long = (training[f"AdamW, {beta1}, {b}"]["cosine"][-1] for b in (0.95, 0.999))
            assert 0.5 < short / long < 0.8


def test_accuracy():
    """What docs/paper.md says of the downstream tasks."""
    page = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    shown, error = map(float, re.search(r"\[(0\.\d+) ± (0\.\d+)\]", page).groups())
    names = ("betas: adamw 0 0.99 n=5-seed-1", "betas: a=0.75 0 0.999 n=4-seed-1")
    for name in names:
        measured = results("accuracy")[name]
        assert len(measured["tasks"]) == 7
        assert measured["accuracy"] == pytest.approx(shown, abs=5.1e-4)
        assert measured["stderr"] == pytest.approx(error, abs=5.1e-4)


def test_short_runs_of_coupled_adam():
    """What docs/practice.md says of ``CoupledAdamW(model)`` alone, as losses on validation."""
    page = " ".join((ROOT / "docs/practice.md").read_text(encoding="utf-8").split())
    text = page.split("**`CoupledAdamW(model)` alone**")[1]
    shown = re.search(r"loss is (\S+), or (\S+) at its .* AdamW has (\S+) and `LEAN` (\S+) ", text)
    names = [
        *(("learning_rate", "lr=0.005 coupled"), ("between", "coupled n=6")),
        *(("between", "adamw n=9"), ("settings", "1.2M lean 0 0.99 n=8")),
    ]
    expected = [np.mean([*valid(*name).values()]) for name in names]
    assert [*map(float, shown.groups())] == pytest.approx(expected, abs=5.1e-3)
    assert expected == sorted(expected, reverse=True)


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
