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
ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<(?:code|autoref|a)\b)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The README is the first page, and the notebook is one."""
    readme = Path(config.docs_dir).with_name("README.md").read_text(encoding="utf-8")
    readme = readme.replace('<img src="docs/', '<img src="')
    readme = readme.replace("](examples/tour.ipynb)", "](docs/tour.md)")
    files.append(File.generated(config, "index.md", content=readme))
    notebook = Path(config.docs_dir).with_name("examples") / "tour.ipynb"
    text, pictures = as_markdown(json.loads(notebook.read_text(encoding="utf-8")))
    files.append(File.generated(config, "tour.md", content=text))
    for name, png in pictures.items():
        files.append(File.generated(config, name, content=png))
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
    first = page.file.src_uri == "index.md"
    folder = "" if first else posixpath.dirname(f"docs/{page.file.src_uri}")

    def follow(link: re.Match[str]) -> str:
        text, target = link.groups()
        where = posixpath.normpath(posixpath.join(folder, target))
        if where.startswith("docs/"):
            return f"[{text}]({where.removeprefix('docs/') if first else target})"
        if not config.repo_url:
            return text
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{where})"

    blocks = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        block if block.startswith("```") else LINK.sub(follow, block) for block in blocks
    )


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings mark names with Sphinx's roles, which Markdown does not know."""
    return ROLE.sub("", html)
