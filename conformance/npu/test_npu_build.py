"""Artefacts match the sources that they were built from; the build reports missing tools, or drives the real ones."""

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
from hybrid.kernels.npu.catalogue import AIE
from hybrid.kernels.npu.designs import gemm_i8
from hybrid.kernels.npu.designs.gemm import Gemm
from hybrid.kernels.npu.iron import manifest

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
    assert fabric_digest(gemm_i8(replace(G, M=128))) == first  # another instruction stream of the same fabric
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
    for part in (
        "nothing was built",
        "mlir_aie -f https://github.com/Xilinx/mlir-aie/releases",
        "aiecc.py",
        "Peano",
        "aie_api",
    ):
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


def _wheels(site: Path) -> Path:
    """Folders laid out as the wheels mlir_aie and llvm-aie: the package two folders down, headers in two more."""
    root = site / "mlir_aie"
    for file in (
        "python/aie/__init__.py",
        "include/aie_api/aie.hpp",
        "include/aie_kernels/aie_kernel_utils.h",
        "bin/aiecc.py",
        "../llvm-aie/bin/clang++",
    ):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


def test_the_tools_are_found_where_the_wheels_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _wheels(tmp_path)
    monkeypatch.delenv("PEANO_INSTALL_DIR", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    monkeypatch.setattr(build, "installed", manifest)
    monkeypatch.setattr(sys, "path", [str(root / "python"), str(tmp_path)])  # as the wheel's .pth file does
    found, missing = build.tools()
    assert missing == [] and found is not None
    assert (found.include, found.aiecc) == (root / "include", root / "bin" / "aiecc.py")
    assert found.clang == tmp_path / "llvm-aie" / "bin" / "clang++"
    for gone, says in (
        ("include/aie_kernels/aie_kernel_utils.h", "aie_kernel_utils.h"),
        ("include/aie_api/aie.hpp", "aie_api"),
        ("bin/aiecc.py", "aiecc.py on PATH"),
        ("../llvm-aie/bin/clang++", "Peano"),
    ):
        (root / gone).unlink()
        found, missing = build.tools()
        assert found is None and len(missing) == 1 and says in missing[0], missing
        (root / gone).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # unpacked without its .pth file
    found, missing = build.tools()
    assert found is None and missing == [
        f"Python package `aie` on the path: set PYTHONPATH={root / 'python'}, which has it"
    ]


def test_frames_are_added_up() -> None:
    """An entry point's own frame and those of functions that may not have been inlined; other entry points are not its
    callees."""
    text = "softmax.h:88:13:softmax_rows\t640\tstatic\na.cc:3:6:tile\t1600\tstatic\na.cc:9:6:start\t96\tstatic\n"
    assert build.frame_bytes(text, ["tile", "start", "finish"]) == {"tile": 2240, "start": 736}
    with pytest.raises(RuntimeError, match="no bound"):
        build.frame_bytes("a.cc:3:6:tile\t16\tdynamic\n", ["tile"])


def test_the_build_drives_the_real_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands, in order, with stand-ins that only write their files."""
    commands: list[tuple[str, ...]] = []
    frame = 1312

    def tool(at: Path, *command: str) -> str:
        commands.append(command)
        if "clang" in command[0]:
            (at / command[-1]).with_suffix(".su").write_text(f"gemm_i8.cc:28:6:gemm_i8\t{frame}\tstatic\n")
        if "aiecc" in command[0]:
            (at / "design.xclbin").write_bytes(b"xclbin2")
            (at / "design.bin").write_bytes(b"\0\0\0\0")
        return "text data\n   4096 0 0\n" if "size" in command[0] else "module {}\n"

    monkeypatch.setattr(build, "_tool", tool)
    tools = build.Tools(Path("clang++"), Path("llvm-size"), Path("aiecc.py"), Path("include"), Path("peano"))
    design = gemm_i8(G)
    build.build_npu(design, tmp_path, tools)
    assert [Path(c[0]).name for c in commands] == ["clang++", "llvm-size", Path(sys.executable).name, "aiecc.py"]
    assert {"--target=aie2-none-unknown-elf", "-DDIM_M=16", "-fstack-usage"} <= set(commands[0])
    given = [commands[0][i + 1] for i, word in enumerate(commands[0]) if word == "-I"]
    assert given == ["include", "include/aie_kernels", str(AIE)]
    assert {"--aie-generate-xclbin", "--no-xchesscc", "--dynamic-objFifos", "--npu-insts-name=design.bin"} <= set(
        commands[-1]
    )
    assert find(tmp_path, design).builder.startswith("mlir-aie")
    frame = 3200
    with pytest.raises(RuntimeError, match="3200 bytes of stack and the core's program 256, its worker has 3392"):
        build.build_npu(design, tmp_path, tools)
    monkeypatch.setattr(build, "_tool", lambda at, *c: "text data\n 4096 0\n" if "size" in c[0] else "")
    with pytest.raises(RuntimeError, match=r"wrote no gemm_i8_\w+.su"):
        build.build_npu(design, tmp_path / "other", tools)
    monkeypatch.setattr(build, "_tool", lambda at, *c: "text\n 20000 0\n" if "size" in c[0] else "")
    with pytest.raises(RuntimeError, match="a core has 16384"):
        build.build_npu(design, tmp_path, tools)
