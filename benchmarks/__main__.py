"""Run benchmarks in order, keep their results in benchmarks/out, and write docs/benchmarks.md.

python -m benchmarks [NAME] [--small] [options of that benchmark]
"""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks import measuring, report

NAMES = ["selection", "embedding", "clustering", "out_of_core", "training"]


def main(arguments: list[str]) -> None:
    """Run the benchmark named first, or all of them; then write the note."""
    small = "--small" in arguments
    named = arguments[0] if arguments and not arguments[0].startswith("-") else "all"
    if named not in [*NAMES, "all", "report"]:
        raise SystemExit(f"no benchmark {named!r}; known: all, report, {', '.join(NAMES)}")
    if named == "all" and set(arguments) - {"all", "--small"}:
        raise SystemExit("options are those of one benchmark: name it first")
    results = measuring.OUT / ("small" if small else "results")
    for name in NAMES if named == "all" else [named] if named != "report" else []:
        module = import_module(f"benchmarks.{name}")
        options = module.parse([a for a in arguments if a != named])
        measuring.tell(f"{name}: started")
        measuring.tell(f"{name}: {measuring.save(name, module.measure(options), out=results)}")
    measuring.tell(report.write(results, results if small else report.DOCS))


if __name__ == "__main__":
    main(sys.argv[1:])
