"""What went wrong in a way that the user can put right."""


class UsageError(Exception):
    """Something the user gave cannot be used; the message says what to do instead."""


def one_line(error: object, longest: int | None = 600) -> str:
    """What an error says, on one line and without control characters, which terminals obey.

    Of more than ``longest`` characters the middle is left out; None keeps all of them.
    """
    said = str(error) or type(error).__name__
    text = "".join(c if c.isprintable() else " " for c in " ".join(said.split()))
    if longest is None or len(text) <= longest:
        return text
    return f"{text[: longest // 2]} ... {text[-(longest // 2) :]}"
