"""The loop over recorded cases: what fails is seen, and nothing at all is no success."""

from __future__ import annotations

import json

import numpy as np

from tests.goldens import driver


def manifest(folder, *names):
    cases = [{"id": n, "kind": "net", "family": f"family_{n[0]}", "file": f"{n}.npz"} for n in names]
    for name in names:
        np.savez(folder / f"{name}.npz", a=np.arange(3))
    (folder / "manifest.json").write_text(json.dumps({"cases": cases}))


def judged(entry):
    assert driver.load_arrays(entry["path"])["a"].tolist() == [0, 1, 2]
    if entry["id"] == "b1":
        raise driver.Mismatch("off by one")
    if entry["id"] == "b2":
        raise ValueError("two\nlines")
    return 0.5, "features"


def run(folder, *options):
    result = folder / "result.json"
    args = driver.parser("about").parse_args(["--cases", str(folder), "--json", str(result), *options])
    rows = driver.replay(driver.cases_of(args.cases, args.filter), judged, args)
    return driver.finish(rows, args, module="m"), json.loads(result.read_text())


def test_failures_are_counted_and_named(tmp_path, capsys):
    manifest(tmp_path, "a1", "b1", "b2")
    status, found = run(tmp_path)
    assert status == 1 and (found["passed"], found["failed"], found["module"]) == (1, 2, "m")
    reasons = {case["id"]: case["reason"] for case in found["cases"]}
    assert reasons == {"a1": "", "b1": "off by one", "b2": "ValueError: two lines"}
    shown = capsys.readouterr().out
    assert "FAIL b1" in shown and "PASS a1" in shown and "family_b" in shown


def test_filters_and_success(tmp_path, capsys):
    manifest(tmp_path, "a1", "b1", "a2")
    status, found = run(tmp_path, "--filter", "family_a,nothing", "--quiet")
    assert status == 0 and [case["id"] for case in found["cases"]] == ["a1", "a2"]
    assert "PASS" not in capsys.readouterr().out


def test_no_case_is_no_success(tmp_path):
    manifest(tmp_path, "a1")
    assert run(tmp_path, "--filter", "nothing")[0] == 1


def test_statements_run_first(tmp_path, monkeypatch):
    monkeypatch.delenv("GOLDEN_TEST", raising=False)
    driver.enable("")
    driver.enable("import os; os.environ['GOLDEN_TEST'] = '1'")
    import os

    assert os.environ.pop("GOLDEN_TEST") == "1"
