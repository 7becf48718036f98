"""The capture command, on the simulator: a capture compares equal, and a changed output is detected."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hybrid.harness.npu_capture import cases, digest, main
from hybrid.kernels.npu import device as npu_device
from hybrid.kernels.npu.artefact import ArtefactError
from hybrid.kernels.npu.designs import shipped
from hybrid.kernels.npu.device import NpuDevice
from hybrid.spec import load_ops


@pytest.mark.slow
def test_a_capture_compares_equal_and_a_changed_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.zip"
    assert main([str(file), "--npu", "sim", "--only", "matmul_i8/00"]) == 0
    assert "on sim-npu1, 0 failed" in capsys.readouterr().out
    assert main([str(file), "--compare"]) == 0
    with zipfile.ZipFile(file) as box:
        content = {n: box.read(n) for n in box.namelist()}
    head = json.loads(content["capture.json"])
    assert head["simulated"] and "amdxdna" in head["machine"] and "27b.down.i8" in head["designs"]
    assert head["builders"] == ["sim-npu1"]
    name = next(n for n in content if n.endswith("y.npy"))
    array = np.load(io.BytesIO(content[name])).copy()
    array[0, 0] += 1
    stream = io.BytesIO()
    np.save(stream, array)
    for renew in (False, True):  # once as damage, once as another result
        if renew:
            head["entries"][name.removesuffix("/y.npy")]["outputs"]["y"] = digest(array)
        with zipfile.ZipFile(file, "w") as box:
            for n, data in (content | {name: stream.getvalue(), "capture.json": json.dumps(head).encode()}).items():
                box.writestr(n, data)
        assert main([str(file), "--compare"]) == 1


def test_a_design_that_cannot_be_built_fails_its_own_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As an artefact's error, which a capture notes and goes on from: a tool's exit is no end of the command."""

    def refused(*_: object) -> None:
        raise RuntimeError("core_0_2.elf: 17000 bytes of program, a core has 16384")

    monkeypatch.setattr(npu_device, "tools", lambda: (object(), []))
    monkeypatch.setattr(npu_device, "build_npu", refused)
    device = NpuDevice("sim", folder=tmp_path)
    with pytest.raises(ArtefactError, match=r"_c1 is not built: core_0_2.elf: 17000 bytes"):
        device._build(shipped()["small.i8.c1"]())
    device.close()


def test_without_hardware_nothing_is_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "c.zip")]) == 1
    assert "pyxrt" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_every_operation_of_the_npu_is_captured() -> None:
    supported = {op for op, spec in load_ops().items() if spec.runs_on("npu")}
    assert {name.split("/")[0] for name, *_ in cases()} == supported and {"attention_i8", "matmul_i8"} < supported
