"""Each page opens with what it answers, and speaks the reader's language."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .pages import PAGES, ROOT, name_of, prose, table

# Pages that open otherwise: what the project is, and the repository's changelog.
OTHER = {"README.md", "docs/README.md", "docs/changelog.md"}
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
    r"capture\.kinds|class Kind|\w*_BARREN|\w+\.(?:hurried|told_apart|roomy)": "graph_key, GraphKey, "
    "CAPTURE_INCONCLUSIVE, launch_speculatively, needs_more_guards, capture_in_pool",
    r"replay_parts|class Replays|class Early|calls\.followers": "graphed_module, GraphedModule, SpeculativeLaunch, "
    "model_graphs",
    r"calls\.(?:given|outcome)|class (?:Alike|Place)|rebuilt\(tensors|"
    r"capture[.\w]* import (?:untouched|units)|capture\.units|_Entrance": "graph_regions, input_proxies, "
    "OutputSpec, Captured, map_structure, assert_no_mutation",
    "Remains|EagerMemory|loose_levels|def besides|ledger": "KeepAlive, levels_with_unknown_bounds, "
    "extra_readbacks, call_stats",
    r"scene_memory|Scene(?:Memory|Traces)|rows_found|statistics_kept|asked_first": "input_memory, InputMemory, "
    "InputTraces, level_rows, preserved_statistics, worker_first",
    r"(?:\w*_)?(?:[Dd]oors?|DOORS)(?:_\w*)?|tests[./](?:gate|proof|surface|verify)": "api, tests.offline_compile, "
    "tests.acceptance, tests.api_coverage, tests.checkpoints",
    "known_store|known_sites|made_grid|binder_made|key_places": "find_store, sites_of_handle, register_grid, "
    "bind_to_device, key_bits",
}
SOURCES = ("sparse_bridge", "tests", "compat", "benchmarks", "tools", "examples", "docs", ".")
SUFFIXES = {".py", ".c", ".h", ".md", ".toml"}
WORDS = table(ROOT / "CONTRIBUTING.md", "| idea | word | not |")


def unwanted() -> dict[str, str]:
    """Patterns of what CONTRIBUTING.md says not to write, and what is written instead. "tap(s)" is
    one word or several of them."""
    return {re.escape(word).replace(r"\(s\)", "s?"): rather for _, rather, words in WORDS for word in words.split(", ")}


def uses(text: str, pattern: str) -> list[str]:
    """The sentences and cells of a text that have a word, outside of code."""
    sentences = re.split(r"[.|]", re.sub(r"`[^`]*`|\]\([^)]*\)", "", text))
    word = re.compile(rf"\b{pattern}\b", re.IGNORECASE)  # all at once take 20 s on a page of names
    return [one.strip() for one in sentences if word.search(one)]


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in OTHER], ids=name_of)
def test_a_page_opens_with_who_needs_it(page: Path) -> None:
    title, first, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert title.startswith("# ")
    assert re.fullmatch(r"For those (?:[^.]|\.(?=\w))+: (?:[^.]|\.(?=\w))+\.", first.strip()), first


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_unwanted_words(page: Path) -> None:
    text = prose(page)
    for word, instead in unwanted().items():
        used = uses(text, word)
        assert not used, f"{used[0]!r}: rather {instead}"


def test_the_table_of_words_is_read() -> None:
    assert len(WORDS) > 12 and all(all(cells) for cells in WORDS)
    words = unwanted()
    assert {"taps?", "waiting\\ layers?", "found"} <= words.keys() and words["taps?"].startswith("kernel")
    assert uses("All is well. The Taps of a kernel.", "taps?") == ["The Taps of a kernel"]
    assert not uses("See `taps` and [offsets](taps.md). Tapped.", "taps?")
    written = " ".join(rather for _, rather, _ in WORDS)
    assert not [word for word in words if uses(written, word)], "both wanted and not"


@pytest.mark.parametrize("folder", SOURCES)
def test_no_retired_names(folder: str) -> None:
    used = re.compile("|".join(rf"(?P<r{i}>\b(?:{name})\b)" for i, name in enumerate(RETIRED)))
    files = ROOT.glob("*.md") if folder == "." else (ROOT / folder).rglob("*")
    for path in sorted(files):
        if path.suffix not in SUFFIXES or path in (Path(__file__).resolve(), ROOT / "CONTRIBUTING.md"):
            continue  # which say what is retired
        hit = used.search(path.read_text(encoding="utf-8"))
        if hit:
            instead = list(RETIRED.values())[int(str(hit.lastgroup)[1:])]
            pytest.fail(f"{path.relative_to(ROOT)}: {hit.group()!r}, rather {instead}")


def test_what_to_switch_on_is_ten_lines_at_most() -> None:
    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, flags=re.M)
    assert headings[:2] == ["Measured: new scenes", "What to switch on"]
    part = text.partition("## What to switch on\n")[2].partition("\n## ")[0]
    assert 1 < len(re.findall(r"^\| ", part, flags=re.M)) <= 1 + 10


def test_bits_lead_to_one_page() -> None:
    """Who says that bits repeat links to the page that says what they depend on."""
    for page in PAGES:
        text = prose(page)
        if page.name != "reproducibility.md" and re.search(r"bit (?:for|by) bit|to the bit", text):
            assert "reproducibility.md" in text, name_of(page)
