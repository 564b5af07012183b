"""Runs one compiler without a shell and keeps what it prints: run_logged.py OUTPUT COMMAND...

The command writes OUTPUT, which appears whole or not at all: several builds may share one store of objects. The
compiler's words go to OUTPUT.log, so that the whole build's ptxas report can be read at any time.
"""

import os
import resource
import shutil
import subprocess
import sys


def main(argv: list[str]) -> int:
    output, command = argv[0], argv[1:]
    folder, name = os.path.split(output)
    mine = os.path.join(folder, f"by-{os.getpid()}")
    os.makedirs(mine)
    made = os.path.join(mine, name)
    done = subprocess.run(
        [made if argument == output else argument for argument in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of a processor: what else the machine does is no part of it
    # ptxas -v is for the log; a warning, an error or an advisory is for the eyes too.
    loud = [line for line in done.stdout.splitlines() if done.returncode or "warning" in line or "error" in line]
    if loud:
        print("\n".join(loud))
    if done.returncode == 0:
        with open(f"{made}.log", "w") as file:
            file.write(f"{done.stdout.rstrip()}\nseconds: {used.ru_utime + used.ru_stime:.1f}\n")
        for file in sorted(os.listdir(mine), key=lambda file: file == name):  # the output last
            os.replace(os.path.join(mine, file), os.path.join(folder, file))
    shutil.rmtree(mine)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
