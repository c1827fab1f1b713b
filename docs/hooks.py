"""What mkdocs does with these pages, which are written to be read in the repository, too."""

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\((?!\w+:|#)([^)\s]+)\)")
FROM_THE_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/tour.ipynb": "tour.md",
}
"""What becomes a page although it is not in docs/."""
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
CODE = re.compile(r"<code>([^<]*)</code>")
COMMANDS = re.compile(r'<div class="language-bash.*?</div>', re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<(?:code|autoref|a)\b)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/: the README, which is the first, and the notebook."""
    for source, page in FROM_THE_ROOT.items():
        text = (Path(config.docs_dir).parent / source).read_text(encoding="utf-8")
        if source.endswith(".ipynb"):
            text, pictures = as_markdown(json.loads(text))
            for name, png in pictures.items():
                files.append(File.generated(config, name, content=png))
        text = text.replace('<img src="docs/', '<img src="')
        files.append(File.generated(config, page, content=text))
    return files


def as_markdown(notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """A notebook with its outputs as a page, and the pictures that the page shows."""
    parts, pictures = [], {}
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "]("))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
            if png := data.get("image/png"):
                pictures[f"images/tour-{number}.png"] = base64.b64decode(png)
                parts.append(f"![What the cell above draws](images/tour-{number}.png)")
            elif shown := data.get("text/html"):
                parts.append(f"<div>{shown}</div>")
            else:
                text = "".join(output.get("text", "")) or data["text/plain"]
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts), pictures


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Links to files that are not pages lead to the repository, where that is known."""
    here = page.file.src_uri
    # The notebook links to pages as those in docs/ do.
    at_the_root = here != "tour.md" and here in FROM_THE_ROOT.values()
    folder = "" if at_the_root else posixpath.dirname(f"docs/{here}")

    def follow(link: re.Match[str]) -> str:
        text, target = link.groups()
        where = posixpath.normpath(posixpath.join(folder, target))
        if where in FROM_THE_ROOT:
            return f"[{text}]({posixpath.relpath(FROM_THE_ROOT[where], posixpath.dirname(here))})"
        if where.startswith("docs/"):
            return f"[{text}]({where.removeprefix('docs/') if at_the_root else target})"
        if not config.repo_url:
            return text
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{where})"

    blocks = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        block if block.startswith("```") else LINK.sub(follow, block) for block in blocks
    )


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings have Sphinx's marks, which Markdown does not know; no line ends in an option."""
    html = ROLE.sub("", html).replace("::</p>", ":</p>")
    html = CELL.sub(lambda cell: CODE.sub(_breakable, cell[0]), html)
    html = COMMANDS.sub(lambda block: _with_whole_options(block[0]), html)
    return CODE.sub(lambda code: _with_whole_options(code[0]), html)


def _with_whole_options(html: str) -> str:
    return OPTION.sub(r'<span class="option">\g<0></span>', html)


def _breakable(code: re.Match[str]) -> str:
    """Code in a table, where a line may end after an underscore or a dot, and before a version."""
    html = _with_whole_options(code[0])
    html = re.sub(r"(?<=[a-z])([_.])(?=[A-Za-z0-9])", r"\1<wbr>", html)
    return re.sub(r"(?<=[a-z\]])(?===|\[)", "<wbr>", html)
