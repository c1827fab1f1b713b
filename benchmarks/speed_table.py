"""Create the tables and the picture of docs/speed.md from the committed results.

    python benchmarks/gpu.py
    python benchmarks/speed.py --json > benchmarks/results/bench/amd-epyc-1.json
    python benchmarks/speed.py --json --clip > benchmarks/results/bench/amd-epyc-clip-1.json
    python benchmarks/speed_table.py

There is a table of medians for each GPU. There is one for each processor, which combines all files
with the same processor, instruction set, number of threads and version of torch. Its ratios are
computed from the samples, of all files that have an optimizer in a case: a shared machine's memory
is not equally fast at all times. The text between the markers in the page is replaced.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cases import Case
from bench.results import Timed, bench_picture
from bench.timing import Quartiles

from coupled_adam.files import write_atomically
from coupled_adam.rendering.tables import Table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "speed.md"
PICTURE = ROOT / "docs" / "images" / "bench.png"
NOT_SHOWN = ("LEAN, momentum", "Ember", "LEAN, fused=False")
"""Measured on a GPU, but of no use to choose by."""
BEGIN = "<!-- made by benchmarks/speed_table.py, {}: begin -->"
END = "<!-- made by benchmarks/speed_table.py, {}: end -->"


def gpu_tables(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Format tables for each GPU; ``files`` are what benchmarks/gpu.py has written, by name."""
    return "\n\n".join(gpu_section(name, files[name]) for name in sorted(files))


def gpu_section(name: str, record: Mapping[str, Any]) -> str:
    """Medians of times relative to the fused AdamW's, by case and optimizer."""
    environment = record["environment"]
    software = [
        f"{package} {v.partition('+')[0]}" for package, v in environment["packages"].items()
    ]
    facts = [record["machine"]["device"], *software, f"commit {environment['commit']}"]
    results = [result for part in ("steps", "host") for result in record.get(part, ())]
    results = [result for result in results if "problem" not in result]
    measured = dict.fromkeys(result["optimizer"] for result in results)
    optimizers = [name for name in measured if name not in NOT_SHOWN]
    ratios: dict[tuple[Case, str], str] = {}
    baselines: dict[Case, list[float]] = {}
    for result in results:
        case, ratio = Case(**result["case"]), Quartiles(*result["ratio"])
        ratios[case, result["optimizer"]] = cell(ratio)
        baselines.setdefault(case, []).append(1e3 * result["baseline_seconds"])
    rows = [
        [
            case.label,
            f"{statistics.median(milliseconds):.3f}",
            *(ratios.get((case, name), "") for name in optimizers),
        ]
        for case, milliseconds in baselines.items()
    ]
    made = Table(["V × H", "AdamW fused, ms", *optimizers], rows, left=()).markdown()
    link = f"All numbers: [{name}](../benchmarks/results/gpu/{name})."
    return "\n".join([f"### {', '.join(facts)}", "", made, link])


def tables(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a Markdown heading and table for each processor; ``files`` is JSON by file name."""
    by_processor: dict[str, list[Timed]] = {}
    for name in sorted(files, key=lambda name: Path(name).stem):
        by_processor.setdefault(heading(files[name]), []).extend(timed(files[name]))
    return "\n\n".join(
        f"### {title}\n\n{table(pooled(results))}" for title, results in by_processor.items()
    )


def heading(record: Mapping[str, Any]) -> str:
    environment = record["environment"]
    machine = record.get("machine", {})  # missing in results of earlier versions
    facts = [
        environment["gpus"][0] if machine.get("device") in environment["gpus"] else "",
        environment["processor"],
        machine.get("instructions", ""),
        f"{environment['threads']} threads",
        f"torch {environment['packages']['torch'].partition('+')[0]}",
    ]
    return ", ".join(filter(None, facts))


def pooled(results: Iterable[Timed]) -> list[Timed]:
    """Put together what several files have of the same optimizer in the same case."""
    together: dict[tuple[Case, str], Timed] = {}
    for result in results:
        key = result.case, result.optimizer
        samples = [*together[key].samples, *result.samples] if key in together else result.samples
        together[key] = dataclasses.replace(result, samples=samples)
    return [*together.values()]


def table(results: Sequence[Timed]) -> str:
    cells = {(result.case, result.optimizer): cell(result.ratio) for result in results}
    cases = list(dict.fromkeys(result.case for result in results))
    optimizers = list(dict.fromkeys(result.optimizer for result in results))
    rows = [[case.label, *(cells.get((case, o), "") for o in optimizers)] for case in cases]
    return Table(["V × H", *optimizers], rows, left=()).markdown().rstrip()


def cell(ratio: Quartiles) -> str:
    return f"{ratio.median:.2f}" + ", noisy" * ratio.noisy


def committed(folder: str) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in (RESULTS / folder).glob("*.json")}


def made_page(page: str) -> str:
    """The page, with the tables of the committed results between its markers."""
    for name, made in (("gpu", gpu_tables(committed("gpu"))), ("cpu", tables(committed("bench")))):
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n\n{made}\n\n{end}{after}"
    return page


def timed(record: Mapping[str, Any]) -> list[Timed]:
    return [Timed.from_dict(values) for values in record["results"]]


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    write_atomically(PAGE, made_page(PAGE.read_text()))
    records = committed("bench")
    measured = [result for name in sorted(records) for result in timed(records[name])]
    bench_picture(pooled(measured)).savefig(PICTURE, dpi=100)
