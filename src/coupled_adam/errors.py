"""Errors that the user can fix, and how error messages are printed."""


class UsageError(Exception):
    """Raised if the user's input cannot be used; the message says what to do instead."""


def printable(text: str) -> str:
    """A text in which each character that a terminal would obey is replaced by a space."""
    return "".join(c if c.isprintable() else " " for c in text)


def one_line(error: object, longest: int | None = 600) -> str:
    """An error's message on one line, without control characters, which a terminal would obey.

    A message of more than ``longest`` characters is shortened in the middle, unless this is None.
    """
    said = str(error) or type(error).__name__
    text = printable(" ".join(said.split()))
    if longest is None or len(text) <= longest:
        return text
    return f"{text[: longest // 2]} ... {text[-(longest // 2) :]}"
