"""Which profile runs: the short one for every change, or the long one by hand (HYBRID_CONFORMANCE=long)."""

import os

LONG = os.environ.get("HYBRID_CONFORMANCE") == "long"
