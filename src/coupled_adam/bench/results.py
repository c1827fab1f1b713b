"""The measurements of one optimizer in one case, and their conversion to and from JSON."""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from coupled_adam.bench.cases import Case
from coupled_adam.bench.timing import Quartiles


@dataclasses.dataclass(frozen=True)
class Timed:
    """The measurements of one optimizer in one case.

    Attributes:
        samples: triples of times in seconds: of a step, of a step of the baseline, and of a copy of
            the embedding matrix, measured immediately after one another.
        state_bytes: size of the optimizer's state in bytes.
        extra_bytes: the peak of what a step allocates in addition to parameters, gradients and
            state, in bytes; None if the device does not count allocations.
        moved_bytes: the least number of bytes that a step has to move between memory and processor;
            None if it is not known.
    """

    case: Case
    optimizer: str
    samples: list[tuple[float, float, float]]
    state_bytes: int
    extra_bytes: int | None
    moved_bytes: int | None

    @property
    def seconds(self) -> float:
        """Median time of a step in seconds."""
        return statistics.median(step for step, _, _ in self.samples)

    @property
    def baseline_seconds(self) -> float:
        """Median time of a step of the baseline in seconds."""
        return statistics.median(baseline for _, baseline, _ in self.samples)

    @property
    def ratio(self) -> Quartiles:
        """Time of a step relative to the baseline's, computed within each pair."""
        return Quartiles.of(step / baseline for step, baseline, _ in self.samples)

    @property
    def bandwidth(self) -> float | None:
        """``moved_bytes`` per second, as a share of the bandwidth of copying the matrix."""
        if self.moved_bytes is None:
            return None
        # A copy reads and writes the matrix once.
        copies = self.moved_bytes / (2 * self.case.matrix_bytes)
        return statistics.median(copies * copy / step for step, _, copy in self.samples)

    def to_dict(self) -> dict[str, Any]:
        """All fields and a summary, for JSON; samples are rounded to nanoseconds."""
        samples = [[round(seconds, 9) for seconds in sample] for sample in self.samples]
        summary = {
            "seconds": self.seconds,
            "ratio": self.ratio,
            "noisy": self.ratio.noisy,
            "bandwidth": self.bandwidth,
        }
        return {**dataclasses.asdict(self), "samples": samples, **summary}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Timed":
        """Inverse of :meth:`to_dict`; the summary is recomputed from the samples."""
        fields = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        samples = [(step, baseline, copy) for step, baseline, copy in values["samples"]]
        return cls(**{**fields, "case": Case(**values["case"]), "samples": samples})
