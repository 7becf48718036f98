"""python -m hybrid.bench: speed of prefill and decode, measured separately, with roofs measured in the same run."""
