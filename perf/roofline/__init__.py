"""Roofline of a model on a device, from the declared costs of its operations."""
