"""What griffe, which reads the docstrings for the site, does with arguments named together."""

import re
from typing import Any

import griffe

TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +\S.*)*)$", re.MULTILINE)


class Apart(griffe.Extension):
    """Gives each argument of ``lr, betas: as in torch`` a row of its own, with its default."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each function, class and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = TOGETHER.sub(_apart, obj.docstring.value)


def _apart(entry: re.Match[str]) -> str:
    indent, names, text = entry.groups()
    return "\n".join(f"{indent}{name}{text}" for name in names.split(", "))
