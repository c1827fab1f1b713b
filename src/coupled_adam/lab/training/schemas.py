"""What a run's JSON files hold, checked when they are read: they may be another person's."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
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


COUNTS = range(2**63)
"""What steps and numbers of tokens can be: 64 bits hold them."""
Count = Annotated[int, Field(ge=0, lt=COUNTS.stop)]


class _Accuracy(TypedDict):
    accuracy: float
    stderr: NotRequired[float | None]


class _Accuracies(_Accuracy):
    tasks: dict[str, _Accuracy]


class _Similarity(TypedDict):
    r: float | None
    pairs: Count
    total: Count


class _Similarities(TypedDict):
    mean: float | None
    sets: dict[str, _Similarity]


class Evaluation(TypedDict, total=False):
    """``evaluation.json``, whose parts are written one after the other."""

    parameters: Count
    test_loss: float | None
    test_tokens: Count | None
    embeddings: dict[str, Any] | None
    input_embeddings: dict[str, Any] | None
    word_similarity: _Similarities | None
    lm_eval: _Accuracies | None


def check_evaluation(content: object) -> None:
    """Raise ValueError if the content of an ``evaluation.json`` is not one, and say where."""
    try:
        TypeAdapter(Evaluation).validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}={first['input']!r}: {first['msg']}"[:200]) from None


def read_json(path: Path, schema: type[T]) -> T:
    """The content of a JSON file.

    Raises:
        ValueError: it is not JSON, or does not have this schema.
        OSError, UsageError: as :func:`~coupled_adam.files.open_regular`.
    """
    content: T = TypeAdapter(schema).validate_json(read_text(path))
    return content
