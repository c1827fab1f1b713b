"""Time and memory of an optimizer's step, compared in pairs with torch's fused AdamW.

The modules, in the order in which :func:`bench` uses them: :mod:`cases` (the parameters that are
updated), :mod:`optimizers` (the optimizers that update them), :mod:`timing` and :mod:`memory` (how
a step is measured), :mod:`results` (the measurements), :mod:`tables` and :mod:`pictures` (which
import rich and matplotlib only when they are called). :mod:`training` times whole training steps
of a recipe; it is the only module that needs the laboratory.
"""

from coupled_adam.bench.cases import (
    SHAPES,
    Case,
    check_memory,
    parse_case,
)
from coupled_adam.bench.machine import Machine, describe_machine
from coupled_adam.bench.optimizers import BASELINE, OPTIMIZERS, Candidate
from coupled_adam.bench.pictures import bench_picture, check_format, save_figure
from coupled_adam.bench.results import Timed
from coupled_adam.bench.steps import bench
from coupled_adam.bench.tables import bench_table

__all__ = [
    "BASELINE",
    "OPTIMIZERS",
    "SHAPES",
    "Candidate",
    "Case",
    "Machine",
    "Timed",
    "bench",
    "bench_picture",
    "bench_table",
    "check_format",
    "check_memory",
    "describe_machine",
    "parse_case",
    "save_figure",
]
