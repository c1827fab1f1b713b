"""What went wrong in a way that the user can put right."""


class UsageError(Exception):
    """Something the user gave cannot be used; the message says what to do instead."""
