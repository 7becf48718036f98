"""The conformance suite: every operation on every backend and storage type, and whole models, against the oracle."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before NumPy is loaded: the processes of a parallel run share the cores, and BLAS threads that wait for one
    # another spin (seven times slower on two busy cores).
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
