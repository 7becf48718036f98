"""A stand-in module `pyxrt`: the simulator under a hardware device's name.

For tests of a machine with driver and XRT. Commands find it through `folder_of`, this process through `installed`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from hybrid.kernels.npu import xrt_sim

NAME = "RyzenAI-npu1"


def standin(*lacks: str) -> ModuleType:
    """The module, without the names `lacks`."""
    made = ModuleType("pyxrt")
    for name, value in vars(xrt_sim).items():
        if not name.startswith("_") and name not in lacks:
            setattr(made, name, value)

    class device(xrt_sim.device):
        def get_info(self, key: xrt_sim.xrt_info_device) -> str:
            return NAME if key == xrt_sim.xrt_info_device.name else super().get_info(key)

    if "device" not in lacks:
        setattr(made, "device", device)  # noqa: B010 - a module's name is no attribute that mypy knows
    return made


@contextmanager
def installed(module: ModuleType) -> Iterator[None]:
    """Make `import pyxrt` return the module."""
    before = sys.modules.get("pyxrt")
    sys.modules["pyxrt"] = module
    try:
        yield
    finally:
        del sys.modules["pyxrt"]
        if before is not None:
            sys.modules["pyxrt"] = before


def folder_of(path: Path) -> Path:
    """A folder for PYTHONPATH from which commands import the module."""
    text = "import sys\nfrom conformance.support.pyxrt_standin import standin\nsys.modules['pyxrt'] = standin()\n"
    (path / "pyxrt.py").write_text(text)
    return path
