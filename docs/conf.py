"""Configuration of the documentation site: `make site`."""

from __future__ import annotations

import re
from typing import Any

project = "Cotenant"
author = "The Cotenant authors"
copyright = "The Cotenant authors"  # Sphinx reads this name
extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
exclude_patterns = ["README.md"]  # the index of forges; the site has index.md
suppress_warnings = [
    "toc.not_included",
    "myst.header",
]  # decisions and measurements are reached by links, not by the sidebar
html_theme = "furo"
html_title = "Cotenant"
html_static_path = ["_static"]
pygments_style = "default"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?:CONTRIBUTING|README|deploy|src|services|node_agent|tests|tools)[^)]*\)"
)
LEXERS = {"mermaid": "text", "csv": "text"}  # languages that forges know and Pygments does not


def site_only(app: Any, name: str, source: list[str]) -> None:
    """Adapt a page that also reads well on a forge: files outside docs/ are named there and not linked."""
    text = OUTSIDE.sub(r"\1", source[0])
    for language, lexer in LEXERS.items():
        text = text.replace(f"```{language}\n", f"```{lexer}\n")
    source[0] = text


def api_style(app: Any, page: str, *_: Any) -> None:
    """Give the pages of the API reference their style."""
    if page.startswith("api/"):
        app.add_css_file("api.css")


def setup(app: Any) -> None:
    """Register the adaptations."""
    app.connect("source-read", site_only)
    app.connect("html-page-context", api_style)
