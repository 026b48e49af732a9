"""What pyproject.toml cannot say: the README as a package index shows it, and the project's links.

Everything else is in pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

# The one place for the address of the repository, such as "https://github.com/OWNER/sparse_bridge".
# While it is empty, links to files become plain text on an index, where they would lead nowhere.
REPOSITORY = ""
_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")


def badges(repository: str) -> str:
    """The line of badges under the README's title; none while they have no address."""
    if not repository:
        return ""
    runs = f"{repository}/actions/workflows/ci.yml"
    licence = "https://img.shields.io/badge/licence-Apache--2.0-blue"
    return f"[![CI]({runs}/badge.svg)]({runs}) [![Licence]({licence})]({repository}/blob/main/LICENSE)"


def index_readme(text: str, repository: str) -> str:
    """The README for a page outside of the repository: no relative links are left."""

    def absolute(link: re.Match[str]) -> str:
        picture, name, path = link.groups()
        if not repository:
            return "" if picture else name
        return f"{picture}[{name}]({repository}/{'raw' if picture else 'blob'}/main/{path})"

    return _LINK.sub(absolute, text)


def project_urls(repository: str) -> dict[str, str]:
    """The links beside the project's page on an index."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=index_readme(readme, REPOSITORY),
        long_description_content_type="text/markdown",
        project_urls=project_urls(REPOSITORY),
    )
