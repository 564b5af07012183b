"""Runs one compiler without a shell and keeps what it prints: run_logged.py LOG COMMAND...

Ninja prints a compiler's output once and forgets it; the log beside each object survives incremental builds,
so that the whole build's ptxas report can be read at any time.
"""

import subprocess
import sys


def main(argv: list[str]) -> int:
    log, command = argv[0], argv[1:]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    with open(log, "w") as file:
        file.write(done.stdout)
    # ptxas -v is for the log; a warning, an error or an advisory is for the eyes too.
    loud = [line for line in done.stdout.splitlines() if done.returncode or "warning" in line or "error" in line]
    if loud:
        print("\n".join(loud))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
