"""The Hugging Face hub, what has been downloaded from it, and other folders of models."""

import contextlib
import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coupled_adam.errors import UsageError, one_line
from coupled_adam.files import read_text

_PATIENCE = 5.0  # seconds
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("vocab_size", "num_labels")
"""What configurations call numbers of which transformers makes a list or a matrix at once."""


def is_hub_id(name: str) -> bool:
    """Whether this could be the id of a model on the hub: ``name``, or ``owner/name``."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None


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


def download_model(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download a model's files with names of these patterns, with a bar; return their folder.

    Files in subfolders are left out.
    """
    import huggingface_hub
    from tqdm.asyncio import tqdm_asyncio

    # Shown even where the hub's own bars are hidden.
    class Bar(tqdm_asyncio):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": None, "leave": False})

    reach_hub()
    folder = huggingface_hub.snapshot_download(
        name,
        revision=revision,
        allow_patterns=list(patterns),
        ignore_patterns=["*/*"],
        tqdm_class=Bar,
    )
    return Path(folder)


def check_sizes(folder: Path) -> None:
    """Compare the sizes in a model's ``config.json`` with its weights, if it has both.

    Transformers builds what a configuration asks for before it misses the weights, and takes hours
    for a million layers, and 100 GB for a billion labels.

    Raises:
        UsageError: a size is more than there can be weights for.
    """
    from safetensors import SafetensorError, safe_open

    sections: list[Any] = []
    shapes: list[list[int]] = []
    unreadable = (OSError, ValueError, AttributeError, RecursionError, RuntimeError)
    # What cannot be read (a RuntimeError of safetensors) is said when the model is loaded.
    with contextlib.suppress(*unreadable, SafetensorError):
        config = json.loads(read_text(folder / "config.json"))
        sections = [config, config.get("text_config")]
        for path in filter(Path.is_file, folder.glob("*.safetensors")):
            with safe_open(path, framework="np") as file:
                shapes += [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    # Each layer has a tensor of its own, and each token and label a row.
    longest = max((size for shape in shapes for size in shape), default=0)
    limits = {
        **dict.fromkeys(_LAYERS, (len(shapes), f"there are weights of {len(shapes)} tensors")),
        **dict.fromkeys(_WIDTHS, (longest, f"no dimension of its weights is above {longest}")),
    }
    for section in filter(lambda section: shapes and isinstance(section, dict), sections):
        for name, (limit, reason) in limits.items():
            size = section.get(name)
            if isinstance(size, int) and size > limit:
                raise UsageError(
                    f"{folder / 'config.json'}: {name} is {size}, but {reason}: it is another "
                    "model's, or damaged"
                )


def hub_error(error: BaseException) -> str:
    """Why something could not be read from the hub, on one line."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "the Hugging Face hub cannot be reached, and this is not in its cache here"
    return f"{type(error).__name__}: {one_line(error, 300)}"
