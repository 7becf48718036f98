"""Modelled times of NPU designs."""
