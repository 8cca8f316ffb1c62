"""The random graphs from the command line.

``PYTHONPATH=test:python:kernels python test/gpu/fuzz_run.py matmul --seed 17`` runs one case;
``... fuzz_run.py --processes 12 --report fuzz.jsonl`` runs all families in full.
"""

import sys

from support.fuzz.sweep import main

if __name__ == "__main__":
    sys.exit(main())
