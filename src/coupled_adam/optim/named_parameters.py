"""The parameters that an argument refers to, by modules, names or patterns over names."""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

Parameters = nn.Module | Tensor | str | Iterable[nn.Module | Tensor | str]
Tables = Parameters | Mapping[str, int]


def resolve(parameters: Mapping[str, Tensor], entries: Parameters, argument: str) -> set[Tensor]:
    """The parameters that modules, parameters, names and patterns refer to.

    Args:
        parameters: all parameters by their names.
        entries: what refers to some of them.
        argument: the name of the argument that ``entries`` is, for messages.

    Raises:
        ValueError: if an entry refers to none of the parameters.
    """
    return {p for entry in several(entries) for p in matching(parameters, entry, argument).values()}


def several(entries: Tables) -> Iterable[Any]:
    """The entries of an argument that may be a single one."""
    return [entries] if isinstance(entries, nn.Module | Tensor | str) else entries


def matching(
    parameters: Mapping[str, Tensor], entry: nn.Module | Tensor | str, argument: str
) -> dict[str, Tensor]:
    """All parameters that an entry of an argument refers to, by their names."""
    if isinstance(entry, str):
        matches = {n: p for n, p in parameters.items() if fnmatch.fnmatchcase(n, entry)}
    elif isinstance(entry, Tensor):
        matches = {n: p for n, p in parameters.items() if p is entry}
    else:
        # tables= means the module's own matrix, without a head's bias; exclude= all below it.
        is_for_tables = argument == "tables"
        own = set(entry.parameters(not is_for_tables))
        if is_for_tables:
            own = {p for p in own if p.dim() == 2}
        matches = {n: p for n, p in parameters.items() if p in own}
    if not matches:
        near = isinstance(entry, str) and difflib.get_close_matches(entry, parameters, 3, 0.3)
        shown = repr(entry) if isinstance(entry, str) else f"a {type(entry).__name__}, which"
        hint = f"did you mean {near}?" if near else "see model.named_parameters()"
        raise ValueError(f"{argument}={shown} matches no parameter of the model: {hint}")
    return matches
