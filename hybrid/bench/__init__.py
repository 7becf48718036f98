"""python -m hybrid.bench: prefill and decode measured apart, against what this device was seen to reach in the same
run."""
