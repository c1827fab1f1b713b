"""``python -m coupled_adam``: the command, where it is started through Python, as by torchrun."""

import sys

from coupled_adam.cli import main

sys.exit(main())
