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

    @functools.cached_property
    def medians(self) -> dict[str, float]:
        """The median of each measure that was measured, by its key."""
        return {key: median for key, (_, median, _) in self.measures.items()}


@functools.cache
def references() -> list[Reference]:
    """All of them, those of packages first."""
    content = json.loads(Path(__file__).with_name("references.json").read_text(encoding="utf-8"))
    return [Reference(name, **entry) for name, entry in content.items()]


@functools.cache
def span(key: str) -> str:
    """From which to which median the references reach, if a measure can be compared with them."""
    values = [r.medians[key] for r in references() if key in r.medians]
    if not (MEASURES[key].comparable and values):
        return ""
    return f"{_shown(min(values))} to {_shown(max(values))}"


def place(key: str, value: float) -> str:
    """Between which references a value lies: a fragment of a sentence that names them."""
    # Not all of them have each measure.
    ordered = sorted((r.medians[key], r.name) for r in references() if key in r.medians)
    below = sum(median <= value for median, _ in ordered)
    nearest = [f"{name} ({_shown(median)})" for median, name in ordered[max(0, below - 1) :][:2]]
    if below == 0:
        return f"below all {len(ordered)} references, of which {nearest[0]} is the lowest"
    if below == len(ordered):
        return f"above all {len(ordered)} references, of which {nearest[0]} is the highest"
    return f"between {nearest[0]} and {nearest[1]}"


def _shown(value: float) -> str:
    """Two digits, since a reference may be far below others."""
    return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.2f}"
