"""The laboratory: language models trained side by side; needs the extra ``[lab]``."""


class TrainingError(Exception):
    """A run cannot go on; the message says at which step, and what is kept."""


class PreemptedError(Exception):
    """The run was told to stop (SIGTERM), and has written a checkpoint to continue from."""
