"""The errors with which a training run ends early."""


class TrainingError(Exception):
    """Raised if a run cannot continue; the message names the step and says what is kept."""


class DivergedError(TrainingError):
    """Raised if the loss or the gradient is not finite at ``step``, counted from 1."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


class PreemptedError(BaseException):
    """Raised after SIGTERM; in training, once a checkpoint to continue from has been written.

    Like KeyboardInterrupt it may come anywhere, and is not for ``except Exception``.
    """
