"""The page in a real browser: filters, link to a filtered view, keyboard. Skipped without one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from compat import page
from tests.patience import PATIENCE

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), "")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here")

# What a visitor does; each step leaves what is to be seen in `seen`.
_VISIT = """
<script>
addEventListener("load", async () => {
  const seen = {};
  const rows = () => [...document.querySelectorAll("#cells tbody tr")]
    .filter(row => row.getClientRects().length).map(row => row.querySelector("th").textContent);
  const note = name => { seen[name] = [rows(), document.getElementById("shown").value,
    location.hash]; };
  const choose = (id, value) => {
    const field = document.getElementById(id);
    field.value = value;
    field.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const later = () => new Promise(done => setTimeout(done, 20));
  note("start");
  choose("framework", "minkowski"); note("framework");
  document.querySelector("button[type=reset]").click(); await later(); note("reset");
  choose("device", "NVIDIA H200"); note("device"); choose("device", "");
  choose("outcome", "fail"); note("outcome"); choose("outcome", "");
  choose("text", "unet PASS h200"); note("text"); choose("text", "");
  location.hash = "#outcome=pass&device=CPU"; await later(); note("link");
  location.hash = ""; await later();
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "/", bubbles: true }));
  seen.slash = document.activeElement.id;
  const stops = [...document.querySelectorAll("select, input, button, summary, [tabindex]")];
  seen.stops = stops.every(one => { one.focus(); return document.activeElement === one; });
  const detail = document.querySelector("details");
  seen.closed = detail.querySelector("ul").checkVisibility();
  detail.querySelector("summary").click();
  const line = detail.querySelector("li");
  seen.opened = line.checkVisibility() && line.textContent;
  const style = getComputedStyle(document.body);
  seen.colours = [style.backgroundColor, style.color];
  seen.overflow = document.documentElement.scrollWidth > innerWidth;
  document.title = JSON.stringify(seen);
});
</script>
"""


def visit(text, folder, *options):
    """What the visitor saw."""
    path = folder / "page.html"
    path.write_text(text.replace("</body>", _VISIT + "</body>"))
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={folder / 'profile'}",
            "--virtual-time-budget=5000",
            *options,
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    (title,) = re.findall(r"<title>(.*)</title>", done.stdout)
    assert title.startswith("{"), done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(title.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


def test_page_in_a_browser(results, tmp_path):
    seen = visit(page.render(results, []), tmp_path, "--window-size=1400,900")
    everything = [["SECOND", "UNet", "UNet", "FCGF"], "4 cells", ""]
    assert seen["start"] == seen["reset"] == everything
    assert seen["framework"] == [["FCGF"], "1 of 4 cells", "#framework=minkowski"]
    assert seen["device"] == [["UNet"], "1 of 4 cells", "#device=NVIDIA+H200"]
    assert seen["outcome"][0] == ["UNet"] and seen["text"][0] == ["UNet"]
    assert seen["link"] == [["SECOND"], "1 of 4 cells", "#device=CPU&outcome=pass"]
    assert seen["slash"] == "text" and seen["stops"]
    assert not seen["closed"] and "forward: pass" in seen["opened"]
    assert seen["colours"] == ["rgb(255, 255, 255)", "rgb(28, 33, 39)"]
    assert not seen["overflow"]


def test_page_in_the_dark_on_a_narrow_screen(results, tmp_path):
    options = ("--window-size=500,800", "--blink-settings=preferredColorScheme=0")
    seen = visit(page.render(results, []), tmp_path, *options)
    assert seen["colours"] == ["rgb(20, 24, 29)", "rgb(228, 232, 236)"]
    assert seen["start"][1] == "4 cells" and not seen["overflow"]
