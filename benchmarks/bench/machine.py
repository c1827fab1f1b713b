"""The machine on which steps are timed: everything about it that affects their time."""

import dataclasses
import os
from typing import Any

import torch

from coupled_adam.optim.kernels import kernels


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device, and how busy the machine was.

    Attributes:
        device: the name of the GPU, or "cpu".
        instructions: the CPU instruction set that torch's kernels use, such as "AVX2".
        threads: the number of threads that torch's operations on the CPU use.
        load: the mean number of running or waiting processes over the last minute, if known.
        kernels: which of Coupled Adam's kernels can be used, see :func:`coupled_adam.kernels`.
    """

    device: str
    instructions: str
    threads: int
    load: float | None
    kernels: dict[str, str]

    @property
    def busy(self) -> bool:
        """Whether other processes probably slowed down the measurements."""
        return self.load is not None and self.load > self.threads

    @property
    def notes(self) -> list[str]:
        """Sentences for the terminal."""
        listed = ", ".join(f"{name} {state}" for name, state in self.kernels.items())
        notes = [f"Kernels of Coupled Adam: {listed}."]
        if self.busy:
            notes.append(
                f"The machine was busy when this began (load average {self.load:.1f}, "
                f"{self.threads} threads used here): measure again when it is idle."
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """All fields and :attr:`busy`, for JSON."""
        return {**dataclasses.asdict(self), "busy": self.busy}


def describe_machine(device: str) -> Machine:
    """Describe the machine in its current state. Call this before anything is timed."""
    return Machine(
        device=torch.cuda.get_device_name() if device == "cuda" else device,
        instructions=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2),
        kernels=kernels(),
    )
