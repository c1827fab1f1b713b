"""The tables of docs/speed.md are those of the committed results."""

from bench.cases import Case
from bench.machine import Machine
from bench.results import Timed
from benchmarks import speed_table


def results(*timed, processor="Sparc", load=0.1, gpus=(), device="cpu"):
    """As the command writes them."""
    return {
        "environment": {
            "processor": processor,
            "threads": 2,
            "gpus": list(gpus),
            "packages": {"torch": "2.13.0+cpu"},
        },
        "machine": Machine(device, "VIS", 2, load, {}).to_dict(),
        "results": [one.to_dict() for one in timed],
    }


def timed(case, optimizer, *ratios):
    return Timed(case, optimizer, [(r, 1.0, 1.0) for r in ratios], 0, 0, None)


STEADY, NOISY = (0.9, 0.9, 0.9), (0.5, 1.0, 1.5)


def test_the_page_holds_what_the_script_makes():
    page = speed_table.PAGE.read_text()
    assert speed_table.committed("gpu")
    assert speed_table.committed("bench")
    assert speed_table.made_page(page) == page


def test_a_table_for_each_processor():
    files = {
        "sparc-clip.json": results(timed(Case(64, 8, clip=True), "CoupledAdamW", *STEADY)),
        "sparc.json": results(
            timed(Case(64, 8), "CoupledAdamW", *STEADY), timed(Case(64, 8), "AdamW", *NOISY)
        ),
        "alpha.json": results(timed(Case(1024, 8), "AdamW", *STEADY), processor="Alpha", load=7.0),
    }
    alpha, sparc = speed_table.tables(files).split("\n\n### ")
    assert alpha.startswith("### Alpha, VIS, 2 threads, torch 2.13.0\n")
    assert sparc.splitlines()[2:6] == [
        "| V × H | CoupledAdamW | AdamW |",
        "| ---: | ---: | ---: |",
        "| 64 × 8 | 0.90 | 1.00, noisy |",
        "| 64 × 8, clip | 0.90 |  |",
    ]


def test_a_table_for_each_gpu():
    """Of what was measured; an optimizer that failed has none."""
    record = results(device="Radeon", gpus=["Radeon"])
    record["environment"] |= {"packages": {"torch": "2.13.0+rocm"}, "commit": "abc1234"}
    steady, noisy = timed(Case(64, 8), "LEAN", *STEADY), timed(Case(64, 8), "Coupled Adam", *NOISY)
    record["steps"] = [
        steady.to_dict(),
        noisy.to_dict(),
        {"case": "64 × 8", "optimizer": "AdamW", "problem": "no memory"},
    ]
    lines = speed_table.gpu_tables({"radeon.json": record}).splitlines()
    assert lines[0] == "### Radeon, torch 2.13.0, commit abc1234"
    assert lines[2:5] == [
        "| V × H | AdamW fused, ms | LEAN | Coupled Adam |",
        "| ---: | ---: | ---: | ---: |",
        "| 64 × 8 | 1000.000 | 0.90 | 1.00, noisy |",
    ]
