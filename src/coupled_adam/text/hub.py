"""The Hugging Face hub, or what has been downloaded from it."""

import functools
import os

from coupled_adam.errors import one_line

_PATIENCE = 5.0  # seconds


def reach_hub() -> None:
    """Find out, with one request, whether the hub answers; if it does not, use its cache alone.

    Its libraries would try each file again and again, for minutes.
    """
    from huggingface_hub import constants

    if not constants.is_offline_mode() and not _answers(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for datasets, which is imported later


@functools.cache
def _answers(endpoint: str) -> bool:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=_PATIENCE)
    except Exception:  # of its HTTP client
        return False
    return True


def hub_error(error: Exception) -> str:
    """Why something could not be read from the hub, on one line."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "the Hugging Face hub cannot be reached, and this is not in its cache here"
    return f"{type(error).__name__}: {one_line(error, 300)}"
