"""How long an optimizer's step takes and what memory it needs, in pairs with torch's fused AdamW.

What :func:`bench` does in the order of its files: :mod:`cases` (what is stepped), :mod:`optimizers`
(by what), :mod:`timing` and :mod:`memory` (how it is measured), :mod:`results` (what was measured),
:mod:`tables` and :mod:`pictures`, which import rich and matplotlib when they are called.
:mod:`training` times whole training steps of a recipe; it alone needs the laboratory.
"""

from coupled_adam.bench.cases import (
    GROWING,
    GROWTH,
    SHAPES,
    Case,
    check_memory,
    parse_case,
)
from coupled_adam.bench.machine import Machine, describe_machine
from coupled_adam.bench.optimizers import BASELINE, Candidate, optimizers_here
from coupled_adam.bench.pictures import bench_picture, check_format, growth_picture, save_figure
from coupled_adam.bench.results import Timed
from coupled_adam.bench.steps import bench
from coupled_adam.bench.tables import bench_table

__all__ = [
    "BASELINE",
    "GROWING",
    "GROWTH",
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
    "growth_picture",
    "optimizers_here",
    "parse_case",
    "save_figure",
]
