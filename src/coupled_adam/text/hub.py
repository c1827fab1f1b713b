"""The Hugging Face hub, what has been downloaded from it, and other folders of models."""

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coupled_adam.errors import one_line


def is_hub_id(name: str) -> bool:
    """Whether this could be the id of a model on the hub: ``name``, or ``owner/name``."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None


@functools.cache
def reach_hub() -> None:
    """Find out, with one request, whether the hub answers; if it does not, use its cache alone.

    Its libraries would try each file again and again, for minutes.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of its HTTP client
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for datasets, which is imported later


def download_model(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download a model's files with names of these patterns; in a subfolder, only if all say so."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, not listed
        enable_progress_bars,
    )

    reach_hub()
    enable_progress_bars()
    ignored = None if all("/" in pattern for pattern in patterns) else ["*/*"]
    kept: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": ignored}
    return Path(snapshot_download(name, revision=revision, **kept))


def hub_error(error: BaseException) -> str:
    """Why something could not be read from the hub, on one line."""
    from huggingface_hub import constants, errors

    if constants.is_offline_mode():
        return "the Hugging Face hub cannot be reached, and this is not in its cache here"
    if isinstance(error, errors.GatedRepoError):  # which is a RepositoryNotFoundError, too
        return "accept its conditions on the hub, and log in: hf auth login"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has it, but not this revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is nothing of this name on the hub, or it is private: hf auth login"
    return f"{type(error).__name__}: {one_line(error, 300)}"
