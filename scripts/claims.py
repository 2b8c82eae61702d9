"""Measure and judge what the paper claims: results/claims.md, results/claims.json and five lines of the README.

    python -m scripts.claims            # all of it, about four minutes on one core
    python -m scripts.claims T1 K       # some groups, on the screen alone
    python -m scripts.claims --full     # ten times the draws and rounds: intervals a third as wide

T1, T2, T3: the theorems. K: the kernels. C: cost. M: memory. F3, F4: the two toy experiments. TAB: Table 2.
F3, F4 and TAB are judged from what `make figure-rmfa`, `make figure-ppsbn`, `make bench` and train.py have written.
"""

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from macformer.bench.race import provenance
from macformer.harness import device as devices
from macformer.harness import files
from macformer.paper import claims
from macformer.paper.finding import rounded
from scripts.table import find_block, write_block

BEGIN, END = "<!-- written by `make claims` -->", "<!-- until here: claims -->"


def main(arguments: Sequence[str] | None = None) -> None:
    groups = ", ".join(claims.GROUPS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {groups}; default: all, written")
    parser.add_argument("--full", action="store_true", help="ten times the draws and rounds (about 25 minutes)")
    options = parser.parse_args(arguments)
    if unknown := [group for group in options.groups if group not in claims.GROUPS]:
        sys.exit(f"error: {unknown[0]} is no group of claims; choose from {groups}")
    if not options.groups:
        find_block(BEGIN, END)  # now, not when all the work is done
    devices.prepare(torch.device("cpu"), threads=1)
    findings = []
    for group in options.groups or claims.GROUPS:
        for finding in claims.GROUPS[group](10 if options.full else 1):
            print("{id}: {verdict}\n  {claim}\n  {measured}".format_map(finding), flush=True)
            findings.append(rounded(finding))
    if options.groups:
        return
    command = "python -m scripts.claims" + " --full" * options.full
    report = {"command": command, **provenance(torch.device("cpu")), "findings": findings}
    files.write(claims.RESULTS / "claims.json", json.dumps(report, indent=1) + "\n")
    files.write(claims.RESULTS / "claims.md", claims.markdown(report))
    write_block(BEGIN, END, claims.summary(report))
    print("written: results/claims.md, results/claims.json, and the README's summary")


if __name__ == "__main__":
    main()
