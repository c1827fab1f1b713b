"""Read plain values from untrusted YAML."""

from typing import Any

import yaml

from coupled_adam.errors import UsageError, one_line

LONGEST = 100_000
"""The characters of a YAML file that are read, and the limit of what its aliases expand to."""


def read_yaml(text: str, source: str) -> Any:
    """Plain lists, dicts and values from YAML text; ``source`` names it in errors.

    Raises:
        UsageError: it is not YAML, names other types than these, or is too large.
    """
    if len(text) > LONGEST:
        raise UsageError(f"{source} is too large: at most {LONGEST} characters are read")
    try:
        return yaml.load(text, _Loader)  # a subclass of the safe one
    except RecursionError:
        raise UsageError(f"{source} is not YAML: it is nested too deeply") from None
    except Exception as error:  # scalars that only look like a date or a number have their own
        raise UsageError(f"{source} is not YAML: {one_line(error)}") from None


class _Loader(yaml.SafeLoader):
    """The safe loader, which also refuses aliases that contain themselves or expand too far.

    A few lines of aliases of aliases can stand for more text than any memory holds. This is
    PyYAML's own parser, since that of libyaml overflows the stack on deep nesting.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        """The next node; its ``size`` is that of everything it stands for, in characters."""
        is_alias = self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        if is_alias and not hasattr(node, "size"):  # it is not even complete
            raise yaml.YAMLError("an alias stands for what it is in")
        if not is_alias and isinstance(node.value, str):
            node.size = 1 + len(node.value)
        elif not is_alias:
            pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
            node.size = 1 + sum(child.size for pair in pairs for child in pair)
        if node.size > LONGEST:
            raise yaml.YAMLError(f"its aliases stand for more than {LONGEST} characters")
        return node
