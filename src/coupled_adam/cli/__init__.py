"""The ``coupled-adam`` command. Each of its commands has a file in this package.

Each file defines ``Options``, ``add_arguments`` and ``run``. It imports large libraries only in
``run``, so that ``--help`` does not load torch.
"""

import argparse
import difflib
import os
import re
import signal
import sys
from collections.abc import Sequence

try:
    import jsonargparse

    from coupled_adam.cli import analyze, bench, compare, evaluate, recipes, report, theory, train
    from coupled_adam.cli.options import plain
    from coupled_adam.cli.terminal import is_other_rank
except ModuleNotFoundError as error:
    sys.exit(f"coupled-adam: {error}; install the command with: pip install 'coupled-adam[lab]'")

from coupled_adam.errors import UsageError, one_line, printable
from coupled_adam.lab.training.errors import PreemptedError, TrainingError

PREEMPTED = 75
"""The exit code after SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later"."""

_COMMANDS = {
    "compare": compare,
    "train": train,
    "evaluate": evaluate,
    "report": report,
    "analyze": analyze,
    "theory": theory,
    "bench": bench,
    "recipes": recipes,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    0: done. 1: a run failed (a loss that is not finite, a full disk). 2: unusable input.
    75: stopped by SIGTERM, with a checkpoint. 130: interrupted by the user. After 1, 75 and 130 the
    same command with ``--resume`` continues.
    """
    arguments = _overrides_first(list(sys.argv[1:] if argv is None else argv))
    try:
        chosen = _parser().parse_args(arguments)
        command = _COMMANDS[chosen.command]
        given = chosen[chosen.command].as_dict()
        command.run(command.Options(**{name: plain(value) for name, value in given.items()}))
    except (jsonargparse.ArgumentError, UsageError) as error:
        message = one_line(error, longest=None)
        return _fail(2, f"error: {message}{_hint(arguments, message)}")
    except TrainingError as error:
        return _fail(1, f"error: {one_line(error, longest=None)}")
    except OSError as error:
        if error.errno is None:
            raise
        where = f": {printable(str(error.filename))}" if error.filename else ""
        what = f"error: {os.strerror(error.errno)}{where}"
        return _fail(1, f"{what}; what was finished is kept, continue with --resume")
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        what = one_line(error) if str(error) else "no more can be allocated"
        return _fail(
            1, f"error: out of memory: {what}. What was finished is kept, continue with --resume"
        )
    except PreemptedError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Python's end would let it through
        return _fail(PREEMPTED, f"{one_line(error, longest=None)}; continue with --resume")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed twice
        return _fail(130, "interrupted; add --resume to the command to continue")
    return 0


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether this is Python's MemoryError, or torch's for a CPU, which is no class of its own."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool({"MemoryError", "OutOfMemoryError"} & names) or (
        "DefaultCPUAllocator" in str(error)
    )


def _parser() -> jsonargparse.ArgumentParser:
    from coupled_adam import __version__

    parser = jsonargparse.ArgumentParser(
        prog="coupled-adam",
        exit_on_error=False,
        version=__version__,
        formatter_class=_HelpFormatter,
    )
    subcommands = parser.add_subcommands(dest="command")
    for name, command in _COMMANDS.items():
        summary, _, _ = (command.__doc__ or "").partition("\n")
        subcommands.add_subcommand(name, _command_parser(name), help=summary)
    return parser


def _command_parser(name: str) -> jsonargparse.ArgumentParser:
    """The parser of a command; its file's docstring is the description."""
    command = _COMMANDS[name]
    parser = jsonargparse.ArgumentParser(
        exit_on_error=False, description=command.__doc__, formatter_class=_HelpFormatter
    )
    command.add_arguments(parser)
    return parser


class _HelpFormatter(jsonargparse.DefaultHelpFormatter):
    """Help without the types of Python, and with no default that says nothing."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        says_nothing = action.default in (None, False, [], argparse.SUPPRESS)
        return text if says_nothing or "default" in text else f"{text} (default: %(default)s)"


def _fail(code: int, message: str) -> int:
    if not is_other_rank():
        print(f"coupled-adam: {message}", file=sys.stderr)
    return code


def _overrides_first(arguments: list[str]) -> list[str]:
    """Move ``key=value`` to the front, where no option that takes several values can consume it."""
    first = [a for a in arguments[1:] if re.match(r"(name|model|data|training|arms|seeds)[.=]", a)]
    return [*arguments[:1], *first, *(a for a in arguments[1:] if a not in first)]


def _hint(arguments: list[str], message: str) -> str:
    """Suggest the most similar option for an unknown one, or where to find the list."""
    if "nrecognized arguments" not in message:
        return ""
    command = arguments[0] if arguments and arguments[0] in _COMMANDS else ""
    parser = _command_parser(command) if command else _parser()
    known = re.findall(r"--[a-z][a-z-]+", parser.format_help())
    near = [
        match
        for argument in arguments
        if argument.startswith("-") and argument not in known
        for match in difflib.get_close_matches(argument.partition("=")[0], known, n=1)
    ]
    return f"; did you mean {near[0]}?" if near else "; see coupled-adam --help"
