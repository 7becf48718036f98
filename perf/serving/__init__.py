"""Measurements of the server and its scheduler: client latencies, correct answers under load, scheduling cost."""
