"""``python faulty.py FAULT NUMBER ...``: the command, with a fault at the n-th call of a function.

Run by :class:`laboratory.Laboratory` as a process of its own.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from coupled_adam import cli
from coupled_adam.lab.evaluation import evaluate as evaluation
from coupled_adam.lab.reporting import report as reporting
from coupled_adam.lab.training import distributed
from coupled_adam.lab.training import run as training
from coupled_adam.lab.training.module import LanguageModel


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def at(number, module, name, fault):
    """Call ``fault`` instead of a function at its n-th call."""
    function = getattr(module, name)
    calls = 0

    def counted(*arguments, **options):
        nonlocal calls
        calls += 1
        return (fault if calls == number else function)(*arguments, **options)

    setattr(module, name, counted)


def write_half(content, file, save=torch.save):
    """What is on the disk when a process is killed while it writes a checkpoint."""
    save(content, file)
    file.flush()
    os.truncate(file.name, Path(file.name).stat().st_size // 2)
    kill()


def not_finite(*arguments, loss=LanguageModel.loss):
    return loss(*arguments) * float("nan")


def on_rank_one(fault, function):
    def chosen(*arguments):
        return (fault if distributed.rank() == 1 else function)(*arguments)

    return chosen


def build_in(fault, number):
    loss = LanguageModel.loss
    places = {
        "checkpoint": (torch, "save", write_half),
        "rename": (Path, "rename", kill),
        "model": (training, "save_model", kill),
        "evaluation": (evaluation, "write_atomically", kill),
        "figures": (reporting, "draw_all", kill),
        "page": (reporting, "render", kill),
        "nan": (LanguageModel, "loss", on_rank_one(not_finite, loss)),
        "death": (LanguageModel, "loss", on_rank_one(kill, loss)),
    }
    at(number, *places[fault])


if __name__ == "__main__":
    build_in(sys.argv[1], int(sys.argv[2]))
    sys.exit(cli.main(sys.argv[3:]))
