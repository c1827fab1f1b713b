"""Python's own documentation, the text that every machine has."""

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from coupled_adam.text.documents import passages


def python_documentation() -> Iterator[str]:
    """Yield passages of the language reference's topics and the standard library's docstrings.

    Every CPython contains them: about 2 MB of English prose, identical for the same version.
    """
    from pydoc_data.topics import topics

    for _, topic in sorted(topics.items()):
        yield from passages(topic.splitlines(keepends=True))
    # Docstrings are read from the source, without importing and so executing the modules.
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in library_files()[1:]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except SyntaxError:  # lib2to3 contains some files in Python 2
            continue
        nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
        text = "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
        yield from passages(text.splitlines(keepends=True))


def library_files() -> list[Path]:
    """The files of Python's documentation, with the topics of the language reference first."""
    from pydoc_data import topics

    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    modules = (p for p in sorted(folder.rglob("*.py")) if not left_out & set(p.parts))
    return [Path(topics.__file__), *modules]
