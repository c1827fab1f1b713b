"""What users bring: opened, read and bounded in one way, as it may be another person's.

Files are regular ones, whose content has an end, and nothing in them is executed.
"""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coupled_adam.errors import UsageError, one_line

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")

_LARGEST_TEXT = 2**28  # bytes of a file that is parsed as a whole, such as a configuration
MOST_LAYERS = 1000
"""More take too long to build, even on the meta device."""
_LARGEST_COUNT = 2**20
_MOST_MODULES = 100_000  # which take about ten seconds to build without weights
# A configuration's counts of things that are made one by one; not those of what it was trained on.
_COUNT = re.compile(r"^(n|num|number)_|_(layers|blocks|heads|experts|labels)$")
_ABOUT_TRAINING = re.compile("param|token|step|sample|epoch")


def regular(path: Path) -> Path:
    """The path of a file whose content has an end; everything that others bring is opened by it.

    Raises:
        OSError: it is a pipe, for which one would wait for ever, or a device.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a pipe or a device, and no regular file", str(path))
    return path


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file that is parsed as a whole.

    Raises:
        OSError: it cannot be read, or is no regular file, or has more than 256 MB.
        UnicodeDecodeError: it is not text.
    """
    if (size := regular(path).stat().st_size) > _LARGEST_TEXT:
        reason = f"it has {size:,} bytes, and may have {_LARGEST_TEXT:,}"
        raise OSError(errno.EFBIG, reason, str(path))
    return path.read_text(encoding=encoding)


def read_own(path: Path, parse: Callable[[str], T]) -> T:
    """What ``parse`` makes of the text of a file that this package has written.

    Raises:
        UsageError: the file is missing, is no regular file, or cannot be parsed.
    """
    try:
        return parse(read_text(path))
    except Exception as error:  # whatever is wrong with the content
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{path} is damaged ({one_line(reason, 200)}): restore it, or move it away"
        ) from None


def read_array(path: Path) -> "np.memmap[Any, Any]":
    """Memory-map the numbers in a ``.npy`` file; writing to the array does not change the file.

    Raises:
        ValueError: it is no such file, or holds other things than numbers.
    """
    import numpy as np

    try:
        # This function never unpickles, and compares the size of the file with its header.
        array = np.lib.format.open_memmap(regular(path), mode="c")
    except Exception as error:  # of many types
        raise ValueError(f"{path}: not a .npy file of numbers ({one_line(error)})") from None
    if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{path}: not a .npy file of numbers, but of {array.dtype}")
    return array


def check_files_in(folder: Path) -> None:
    """Raise UsageError for a folder with a pipe or a device, for which a library would wait."""
    for path in folder.iterdir() if folder.is_dir() else []:
        if not (path.is_file() or path.is_dir()):
            raise UsageError(f"{path} is no file: remove it")


def check_counts(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a model's configuration that counts so many things that none is built.

    transformers makes lists of some as soon as it reads them.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_counts(value)
        counts = _COUNT.search(key) and not _ABOUT_TRAINING.search(key)
        most = MOST_LAYERS if re.search("layer|block", key) else _LARGEST_COUNT
        if counts and isinstance(value, int | float) and value > most:
            raise ValueError(f"{key}={value} must be at most {most}")


def _memory() -> int:
    """The bytes of memory of this machine; where it is not known, more than any has."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


@contextlib.contextmanager
def bounded_model(in_memory: bool = True) -> Iterator[None]:
    """Let no model be built in the block that has too many modules, or does not fit into memory.

    The parameters are counted as they are registered, which in transformers is before they get
    memory.

    Args:
        in_memory: whether it will be in the memory of this machine.

    Raises:
        ValueError: in the block.
    """
    from torch import Tensor, nn
    from torch.nn.modules import module as hooks

    modules, memory = 0, _memory()
    # By module and name, as those without memory are replaced by those with it.
    sizes: dict[tuple[int, str], int] = {}
    total = 0

    def count(*_: Any) -> None:
        nonlocal modules
        modules += 1
        if modules > _MOST_MODULES:
            raise ValueError(f"the model that it describes has more than {_MOST_MODULES:,} modules")

    def measure(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal total
        if tensor is None or (id(module), name) in sizes:
            return
        sizes[id(module), name] = tensor.nbytes
        total += tensor.nbytes
        if (
            in_memory and total > 2 * memory
        ):  # tied matrices count twice, and a part may be swapped out
            raise ValueError(
                f"the model that it describes takes {total / 1e9:.1f} GB or more, and this machine "
                f"has {memory / 1e9:.1f} GB of memory ({name} has the shape {[*tensor.shape]})"
            )

    with contextlib.ExitStack() as stack:
        for handle in (
            hooks.register_module_module_registration_hook(count),
            hooks.register_module_parameter_registration_hook(measure),
            hooks.register_module_buffer_registration_hook(measure),
        ):
            stack.callback(handle.remove)
        yield
