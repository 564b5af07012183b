"""What the tests of the package share: where things are, and commands whose output a failure shows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments, cwd=None, **environment):
    """Output of a command; its whole output in the failure where it fails."""
    done = subprocess.run(
        [str(a) for a in arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{arguments} failed:\n{done.stdout}"
    return done.stdout
