"""Paths of the clone that the suite uses."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
SPECS = ROOT / "specs"
DATA = ROOT / "conformance" / "data"
MUTANTS = ROOT / "conformance" / "mutation" / "mutants"
ATTENTION = ROOT / "conformance" / "support" / "schedules" / "attention.toml"
PROJECTIONS = ATTENTION.with_name("projections.toml")
DEMO = MODELS / "demo-gemma3-q8_0.gguf"
