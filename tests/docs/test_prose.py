"""Each page opens with what it answers, and speaks the reader's language."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .pages import PAGES, ROOT, name_of, prose

# Pages that open otherwise: what the project is, and the repository's changelog.
OTHER = {"README.md", "docs/README.md", "docs/changelog.md"}
# Words that this project's code has used in a sense of its own, and what a reader knows instead.
PRIVATE = {
    "doors?": "API",
    "winners?": "tuned tiles, the fastest",
    "as ever": "eagerly",
    "told": "given",
    "found": "present, seen, looked up",
    "gates?": "the compile check",
    "waiting layers?": "deferred convolutions",
    "the stores?": "the kernel, the epilogue",
    "(?:kernel |compiled |of )forms?": "variants of kernels",
}
# Names that code, tests and notes have used, and the field's terms that they use instead.
RETIRED = {
    r"(?:\w*_)?(?:[Tt]aps?|TAPS?)(?:_\w*)?": "kernel offsets",
    "_tail|TAIL": "EPILOGUE, _epilogue",
    r"convolution\.WORTH|s_WORTH": "MIN_DEFERRED_ELEMENTS",
    "Noticed|shorten_one": "ProfiledFeatures, install_on_frame",
    "_?[Hh]erald": "Listener",
    r"first_order|device\.serving|adapters\.late|adapters\.expected": "no_double_backward, "
    "device_support, lazy_features, warmup_registry",
    r"History, over|history\.over": "History.disabled",
}
SOURCES = ("sparse_bridge", "tests", "compat", "benchmarks", "tools", "examples", "docs", ".")
SUFFIXES = {".py", ".c", ".h", ".md", ".toml"}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if name_of(page) not in OTHER], ids=name_of
)
def test_a_page_opens_with_who_needs_it(page: Path) -> None:
    title, first, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert title.startswith("# ")
    assert re.fullmatch(r"For those (?:[^.]|\.(?=\w))+: (?:[^.]|\.(?=\w))+\.", first.strip()), first


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_private_words(page: Path) -> None:
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose(page))
    sentences = re.split(r"[.|]", text)  # one pattern for all takes 20 s on a page of names
    for word, instead in PRIVATE.items():
        used = [one for one in sentences if re.search(rf"\b{word}\b", one)]
        assert not used, f"{used[0].strip()!r}: rather {instead}"


@pytest.mark.parametrize("folder", SOURCES)
def test_no_retired_names(folder: str) -> None:
    used = re.compile("|".join(rf"(?P<r{i}>\b(?:{name})\b)" for i, name in enumerate(RETIRED)))
    files = ROOT.glob("*.md") if folder == "." else (ROOT / folder).rglob("*")
    for path in sorted(files):
        if path.suffix not in SUFFIXES or path == Path(__file__).resolve():
            continue
        hit = used.search(path.read_text(encoding="utf-8"))
        if hit:
            instead = list(RETIRED.values())[int(str(hit.lastgroup)[1:])]
            pytest.fail(f"{path.relative_to(ROOT)}: {hit.group()!r}, rather {instead}")


def test_what_to_switch_on_is_ten_lines() -> None:
    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, flags=re.M)
    assert headings[:2] == ["Measured: new scenes", "What to switch on"]
    part = text.partition("## What to switch on\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| ", part, flags=re.M)) == 1 + 10


def test_bits_lead_to_one_page() -> None:
    """Who says that bits repeat links to the page that says what they depend on."""
    for page in PAGES:
        text = prose(page)
        if page.name != "reproducibility.md" and re.search(r"bit (?:for|by) bit|to the bit", text):
            assert "reproducibility.md" in text, name_of(page)
