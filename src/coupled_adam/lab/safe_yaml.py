"""Read plain values from untrusted YAML."""

from typing import Any

import yaml

from coupled_adam.errors import UsageError, one_line


def read_yaml(text: str, source: str) -> Any:
    """Plain lists, dicts and values from YAML text; ``source`` names it in errors.

    Raises:
        UsageError: it is not YAML, names other types than these, or gives a key twice.
    """
    try:
        return yaml.load(text, _Loader)  # a subclass of the safe one
    except RecursionError:
        raise UsageError(f"{source} is not YAML: it is nested too deeply") from None
    except Exception as error:  # scalars that only look like a date or a number have their own
        raise UsageError(f"{source} is not YAML: {one_line(error)}") from None


class _Loader(yaml.SafeLoader):
    """The safe loader, which also refuses a key that is given twice: YAML takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """The mapping of a node."""
        # Before keys are merged from aliases, which may replace one another.
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if key != "<<" and keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"the key {twice} is given twice")
        return super().construct_mapping(node, deep)
