"""Where a command writes to: checked before any work is done for it."""

import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coupled_adam.errors import TrainingError, UsageError
from coupled_adam.files import write_atomically
from coupled_adam.runs import CONFIG, ENVIRONMENT


def check_files(inputs: Iterable[Path | str | None] = (), **files: str | None) -> None:
    """Check that files can be written.

    Args:
        inputs: what the command reads, which its results must not replace.
        files: paths, by the names of their options.

    Raises:
        UsageError: a file cannot be written, would replace an input, another result or anything
            that is no earlier result of this package, or would lie in the folder of a run or a
            model; nothing has been changed.
    """
    read = {Path(name).resolve() for name in inputs if name is not None}
    written: dict[Path, str] = {}
    for option, name in files.items():
        if name is None:
            continue
        path = Path(name).resolve()  # a link stays one
        with _explaining(f"--{option} {name}", "name another file"):
            if not path.parent.exists():
                raise UsageError(f"--{option}: there is no folder {path.parent}: create it first")
            if path in written:
                raise UsageError(
                    f"--{written[path]} and --{option} {name} are the same file: name two"
                )
            if problem := _problem(name, path, read):
                raise UsageError(f"--{option} {name} {problem}")
            written[path] = option
            # The only sure way to find out whether a file can be made there is to make one.
            with tempfile.TemporaryFile(dir=path.parent):
                pass


def _problem(name: str, path: Path, read: Collection[Path]) -> str:
    """Why a command must not write to a path; empty if it may."""
    if name == "-":
        return "would be a file called -: name a file, or use --json"
    if path.exists() and not path.is_file():
        return "exists and is not a file: name another one"
    if path in read:
        return "is read by this command: name another file"
    for folder in path.parents:
        is_model = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
        # A config.yaml alone does not make a run.
        if is_model or ((folder / CONFIG).is_file() and (folder / ENVIRONMENT).is_file()):
            return f"would lie in {folder}, the folder of a run or a model: name a file outside"
    if path.exists() and not _is_result(path):
        return "exists, and is no earlier result of this command: name another file"
    return ""


_RESULTS = {
    b"<!doctype html>": b'<meta name="generator" content="coupled-adam">',
    b"\x89PNG": b"coupled-adam",
    b"<?xml": b"<dc:title>coupled-adam",
    b"%PDF": b"(coupled-adam)",
    b"PAR1": b"coupled-adam",
    b"model,role,tensor,variant": b"",
    b'{\n  "test_loss"': b"",
}
"""How results begin, and by which mark pages, pictures and maps are known for ours."""


def _is_result(path: Path) -> bool:
    """Whether a file is empty, or a result of this package: a page, picture, table or evaluation.

    A text that only speaks of the package is none.
    """
    # Formats differ in whether they name their program at the start or at the end.
    with path.open("rb") as file:
        start = file.read(2**16)
        file.seek(max(0, path.stat().st_size - 2**16))
        ends = start + file.read()
    return not ends or any(start.startswith(b) and mark in ends for b, mark in _RESULTS.items())


def check_folder(option: str, folder: Path) -> None:
    """Raise UsageError if a folder cannot be created or written to; nothing is changed."""
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:  # as safetensors and tokenizers need it
        raise UsageError(f"{option} {folder} is not UTF-8: choose another folder") from None
    with _explaining(f"{option} {folder}", "choose another folder"):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{option} {folder} exists and is not a folder: choose another one")
        # The innermost folder that exists is the one in which the others will be made.
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass


def write_file(option: str, name: str, content: str | bytes) -> None:
    """Write a file that an option names; TrainingError if it cannot be, as on a full disk."""
    path = Path(name).resolve()  # a link stays one
    try:
        write_atomically(path, content)
    except OSError as error:
        raise TrainingError(f"{option} {name} cannot be written ({error.strerror})") from None


@contextmanager
def _explaining(subject: str, instead: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{subject} cannot be written ({error.strerror}): {instead}") from None
