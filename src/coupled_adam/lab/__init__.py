"""The laboratory: language models trained side by side; needs the extra ``[lab]``."""


class UsageError(Exception):
    """Something the user gave cannot be used; the message says what to do instead."""


class TrainingError(Exception):
    """A run cannot go on; the message says at which step, and what is kept."""


class PreemptedError(Exception):
    """The run was told to stop (SIGTERM), and has written a checkpoint to continue from."""
