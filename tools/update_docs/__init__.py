"""Writes the measured blocks of README.md and docs/ from benchmarks/results/*.json: `python -m tools.update_docs`."""
