"""Links lead somewhere, tables agree with the code, figures are what their programs draw."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from sparse_bridge import __version__, settings

from .pages import PAGES, ROOT, anchor, name_of, prose

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, fragment = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target}: no such file"
        assert ROOT in [found, *found.parents], f"{target} leads out of the repository"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", prose(found), flags=re.M)
            anchors = re.findall(r'<a id="([^"]+)">', found.read_text())
            assert fragment in {*map(anchor, headings), *anchors}, f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_in_the_text_exist(page: Path) -> None:
    named = re.findall(r"`((?:sparse_bridge|examples|docs|tests|benchmarks|compat)/[\w/.]+)`", prose(page))
    for path in named:
        assert (ROOT / path).exists(), f"{path}: no such file"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {target.partition("#")[0] for target in LINK.findall(index)}
    pages = {page.name for page in PAGES if page.parent == ROOT / "docs"} - {"README.md"}
    assert pages <= linked, f"not in docs/README.md: {sorted(pages - linked)}"


def table_of_settings() -> dict[str, list[str]]:
    """Variables of docs/environment.md without the prefix, and the quoted values of each."""
    rows = re.findall(
        r"^\| `SPARSE_BRIDGE_(\w+)` \| ([^|]*) \|",
        (ROOT / "docs" / "environment.md").read_text(encoding="utf-8"),
        flags=re.M,
    )
    assert len(rows) == len({name for name, _ in rows})
    return {name: re.findall(r"`([^`]+)`", values) for name, values in rows}


def test_the_settings_page_is_complete() -> None:
    """Every variable with its values, the default first."""
    plain = settings.Settings()
    table = table_of_settings()
    assert table.keys() == settings.KEYWORDS.keys()
    for name, values in table.items():
        first, *more = settings.KEYWORDS[name]
        default = getattr(plain, first)
        if name == "TUNE":
            values.remove("pinned:FILE")
        elif more and name != "OPTIMIZE":
            items = dict(value.split("=") for value in values)
            assert items.keys() == {first, *more}
            assert settings.from_environment({settings.PREFIX + name: ",".join(values)}) == plain
            continue
        if first in settings.CHOICES:
            assert sorted(values) == sorted(settings.CHOICES[first])
            assert values[0] == default
        elif isinstance(default, bool):
            assert values == (["1", "0"] if default else ["0", "1"])
        else:
            assert default == "" and values == [], f"{name}: a path, empty by default"


def test_the_settings_page_names_what_was_renamed() -> None:
    text = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    old = re.findall(r"^\| `SPARSE_BRIDGE_(\w+)=([^`]*)` \| `SPARSE_BRIDGE_", text, flags=re.M)
    values = {(name.upper(), value) for name, renamed in settings.RENAMED_VALUES.items() for value in renamed}
    assert values <= set(old)
    assert sorted(name for name, value in old if (name, value) not in values) == sorted(settings.RENAMED)


def test_the_module_docstring_names_every_setting() -> None:
    for name, keywords in settings.KEYWORDS.items():
        row = f"| `SPARSE_BRIDGE_{name}` |"
        assert row in settings.__doc__
        line = next(line for line in settings.__doc__.splitlines() if row in line)
        assert len(keywords) == 1 or name in ("TUNE", "OPTIMIZE") or all(word in line for word in keywords)


@pytest.mark.parametrize("name", ["architecture", "speed"])
def test_figures_are_drawn_by_their_programs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib.image
    import numpy as np

    program = runpy.run_path(str(ROOT / "docs" / "figures" / f"{name}.py"))
    program["draw"](tmp_path / "again.png")
    again, kept = (
        matplotlib.image.imread(path)[..., :3]
        for path in (tmp_path / "again.png", ROOT / "docs" / "figures" / f"{name}.png")
    )
    # Other versions of matplotlib and FreeType set letters a little differently, and lines by a
    # pixel, which is a fifth of a square of 16 x 16; a bar of another length fills one.
    assert np.abs(np.subtract(again.shape, kept.shape)).max() <= 2
    rows, columns = (least // 16 for least in np.minimum(again.shape, kept.shape)[:2])
    squares = [one[: rows * 16, : columns * 16].reshape(rows, 16, columns, 16, 3).mean((1, 3)) for one in (again, kept)]
    assert np.abs(squares[0] - squares[1]).max() < 0.35


def test_the_figure_of_speeds_can_be_read_on_a_phone(tmp_path: Path) -> None:
    """390 pixels show it 358 wide: no letters are below 11 pixels then."""
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    picture = runpy.run_path(str(ROOT / "docs" / "figures" / "speed.py"))["draw"](tmp_path / "again.png")
    texts = [text for text in picture.findobj(Text) if text.get_visible() and text.get_text()]
    assert len(texts) > 20
    pixels = {text.get_text(): text.get_fontsize() / 72 / picture.get_figwidth() * 358 for text in texts}
    assert {text: size for text, size in pixels.items() if size < 11} == {}


@pytest.mark.parametrize("repository", ["", "https://example.org/owner/sparse_bridge"])
def test_the_readme_of_a_package_index_has_no_relative_links(repository: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program = runpy.run_path(str(ROOT / "setup.py"))
    shown = program["index_readme"](text, repository)
    targets = LINK.findall(shown)
    assert all(target.startswith(("https://", "#")) for target in targets), targets
    assert len(LINK.findall(text)) > 20
    assert bool(repository) == (f"{repository}/blob/main/docs/speed.md" in targets)
    assert bool(repository) == bool(program["project_urls"](repository))
    assert bool(repository) == bool(program["badges"](repository))


def test_the_readme_has_the_badges_of_the_repository() -> None:
    """None as long as setup.py names no address; then this line."""
    program = runpy.run_path(str(ROOT / "setup.py"))
    found = [line for line in README.splitlines() if "badge" in line]
    assert "\n".join(found) == program["badges"](program["REPOSITORY"])


def test_the_readme_cites_what_the_citation_file_does() -> None:
    quoted = dict(re.findall(r"^  (\w+) += \{+([^}]*)\}+,?$", README, flags=re.M))
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert quoted["title"] == re.search(r'^title: "(.*)"$', text, flags=re.M)[1]
    assert quoted["author"] == re.search(r"- name: (.*)$", text, flags=re.M)[1]
    assert quoted["version"] == re.search(r"^version: (.*)$", text, flags=re.M)[1] == __version__
