"""The laboratory: language models trained side by side; needs the extra ``[lab]``."""


class UsageError(Exception):
    """Something the user gave cannot be used; the message says what to do instead."""
