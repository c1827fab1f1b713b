"""Self-contained pages of HTML: pictures are embedded, and all text is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

if TYPE_CHECKING:  # tables are pages, too, and need no pictures
    from coupled_adam.rendering.pictures import Picture


def render(
    template: str,
    values: Mapping[str, Any],
    pictures: Sequence[Picture],
    *,
    package: str = "coupled_adam.rendering",
) -> str:
    """Render a page from a template.

    Args:
        template: the name of a file in the folder ``templates`` of ``package``. It may extend
            ``base.html``, and include ``figures.html``, which shows the pictures.
        values: the variables of the template; rendering fails if one is missing.
        pictures: the pictures to embed.
        package: the package that contains the template.
    """
    # Templates of another package extend those of this one.
    packages = [jinja2.PackageLoader(name) for name in (package, "coupled_adam.rendering")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(packages),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(values, pictures=pictures)
