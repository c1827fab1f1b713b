"""The software and hardware of a run, recorded to make its numbers traceable."""

import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from coupled_adam.lab.data.source import content_digest

_PACKAGES = ("coupled-adam", "torch", "lightning", "transformers", "tokenizers", "numpy", "scipy")


def environment() -> dict[str, Any]:
    """Versions, machine, git commit of this package's checkout, command line, and time (UTC)."""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git_commit": _git_commit(),
        **versions(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def versions() -> dict[str, Any]:
    """The versions of Python and of the packages that a run's numbers depend on."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "packages": packages}


def code_digest(variant: str | None) -> str:
    """A hash of this package's source, and of the module of a variant ``module:name``."""
    spec = importlib.util.find_spec(variant.partition(":")[0]) if variant else None
    own = sorted(Path(__file__).parents[2].rglob("*.py"))
    return content_digest([*own, *([Path(spec.origin)] if spec and spec.origin else [])])


def _git_commit() -> str | None:
    """The commit of this file, "-dirty" if there are changes; None outside of a checkout."""
    git, commit = ["git", "-C", str(Path(__file__).parent)], ""
    describe = ["describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    # Installed into a folder of some other repository, that one's commit would say nothing.
    for command in (["ls-files", "--error-unmatch", __file__], describe):
        try:
            done = subprocess.run([*git, *command], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        commit = done.stdout.strip()
    return commit


def _processor() -> str:
    # platform.processor() is empty, or only the architecture, on Linux.
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line for line in lines if line.startswith("model name"))
        return name.partition(":")[2].strip()
    return platform.processor()
