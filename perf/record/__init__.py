"""Measurements with their provenance: perf/records."""
