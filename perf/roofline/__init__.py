"""What bounds a model on a device, by the declared costs of its operations."""
