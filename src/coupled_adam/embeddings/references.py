"""Where a measure lies among embedding matrices that have a name.

Their measures are in ``references.json``, which benchmarks/reference_embeddings.py makes: of models
that packages ship, and of all runs of some arms of docs/study.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from coupled_adam.embeddings.measures import MEASURES


@dataclasses.dataclass(frozen=True)
class Reference:
    """One matrix, or those of several runs."""

    name: str
    matrices: int
    sizes: str  # V x H
    measures: Mapping[str, Sequence[float]]  # the least, the median and the largest value of each

    def median(self, key: str) -> float | None:
        """The median of a measure; None if it was not measured."""
        return self.measures[key][1] if key in self.measures else None


@functools.cache
def references() -> list[Reference]:
    """All of them, those of packages first."""
    content = json.loads(Path(__file__).with_name("references.json").read_text(encoding="utf-8"))
    return [Reference(name, **entry) for name, entry in content.items()]


def span(key: str) -> str:
    """From which to which median the references reach, if a measure can be compared with them."""
    values = [value for value in (r.median(key) for r in references()) if value is not None]
    if not (MEASURES[key].comparable and values):
        return ""
    return f"{_shown(min(values))} to {_shown(max(values))}"


def place(key: str, value: float) -> str:
    """Between which references a value lies: a fragment of a sentence that names them."""
    # Not all of them have each measure.
    values = ((median, r.name) for r in references() if (median := r.median(key)) is not None)
    ordered = sorted(values)
    below = [f"{name} ({_shown(median)})" for median, name in ordered if median <= value]
    above = [f"{name} ({_shown(median)})" for median, name in ordered if median > value]
    if not below:
        return f"below all {len(above)} references, of which {above[0]} is the lowest"
    if not above:
        return f"above all {len(below)} references, of which {below[-1]} is the highest"
    return f"between {below[-1]} and {above[0]}"


def _shown(value: float) -> str:
    """Two digits, since a reference may be far below others."""
    return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.2f}"
