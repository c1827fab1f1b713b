"""The ``coupled-adam`` command. Each of its commands has a file in this package.

Each file defines ``Options``, a dataclass of its arguments, and ``run``. It is imported only when
the command is called, and imports large libraries only in ``run``, so that ``--help`` is fast.
"""

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import NoReturn

from coupled_adam.cli.terminal import other_rank, quiet_libraries
from coupled_adam.errors import (
    PreemptedError,
    TrainingError,
    UsageError,
    did_you_mean,
    is_on_all_ranks,
    one_line,
    printable,
)

PREEMPTED = 75
"""The exit code after SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later"."""

RESUMABLE = ("compare", "train")
"""The commands that continue with ``--resume``."""

COMMANDS = {
    "compare": "compare optimizers of the embeddings on real text",
    "train": "train and evaluate one run of a comparison",
    "evaluate": "evaluate a run, or any causal language model, or print texts that they write",
    "report": "write the report of finished runs",
    "analyze": "measure the token embeddings of any model",
    "repair": "write a copy of a model in which dead embeddings are repaired",
    "recipes": "list the recipes, or print one with the meaning of each key",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    0: done. 1: a run failed (a loss that is not finite, a full disk). 2: unusable input.
    75: stopped by SIGTERM; training leaves a checkpoint. 130: interrupted by the user. After 1, 75
    and 130 the same command with ``--resume`` continues. Of several processes each says what went
    wrong in it, and the first one what all of them know.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # They may be closed, as by 2>&-, and libraries write to them all the same.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    # A terminal whose encoding has no ‖ shows ? instead, which is better than an error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    name = words[0] if words else ""
    try:
        if name in ("-h", "--help", "--version"):
            print(_overview() if name != "--version" else _version())
            return 0
        command = load_command(name)
        options = parse(name, command, words[1:])
        quiet_libraries()
        with _sigterm_raises():
            command.run(options)
        sys.stdout.flush()
        return 0
    except PreemptedError as error:
        # It may come once more while Python ends, which should not change the exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        advice = "continue with --resume" if name in RESUMABLE else "run the command again"
        _say(f"{one_line(error, longest=None)}; {advice}")
        return PREEMPTED
    except KeyboardInterrupt:
        # Ctrl-C may be pressed twice, and the second come on the way here.
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        advice = "; add --resume to the command to continue" if name in RESUMABLE else ""
        print(file=sys.stderr)  # a second Ctrl-C may have kept the bar from ending its line
        _say(f"interrupted{advice}")
        return 130
    # What reads standard output, such as head, has seen enough.
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE
    except Exception as error:
        code, message = _explained(error, name, words)
        if not code:  # a bug
            raise
        # If standard output is on the full disk, Python could not flush it at its end either.
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()
        # The first process says what all of them know.
        rank = other_rank()
        if rank is not None and not is_on_all_ranks(error):
            print(f"coupled-adam: error: process {rank}: {message}", file=sys.stderr)
        _say(f"error: {message}")
        return code


def _explained(error: Exception, command: str, words: Sequence[str]) -> tuple[int, str]:
    """The exit code and the message of an error; 0 and nothing if it is a bug."""
    kept = "; what was finished is kept, continue with --resume"
    kept = kept if command in RESUMABLE else ""
    match error:
        case UsageError():
            message = one_line(error, longest=None)
            # Texts are keys of a recipe, which the user may have given by an option.
            for option in ("text", "tokens"):
                if f"--{option}" in words:
                    message = message.replace(f"data.{option}=", f"--{option} ")
            return 2, message
        case TrainingError():
            return 1, one_line(error, longest=None)
        case ModuleNotFoundError() if not (error.name or "").startswith("coupled_adam."):
            reason = error.msg.partition(":")[0]
            return 2, f"{reason}; install it with: pip install 'coupled-adam[lab]'"
        case OSError() if error.errno is not None:
            path = error.filename2 or error.filename  # where something was to be renamed to
            reason = os.strerror(error.errno) + (f": {printable(str(path))}" if path else "")
            return (2, reason) if error.errno == errno.ENAMETOOLONG else (1, reason + kept)
        case MemoryError() | RuntimeError():
            # torch's error for a CPU is a RuntimeError, which only its message tells from others.
            out_of_memory = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
            if out_of_memory or "DefaultCPUAllocator" in str(error):
                return 1, f"out of memory: {one_line(error)}{kept}"
    return 0, ""


def load_command(name: str) -> ModuleType:
    """The module of a command; UsageError if there is none of this name."""
    commands = f"there are {', '.join(COMMANDS)}"
    if not name or name.startswith("-"):
        raise UsageError(f"name a command first: {commands}")
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, commands)
        raise UsageError(f"there is no command {one_line(name, 50)!r}: {hint}")
    return importlib.import_module(f"coupled_adam.cli.{name}")


def parse(name: str, command: ModuleType, words: Sequence[str]) -> object:
    """The options of a command; its docstring is the description in its help."""
    from coupled_adam.cli.parser import Parser, parsed

    parser = Parser(f"coupled-adam {name}", command.__doc__)
    options: object = parsed(command.Options, parser, words)
    return options


def _overview() -> str:
    lines = [f"  {name:10} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: coupled-adam COMMAND ...",
            "\nCompare optimizers for embeddings, and measure embeddings.",
            "\ncommands:",
            *lines,
            "\ncoupled-adam COMMAND --help explains a command, and has an example of it.",
        ]
    )


def _version() -> str:
    from coupled_adam import __version__

    return f"coupled-adam {__version__}"


def _say(message: str) -> None:
    if other_rank() is None:
        print(f"coupled-adam: {message}", file=sys.stderr)


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end the command as it ends training: in order, and with its own exit code."""

    def stop(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may come again, and again
        raise PreemptedError("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, before)
