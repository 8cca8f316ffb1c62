"""One of the random graphs: ``PYTHONPATH=test:python:kernels python test/gpu/fuzz_run.py FAMILY SEED``."""

import sys

from support.fuzz import FAMILIES
from support.fuzz.harness import run

if __name__ == "__main__":
    family, seed = sys.argv[1:]
    outcome = run(FAMILIES[family].draw(int(seed)), "cuda", "cudnn")
    print(outcome.case.json(), outcome.status, outcome.plan, outcome.message, sep="\n")
    sys.exit(outcome.status == "failed")
