"""``python faulty.py FAULT NUMBER ...``: the command, with a fault at the n-th call of a function.

Run by :class:`laboratory.Laboratory` in a process of its own.
"""

import errno
import os
import resource
import signal
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from coupled_adam import cli, files
from coupled_adam.lab.evaluation import evaluate as evaluation
from coupled_adam.lab.training import distributed
from coupled_adam.lab.training import train as training
from coupled_adam.lab.training.module import LanguageModel

OPERATIONS = []


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def at(number, module, name, fault, counts=lambda *_: True):
    """Call ``fault`` instead of a function at its n-th call, of those that count."""
    function = getattr(module, name)
    calls = 0

    def counted(*arguments, **options):
        nonlocal calls
        calls += counts(*arguments)
        return (fault if calls == number else function)(*arguments, **options)

    setattr(module, name, counted)


def write_half(content, file, save=torch.save):
    """What is on the disk when a process is killed while it writes a checkpoint."""
    save(content, file)
    file.flush()
    os.truncate(file.name, Path(file.name).stat().st_size // 2)
    kill()


def interrupted(content, file, save=torch.save):
    """Ctrl-C while torch writes the bytes of a checkpoint."""

    class Interrupted:
        def write(self, data):
            signal.raise_signal(signal.SIGINT)
            return file.write(data)

        def flush(self):
            file.flush()

    save(content, Interrupted())


def terminated(*arguments, write=files.write_atomically):
    """SIGTERM from a cluster's scheduler."""
    os.kill(os.getpid(), signal.SIGTERM)
    write(*arguments)


def not_finite(*arguments, loss=LanguageModel.loss):
    return loss(*arguments) * float("nan")


def on_rank(rank, fault, function):
    def chosen(*arguments):
        return (fault if distributed.rank() == rank else function)(*arguments)

    return chosen


def disk_error():
    raise OSError(errno.EIO, os.strerror(errno.EIO))


OPERATION_FAULTS = {
    "kill": kill,
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "ctrl-c": lambda: os.kill(os.getpid(), signal.SIGINT),
    "disk-error": disk_error,
}


def at_operation(number, fault):
    """Call ``fault`` before the n-th operation that changes something below $WATCHED."""
    watched, writes = os.environ["WATCHED"], os.O_WRONLY | os.O_RDWR | os.O_CREAT
    changes = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate"}

    def hook(event, arguments):
        changes_something = event in changes or (event == "open" and arguments[2] & writes)
        if changes_something and str(arguments[0]).startswith(watched):
            OPERATIONS.append(event)
            if len(OPERATIONS) == number:
                fault()

    sys.addaudithook(hook)
    # Pictures take most of a report's time, and what is in them none of its operations.
    Figure.savefig = lambda _, file, **__: file.write(b"a picture")


def is_checkpoint(path, *_):
    return path.parent.name == "checkpoints"


def build_in(fault, number):
    if fault == "limit-of-one" and os.environ["RANK"] != "1":
        return
    if fault in ("limit", "limit-of-one"):  # a disk that has no room for larger files
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
        return
    if fault in OPERATION_FAULTS:
        at_operation(number, OPERATION_FAULTS[fault])
        return
    loss = LanguageModel.loss
    places = {
        "checkpoint": (torch, "save", write_half),
        "rename": (Path, "rename", kill, is_checkpoint),
        "interrupt": (torch, "save", interrupted),
        "term": (evaluation, "write_atomically", terminated),
        "model": (training, "save_model", kill),
        "evaluation": (evaluation, "write_atomically", kill),
        "nan": (LanguageModel, "loss", on_rank(1, not_finite, loss)),
        "death-of-0": (LanguageModel, "loss", on_rank(0, kill, loss)),
        "death-of-1": (LanguageModel, "loss", on_rank(1, kill, loss)),
    }
    at(number, *places[fault])


if __name__ == "__main__":
    build_in(sys.argv[1], int(sys.argv[2]))
    code = cli.main(sys.argv[3:])
    if OPERATIONS:
        Path(os.environ["WATCHED"], "operations").write_text(str(len(OPERATIONS)))
    sys.exit(code)
