"""What a run's JSON files hold, checked when they are read: they may be another person's."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import NotRequired, TypedDict

from coupled_adam.files import read_text

T = TypeVar("T")


class Manifest(TypedDict):
    """``step-N.json``: the digests of ``config.yaml`` and of the checkpoint's files, by name."""

    config: str
    files: dict[str, str]


@with_config(ConfigDict(extra="allow"))
class Environment(TypedDict):
    """The software and hardware of a run; what only a reader looks at is not checked."""

    time: NotRequired[str]
    packages: NotRequired[dict[str, str | None]]


class Recorded(Environment):
    """``environment.json``: where a run began, with which text, and where it was resumed."""

    corpus: dict[str, Any]
    resumed: NotRequired[list[Environment]]


def read_json(path: Path, schema: type[T]) -> T:
    """The content of a JSON file.

    Raises:
        ValueError: it is not JSON, or does not have this schema.
        OSError, UsageError: as :func:`~coupled_adam.files.open_regular`.
    """
    content: T = TypeAdapter(schema).validate_json(read_text(path))
    return content
