"""How a training run ends early."""


class TrainingError(Exception):
    """A run cannot continue; the message names the step, and says what is kept."""


class DivergedError(TrainingError):
    """The loss or the gradient is not finite at ``step``, counted from 1."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


class PreemptedError(Exception):
    """The process was asked to stop (SIGTERM), and has written a checkpoint to continue from."""
