"""What building the package adds: the optimizer's CPU kernel, and links that work on PyPI."""

import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

KERNELS = "src/coupled_adam/optim/kernels"
FLAGS = [
    "-std=c11",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
]


class NativeKernel(BuildHookInterface):
    """Builds libcoupled_adam.so from native.c, for wheels and for editable installations.

    ``CC`` names the compiler. Where none works, the package is built without the kernel, unless
    ``COUPLED_ADAM_NATIVE=1`` demands it; ``COUPLED_ADAM_NATIVE=0`` builds a wheel for any platform.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform that the library is for."""
        wanted = os.environ.get("COUPLED_ADAM_NATIVE", "")
        if wanted not in ("", "0", "1"):
            raise ValueError(f"COUPLED_ADAM_NATIVE must be 0, 1 or empty, not {wanted!r}")
        kernels = Path(self.root) / KERNELS
        library = kernels / "libcoupled_adam.so"
        if wanted == "0":
            library.unlink(missing_ok=True)
            return
        tag, flags, environment = target()
        partial = library.with_name(f"libcoupled_adam.so.{os.getpid()}.tmp")
        compiler = [*os.environ.get("CC", "cc").split(), *FLAGS, *flags]
        command = [*compiler, "-o", str(partial), str(kernels / "native.c"), "-lm", "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            partial.replace(library)
        except (OSError, subprocess.CalledProcessError) as error:
            library.unlink(missing_ok=True)
            why = getattr(error, "stderr", None) or error
            if wanted == "1":
                raise RuntimeError(
                    f"coupled-adam's CPU kernel cannot be compiled: {why}"
                ) from error
            self.app.display_warning(f"coupled-adam is built without its CPU kernel: {why}")
            return
        finally:
            partial.unlink(missing_ok=True)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"  # it is called through ctypes, by any Python
        build_data["artifacts"].append(f"{KERNELS}/libcoupled_adam.so")


def target() -> tuple[str, list[str], dict[str, str]]:
    """The platform's tag, the compiler's flags for it, and the compiler's environment.

    On macOS the tag follows from what is compiled, not from the Python that builds: a universal2
    Python makes a library for its machine alone, unless ``ARCHFLAGS`` names both architectures.
    """
    environment = dict(os.environ)
    python = sysconfig.get_platform()  # macosx-11.0-universal2, linux-x86_64
    if sys.platform != "darwin":
        return re.sub(r"\W", "_", python), [], environment
    named = re.findall(r"-arch\s+(\S+)", os.environ.get("ARCHFLAGS", ""))
    architectures = sorted(set(named)) or [platform.machine()]
    name = "universal2" if len(architectures) > 1 else architectures[0]
    oldest = os.environ.get("MACOSX_DEPLOYMENT_TARGET") or python.split("-")[1]
    major, minor = map(int, f"{oldest}.0".split(".")[:2])
    if name == "arm64":  # macOS 11 is the first for arm64, and a release has one number since
        major, minor = max((major, minor), (11, 0))
    if major >= 11:
        minor = 0
    environment["MACOSX_DEPLOYMENT_TARGET"] = f"{major}.{minor}"
    flags = [flag for architecture in architectures for flag in ("-arch", architecture)]
    return f"macosx_{major}_{minor}_{name}", flags, environment


class ReleaseMetadata(MetadataHookInterface):
    """The README and the URLs, which depend on where the repository is.

    ``COUPLED_ADAM_REPOSITORY``, which the release workflow sets, is its address, such as
    https://github.com/owner/coupled-adam. The README's links and pictures then point to the tag of
    this version there. Without it they stay as they are. ``COUPLED_ADAM_SITE`` is the address of
    the site, where the documentation is. A source distribution keeps what it was built with.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme`` and, where the repository is known, ``urls``."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("COUPLED_ADAM_REPOSITORY", "").rstrip("/")
        if repository:
            text = absolute(text, repository, f"v{metadata['version']}")
            metadata["urls"] = {
                "Homepage": repository,
                "Documentation": os.environ.get("COUPLED_ADAM_SITE")
                or f"{repository}/tree/v{metadata['version']}/docs",
                "Changelog": f"{repository}/blob/v{metadata['version']}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
                "Paper": "https://arxiv.org/abs/2502.08441",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str, tag: str) -> str:
    """A Markdown text with its relative links and pictures pointing to a tag of the repository."""
    text = re.sub(r'(<img\b[^>]*\bsrc=")(?!\w+:)', rf"\g<1>{repository}/raw/{tag}/", text)
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\g<1>{repository}/raw/{tag}/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!\w+:|#)", rf"\g<1>{repository}/blob/{tag}/", text)
