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
    """A page from a template in the folder ``templates`` of a package, with embedded pictures.

    It may extend ``base.html``, and include ``figures.html``, which shows the pictures. Rendering
    fails if a variable of the template is not among the values.
    """
    # Templates of another package extend those of this one.
    packages = [jinja2.PackageLoader(name) for name in (package, "coupled_adam.rendering")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(packages), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(values, pictures=pictures)
