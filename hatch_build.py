"""Compile the optimizer's CPU kernel into the package, where there is a C compiler."""

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "src/coupled_adam/optim/kernels"
FLAGS = [
    "-std=c11",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
]


class NativeKernel(BuildHookInterface):
    """Builds libcoupled_adam.so from native.c, for wheels and for editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; without a working compiler, build a package without the kernel."""
        kernels = Path(self.root) / KERNELS
        library = kernels / "libcoupled_adam.so"
        partial = library.with_name(f"libcoupled_adam.so.{os.getpid()}.tmp")
        compiler = os.environ.get("CC", "cc").split()
        command = [*compiler, *FLAGS, "-o", str(partial), str(kernels / "native.c"), "-lm", "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
            partial.replace(library)
        except (OSError, subprocess.CalledProcessError) as error:
            library.unlink(missing_ok=True)
            why = getattr(error, "stderr", None) or error
            self.app.display_warning(f"coupled-adam is built without its CPU kernel: {why}")
            return
        finally:
            partial.unlink(missing_ok=True)
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"  # it is called through ctypes, by any Python
        build_data["artifacts"].append(f"{KERNELS}/libcoupled_adam.so")
