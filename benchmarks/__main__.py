"""`make bench`: speed and memory against peers, written to docs/performance.md."""

import typer

from benchmarks.speed import main

typer.run(main)
