"""Which profile runs (HYBRID_CONFORMANCE): the short one for every change, `long` by hand, or `trial`, that of a mutant
(conformance/trial.py), where one failure is enough and nobody reads the smallest."""

import os

PROFILE = os.environ.get("HYBRID_CONFORMANCE") or "ci"
LONG = PROFILE == "long"
