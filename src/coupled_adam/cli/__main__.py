"""``python -m coupled_adam.cli``: the command, where it is started through Python."""

import sys

from coupled_adam.cli import main

sys.exit(main())
