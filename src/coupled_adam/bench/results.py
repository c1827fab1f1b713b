"""What was measured of one optimizer in one case, in JSON and back."""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from coupled_adam.bench.cases import Case
from coupled_adam.bench.timing import Quartiles


@dataclasses.dataclass(frozen=True)
class Timed:
    """One optimizer in one case.

    Attributes:
        samples: seconds of a step, of a step of the baseline, and of a copy of the embedding
            matrix, each three taken right after one another.
        state_bytes: size of the optimizer's state.
        extra_bytes: the most that a step holds beside parameters, gradients and state; None where
            the device does not count that.
        moved_bytes: what a step has to move between memory and processor at least; None where that
            is not known.
    """

    case: Case
    optimizer: str
    samples: list[tuple[float, float, float]]
    state_bytes: int
    extra_bytes: int | None
    moved_bytes: int | None

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(step for step, _, _ in self.samples)

    @property
    def baseline_seconds(self) -> float:
        """Median time of a step of the baseline."""
        return statistics.median(baseline for _, baseline, _ in self.samples)

    @property
    def ratio(self) -> Quartiles:
        """Time of a step relative to the baseline's, within pairs."""
        return Quartiles.of(step / baseline for step, baseline, _ in self.samples)

    @property
    def bandwidth(self) -> float | None:
        """``moved_bytes`` per second, relative to a copy, which reads and writes one matrix."""
        if self.moved_bytes is None:
            return None
        copies = self.moved_bytes / (2 * self.case.matrix_bytes)
        return statistics.median(copies * copy / step for step, _, copy in self.samples)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON; samples in whole nanoseconds."""
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
        """From what :meth:`to_dict` made; its summary is computed anew from the samples."""
        fields = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        samples = [(step, baseline, copy) for step, baseline, copy in values["samples"]]
        return cls(**{**fields, "case": Case(**values["case"]), "samples": samples})
