"""A server and its scheduler, measured: what clients see, whether answers are right under load, what scheduling
costs."""
