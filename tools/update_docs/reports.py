"""Blocks about tests and installation."""

from __future__ import annotations

from .common import load, markdown


def first_run() -> str:
    """What the two commands of the README take on a fresh clone."""
    report = load("first_run")
    if report is None:
        return "Not timed yet: `python tools/first_run.py`."
    rows = [[f"`make {name}`", f"{r['first_s']:.0f} s", f"{r['again_s']:.0f} s"] for name, r in report.items()]
    r = next(iter(report.values()))
    return f"Fresh clone, {r['cores']} CPU cores, no GPU, Python {r['python']}, {r['date']}:\n\n" + markdown(
        ["", "from nothing, installation included", "again"], rows
    )


def install() -> str:
    """What an installation with kernels takes, and beside which versions of PyTorch a wheel was tried."""
    report = load("install") or {}
    parts = []
    if "build" in report:
        r = report["build"]
        parts.append(
            f"`pip install .` with kernels takes {r['first_s']:.0f} s from nothing and {r['again_s']:.0f} s again on "
            f"{r['cores']} CPU cores ({r['date']}); the library has {r['library_mb']:.0f} MB."
        )
    if "wheel" in report:
        r = report["wheel"]
        parts.append(
            f"A wheel of {r['mb']:.0f} MB installs in {r['install_s']:.0f} s; it imports beside PyTorch "
            f"{', '.join(r['torch'])} ({r['date']})."
        )
    return " ".join(parts) or "Not timed yet: `python tools/time_install.py`."


def gpu_tests() -> str:
    """What ran on a GPU, with which outcome."""
    report = load("gpu_tests")
    if report is None:
        return "Not run yet: `make gpu-test` on a Hopper machine."
    outcomes = [o for job in report["jobs"].values() for o in job.get("tests", {}).values()]
    files = [name for name in report["jobs"] if name.startswith("tests/")]
    sanitizers = sum("sanitizer" in name or "check " in name for name in report["jobs"])
    skipped = sorted({o.removeprefix("skipped: ") for o in outcomes if o.startswith("skipped")})
    ran = sum(not o.startswith("skipped") for o in outcomes)
    passed = f"{outcomes.count('passed')} of {ran} passed, and {sanitizers} runs of compute-sanitizer"
    if skipped:
        passed += f"; {len(outcomes) - ran} skipped ({'; '.join(skipped)})"
    return (
        f"{', '.join(files)} ({report['gpu']}, driver {report['driver']}, torch {report['torch']}, "
        f"{report['date'][:10]}): {passed}. Files that are not named did not run on a GPU with those sources."
    )


BLOCKS = {
    "first_run": first_run,
    "install": install,
    "gpu_tests": gpu_tests,
}
