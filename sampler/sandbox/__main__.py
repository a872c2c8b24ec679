"""`python -m sampler.sandbox`: lists which mechanisms work here, and remedies for the others."""

from __future__ import annotations

import argparse
import json
import sys

from sampler.sandbox import probe
from sampler.sandbox.process import SET_A, SET_B


def main(arguments: list[str] | None = None) -> int:
    """Print the report; return 0 if code can be isolated here, else 1."""
    parser = argparse.ArgumentParser(prog="python -m sampler.sandbox", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for a program instead of a person")
    options = parser.parse_args(arguments)
    report = probe()
    sets = {"A": set(SET_A) <= set(report.working), "B": set(SET_B) <= set(report.working)}
    if options.json:
        rows = {
            m.name: {"works": m.works, "seen": m.seen, "remedy": m.remedy}
            for m in report.mechanisms
        }
        print(json.dumps({"isolates": report.isolates, "sets": sets, "mechanisms": rows}))
        return 0 if report.isolates else 1
    for mechanism in report.mechanisms:
        print(f"{'works ' if mechanism.works else 'BROKEN'}  {mechanism.name}: {mechanism.seen}")
        if mechanism.remedy:
            print(f"        remedy: {mechanism.remedy}")
    for name, works in sets.items():
        print(f"set {name}: {'enough by itself' if works else 'not available'}")
    print("code can be isolated here" if report.isolates else "code can NOT be isolated here")
    return 0 if report.isolates else 1


if __name__ == "__main__":
    sys.exit(main())
