"""Time the AdamW of other packages as ``coupled-adam bench`` times ours, where they are installed.

python benchmarks/packages.py bench --shapes 50304x768 --json > bench-packages.json
"""

import importlib
import sys

from coupled_adam import cli
from coupled_adam.bench.optimizers import OPTIMIZERS, uncoupled

OTHERS = (
    ("optimi", "AdamW"),
    ("pytorch_optimizer", "StableAdamW"),
    ("torchao.optim", "AdamW8bit"),
    ("bitsandbytes.optim", "AdamW"),
    ("bitsandbytes.optim", "AdamW8bit"),
)

if __name__ == "__main__":
    for module, name in OTHERS:
        try:
            optimizer = getattr(importlib.import_module(module), name)
        except ImportError:
            continue
        OPTIMIZERS[f"{module.partition('.')[0]} {name}"] = uncoupled(optimizer)
    sys.exit(cli.main())
