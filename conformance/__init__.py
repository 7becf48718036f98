"""The conformance suite: every operation on every backend and storage type, and whole models, against the oracle."""
