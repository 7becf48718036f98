"""Artefacts belong to the sources that they were built from, and the build says what it lacks, or drives the real tools."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid.kernels.npu import build
from hybrid.kernels.npu.artefact import ArtefactError, decode, encode, fabric_digest, find, stem
from hybrid.kernels.npu.build import build_sim
from hybrid.kernels.npu.build import main as build_main
from hybrid.kernels.npu.designs import gemm_i8
from hybrid.kernels.npu.designs.gemm import Gemm

G = Gemm(64, 64, 32, 16, 32, 16, 1)


def test_artefacts_of_other_sources_are_refused(tmp_path: Path) -> None:
    design = gemm_i8(G)
    build_sim(design, tmp_path)
    listing = tmp_path / f"{stem(design)}.json"
    table = json.loads(listing.read_text())
    with pytest.raises(ArtefactError, match="nothing was built"):
        find(tmp_path, gemm_i8(replace(G, K=96)))
    other = replace(design, kernels=tuple(replace(k, stack_bytes=600) for k in design.kernels))
    with pytest.raises(ArtefactError, match="other kernels or another design"):
        find(tmp_path, other)
    with pytest.raises(ArtefactError, match="stream was not built"):
        find(tmp_path, gemm_i8(replace(G, M=128)))
    listing.write_text(json.dumps(table | {"digest": "0" * 64}))
    with pytest.raises(ArtefactError, match="build it again"):
        find(tmp_path, design)
    listing.write_text(json.dumps(table))
    found = find(tmp_path, design)
    found.xclbin.write_bytes(found.xclbin.read_bytes() + b"#")
    with pytest.raises(ArtefactError, match="SHA-256"):
        find(tmp_path, design)


def test_the_digest_covers_kernels_headers_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    design, first = gemm_i8(G), fabric_digest(gemm_i8(G))
    assert fabric_digest(gemm_i8(replace(G, M=128))) == first  # another stream of the same fabric
    assert fabric_digest(gemm_i8(replace(G, K=96))) != first
    monkeypatch.setattr("hybrid.kernels.npu.objects.host.digest", lambda name, **_: f"changed {name}")
    assert fabric_digest(design) != first


def test_instruction_streams_come_back() -> None:
    design = gemm_i8(G)
    data = encode(design)
    assert len(data) % 4 == 0 and decode(data) == (fabric_digest(design), design.arguments, design.sequence)


def test_the_build_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    monkeypatch.delenv("PEANO_INSTALL_DIR", raising=False)
    assert build_main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    for part in ("nothing was built", "mlir_aie -f https://github.com/Xilinx/mlir-aie/releases", "aiecc.py", "Peano", "aie_api"):
        assert part in said
    assert not list(tmp_path.iterdir())
    assert build_main(["small.i8.c1", "--sim", "--out", str(tmp_path)]) == 0 and list(tmp_path.glob("*.xclbin"))
    capsys.readouterr()
    (tmp_path / "file").touch()
    unwritable = ["small.i8.c1", "--sim", "--out", str(tmp_path / "file" / "x")]
    for wrong, says in ((["nothing"], "no design 'nothing'"), (unwritable, "file")):
        assert build_main(wrong) == 1
        err = capsys.readouterr().err
        assert err.startswith("error: ") and says in err and err.count("\n") == 1


def test_the_build_drives_the_real_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands, in order, with stand-ins that only write their files."""
    commands: list[tuple[str, ...]] = []

    def tool(at: Path, *command: str) -> str:
        commands.append(command)
        if "aiecc" in command[0]:
            (at / "design.xclbin").write_bytes(b"xclbin2")
            (at / "design.bin").write_bytes(b"\0\0\0\0")
        return "text data\n   4096 0 0\n" if "size" in command[0] else "module {}\n"

    monkeypatch.setattr(build, "_tool", tool)
    tools = build.Tools(Path("clang++"), Path("llvm-size"), Path("aiecc.py"), Path("include"), Path("peano"))
    design = gemm_i8(G)
    build.build_npu(design, tmp_path, tools)
    assert [Path(c[0]).name for c in commands] == ["clang++", "llvm-size", Path(sys.executable).name, "aiecc.py"]
    assert "--target=aie2-none-unknown-elf" in commands[0] and "-DDIM_M=16" in commands[0]
    assert {"--aie-generate-xclbin", "--no-xchesscc", "--dynamic-objFifos", "--npu-insts-name=design.bin"} <= set(commands[-1])
    assert find(tmp_path, design).builder.startswith("mlir-aie")
    monkeypatch.setattr(build, "_tool", lambda at, *c: "text\n 20000 0\n" if "size" in c[0] else "")
    with pytest.raises(RuntimeError, match="a core has 16384"):
        build.build_npu(design, tmp_path, tools)
