"""The ``coupled-adam`` command. Each of its commands has a file in this package.

Each file defines ``Options``, a dataclass of its arguments, and ``run``. It imports large libraries
only in ``run``, so that ``--help`` does not load torch.
"""

import argparse
import difflib
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from coupled_adam.cli import (
    analyze,
    compare,
    evaluate,
    recipes,
    repair,
    report,
    sample,
    train,
)
from coupled_adam.cli.options import RecipeValues, add_arguments
from coupled_adam.cli.terminal import other_rank, quiet_libraries
from coupled_adam.errors import (
    PreemptedError,
    TrainingError,
    UsageError,
    did_you_mean,
    install,
    is_on_all_ranks,
    one_line,
    printable,
)

PREEMPTED = 75
"""The exit code after SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later"."""

_COMMANDS = {
    "compare": compare,
    "train": train,
    "evaluate": evaluate,
    "sample": sample,
    "report": report,
    "analyze": analyze,
    "repair": repair,
    "recipes": recipes,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    0: done. 1: a run failed (a loss that is not finite, a full disk). 2: unusable input.
    75: stopped by SIGTERM; training leaves a checkpoint. 130: interrupted by the user. After 1, 75
    and 130 the same command with ``--resume`` continues. Of several processes each says what went
    wrong in it, and the first one what all of them know.
    """
    arguments = _overrides_first(list(sys.argv[1:] if argv is None else argv))
    # They may be closed, as by 2>&-, and libraries write to them all the same.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    # A terminal whose encoding has no ‖ shows ? in its place, which is better than an error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    values: dict[str, Any] = {}
    try:
        name = _command_name(arguments)
        values = vars(_command_parser(name).parse_args(arguments[1:]))
        quiet_libraries()
        with _sigterm_raises():
            _COMMANDS[name].run(_COMMANDS[name].Options(**values))
        sys.stdout.flush()
    except PreemptedError as error:
        # It may come once more while Python ends, which should not change the exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        advice = "continue with --resume" if "resume" in values else "run the command again"
        _say(f"{one_line(error, longest=None)}; {advice}")
        return PREEMPTED
    except KeyboardInterrupt:
        # Ctrl-C may be pressed twice, and the second come on the way here.
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        advice = "; add --resume to the command to continue" if "resume" in values else ""
        print(file=sys.stderr)  # a second Ctrl-C may have kept the bar from ending its line
        _say(f"interrupted{advice}")
        return 130
    # What reads standard output, such as head, has seen enough.
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE
    except Exception as error:
        code, message = _explained(error, arguments, values)
        if code is None:
            raise
        rank = other_rank()
        if rank is None:
            _say(f"error: {message}")
        elif not is_on_all_ranks(error):
            print(f"coupled-adam: error: process {rank}: {message}", file=sys.stderr)
        return code
    return 0


def _explained(
    error: Exception, arguments: list[str], values: Mapping[str, Any]
) -> tuple[int | None, str]:
    """The exit code for an error, and what is said of it; no code for what is a bug."""
    message = one_line(error, longest=None)
    kept = "; what was finished is kept, continue with --resume" if "resume" in values else ""
    match error:
        case UsageError():
            # Texts are keys of a recipe, which the user may have given by an option.
            for option in ("text", "tokens"):
                if values.get(option) and f"--{option} " not in message:
                    message = message.replace(f"data.{option}=", f"--{option} ")
            return 2, f"{message}{_hint(arguments, message)}"
        case TrainingError():
            return 1, message
        case ModuleNotFoundError() if not (error.name or "").startswith("coupled_adam."):
            return 2, f"{error.msg.partition(':')[0]}; install it with: {install('lab')}"
        case OSError() if error.errno is not None:
            # If standard output is on the full disk, Python could not flush it at its end either.
            try:
                sys.stdout.flush()
            except OSError:
                _discard_output()
            path = error.filename2 or error.filename  # where something was to be renamed to
            reason = os.strerror(error.errno) + (f": {printable(str(path))}" if path else "")
            # There is no such file, so that nothing was begun that could be continued.
            if error.errno == errno.ENAMETOOLONG:
                return 2, reason
            limit = "; allow more with ulimit -n" if error.errno == errno.EMFILE else ""
            return 1, f"{reason}{limit}{kept}"
        case RuntimeError() if str(error).startswith("Symlink loop"):  # pathlib's, before 3.13
            return 2, message
    # torch's error for a CPU is a RuntimeError, which only its message tells from others.
    is_out_of_memory = isinstance(error, MemoryError) or "OutOfMemoryError" in repr(type(error))
    if is_out_of_memory or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in message):
        reason = one_line(error) if str(error) else "no more can be allocated"
        return 1, f"out of memory: {reason}{kept}"
    return None, message


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


def _command_name(arguments: list[str]) -> str:
    """The command that is called; ``--help`` and ``--version`` end here."""
    name = arguments[0] if arguments else ""
    if name in _COMMANDS:
        return name
    if name.startswith("-"):
        _overview().parse_args(arguments)
    commands = f"there are {', '.join(_COMMANDS)}"
    if not name or name.startswith("-"):
        raise UsageError(f"name a command first: {commands}")
    hint = did_you_mean(name, _COMMANDS, commands)
    raise UsageError(f"there is no command {one_line(name, 50)!r}: {hint}")


def _overview() -> argparse.ArgumentParser:
    """The parser of ``coupled-adam`` alone, which lists the commands."""
    from coupled_adam import __version__

    parser = _Parser("coupled-adam", "Compare optimizers for embeddings, and measure embeddings.")
    parser.add_argument("--version", action="version", version=f"coupled-adam {__version__}")
    commands = parser.add_subparsers(
        metavar="COMMAND", title="commands", parser_class=argparse.ArgumentParser
    )
    for name, command in _COMMANDS.items():
        commands.add_parser(name, help=(command.__doc__ or "").partition("\n")[0])
    parser.epilog = "coupled-adam COMMAND --help explains a command."
    return parser


def _command_parser(name: str) -> argparse.ArgumentParser:
    """The parser of a command; its file's docstring is the description."""
    command = _COMMANDS[name]
    parser = _Parser(f"coupled-adam {name}", command.__doc__)
    add_arguments(parser, command.Options)
    return parser


class _Parser(argparse.ArgumentParser):
    """Raises its errors, with the options as the user types them."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError instead of printing the usage and leaving."""
        raise UsageError(re.sub(r"^argument (\S+): ", r"\1: ", message))


class _HelpFormatter(argparse.HelpFormatter):
    """Help with the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        says_nothing = action.default in (None, False, [], argparse.SUPPRESS)
        return text if says_nothing or "default" in text else f"{text} (default: %(default)s)"


def _say(message: str) -> None:
    if other_rank() is None:
        print(f"coupled-adam: {message}", file=sys.stderr)


def _overrides_first(arguments: list[str]) -> list[str]:
    """Move ``key=value`` to the front, where no option that takes several values can consume it."""
    section = re.compile(r"(name|model|data|training|arms|seeds|variant)[.=]")
    return [*arguments[:1], *sorted(arguments[1:], key=lambda word: not section.match(word))]


def _hint(arguments: list[str], message: str) -> str:
    """Suggest the most similar option for an unknown one, or the key of the recipe that it is."""
    if not message.startswith("unrecognized arguments"):
        return ""
    command = _COMMANDS.get(arguments[0])
    parser = _command_parser(arguments[0]) if command else _overview()
    options = re.findall(r"--[a-z][a-z-]+", parser.format_help())
    for word in re.findall(r"(?<=\s)--?[\w.=-]+", message):
        name = word.partition("=")[0]
        if near := difflib.get_close_matches(name, options, n=1, cutoff=0.7):
            return f"; did you mean {near[0]}?"
        if command and issubclass(command.Options, RecipeValues):
            from coupled_adam.lab.checking import keys
            from coupled_adam.lab.recipe import Recipe

            if match := keys(Recipe, name.strip("-").replace("-", "_")):
                return f"; values of the recipe are given as {match[0]}=VALUE"
    return f"; see {parser.prog} --help"
