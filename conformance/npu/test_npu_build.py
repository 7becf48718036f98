"""Artefacts match the sources that they were built from; the build reports missing tools, or drives the real ones."""

from __future__ import annotations

import json
import struct
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
    release = "1.4.0"
    monkeypatch.setattr(build.importlib.metadata, "version", lambda _: release)
    monkeypatch.setattr(sys, "path", [str(root / "python"), str(tmp_path)])  # as the wheel's .pth file does
    found, missing = build.tools()
    assert missing == [] and found is not None
    assert (found.include, found.aiecc, found.release) == (root / "include", root / "bin" / "aiecc.py", "1.4.0")
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
    release = "1.3.4"
    found, missing = build.tools()
    assert found is None and len(missing) == 1
    assert "1.4.0 or 1.4.5 (1.3.4 is installed)" in missing[0] and "iron.toml, [build]" in missing[0]
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


def _elf(*sections: tuple[int, int, int]) -> bytes:
    """An ELF of 32 bits that has these sections: (flags, address, bytes)."""
    head = (
        b"\x7fELF\x01\x01".ljust(32, b"\0")
        + struct.pack("<I", 52)
        + bytes(10)
        + struct.pack("<3H", 40, len(sections), 0)
    )
    return head + b"".join(struct.pack("<10I", 0, 1, f, at, 0, n, 0, 0, 0, 0) for f, at, n in sections)


WRITE, ALLOC, CODE = 1, 2, 4


def test_program_memory_is_read_from_the_linked_core() -> None:
    """Code from address 0 on, however many sections it has; neither data nor what is not loaded."""
    parts = [
        (ALLOC | CODE, 0, 0x370),
        (ALLOC | CODE, 0x400, 0x2000),
        (ALLOC | WRITE, 0x70000, 0x8000),
        (CODE, 0, 0x9000),
    ]
    assert build.program_bytes(_elf(*parts)) == 0x2400
    for wrong in (_elf(*parts[2:]), b"\x7fELF\x02\x01" + bytes(60), b""):
        with pytest.raises(ValueError, match=r"ELF of 32 bits|no section"):
            build.program_bytes(wrong)


# Of tools/aiecc/CommandLineOptions.h at the release: what it calls the outputs and options that the build names.
KNOWN = {
    "--get-xclbin",
    "--get-npu-insts",
    "--get-core-elfs",
    "--dynamic-objFifos",
    "--peano",
    "--xclbin-name",
    "--npu-insts-name",
}
OPTIONS = {"1.4.0": KNOWN | {"--no-xchesscc", "--no-xbridge"}, "1.4.5": KNOWN}
PEANO = "clang version 21.0.0 (https://github.com/Xilinx/llvm-aie ce8c0f8f" + "0" * 32 + ")"


@pytest.mark.parametrize("release", sorted(OPTIONS))
def test_the_build_drives_the_real_tools(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands, in order, with stand-ins that only write their files."""
    commands: list[tuple[str, ...]] = []
    frame, code, cores = 1312, 0x4000, 4

    def tool(at: Path, *command: str) -> str:
        if "--version" in command:
            return f"{PEANO}\nTarget: aie2-none-unknown-elf\n"
        commands.append(command)
        if "clang" in command[0]:
            (at / command[-1]).with_suffix(".su").write_text(f"gemm_i8.cc:28:6:gemm_i8\t{frame}\tstatic\n")
        if "aiecc" in command[0]:
            (at / "design.xclbin").write_bytes(b"xclbin2")
            (at / "design.bin").write_bytes(b"\0\0\0\0")
            for row in range(2, 2 + cores):
                for folder in (at, at / "design.mlir.prj" / f"elfs_main_core_0_{row}"):
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"elfs_main_core_0_{row}.elf").write_bytes(_elf((ALLOC | CODE, 0, code)))
        return "module {}\n"

    monkeypatch.setattr(build, "_tool", tool)
    tools = build.Tools(Path("clang++"), Path("aiecc.py"), Path("include"), Path("peano"), release=release)
    design = gemm_i8(G)
    build.build_npu(design, tmp_path, tools)
    assert [Path(c[0]).name for c in commands] == ["clang++", Path(sys.executable).name, "aiecc.py"]
    wanted = {"--target=aie2-none-unknown-elf", "-DDIM_M=16", "-fstack-usage", "-D__AIE_API_AIE_ADF_HPP__"}
    assert wanted <= set(commands[0])
    given = [commands[0][i + 1] for i, word in enumerate(commands[0]) if word == "-I"]
    assert given == ["include", "include/aie_kernels", str(AIE)]
    assert {word.partition("=")[0] for word in commands[-1][1:-1]} == OPTIONS[release]
    assert {"--peano=peano", "--npu-insts-name=design.bin"} < set(commands[-1]) and commands[-1][-1] == "design.mlir"
    assert find(tmp_path, design).builder == f"mlir-aie {release}, {PEANO}"
    code = 0x4010
    with pytest.raises(RuntimeError, match=r"core_0_\d.elf: 16400 bytes of program, a core has 16384"):
        build.build_npu(design, tmp_path / "long", tools)
    cores = 3
    with pytest.raises(RuntimeError, match=r"aiecc wrote 3 linked cores .* of 4"):
        build.build_npu(design, tmp_path / "few", tools)
    frame = 3200
    with pytest.raises(RuntimeError, match="3200 bytes of stack and the core's program 256, its worker has 3392"):
        build.build_npu(design, tmp_path, tools)
    monkeypatch.setattr(build, "_tool", lambda at, *c: "")
    with pytest.raises(RuntimeError, match=r"wrote no gemm_i8_\w+.su"):
        build.build_npu(design, tmp_path / "other", tools)


def test_another_compiler_than_the_pinned_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the commit that it prints; the build goes on, since nightlies are deleted."""
    tools = build.Tools(Path("clang++"), Path("aiecc.py"), Path("include"), Path("peano"), release="1.4.0")
    assert build.unpinned(tools, PEANO) == ""
    other = PEANO.replace("ce8c0f8f", "cb664e8c")
    assert build.unpinned(tools, other).endswith("mlir-aie 1.4.0 is made with llvm-aie 21.0.0.2026072001+ce8c0f8f")
    assert "has no `peano`" in build.unpinned(replace(tools, release="1.4.5"), PEANO)
    built = []
    monkeypatch.setattr(build, "tools", lambda: (tools, []))
    monkeypatch.setattr(build, "_tool", lambda at, *command: other)
    monkeypatch.setattr(build, "build_npu", lambda design, folder, t: built.append(design))
    assert build_main(["small.i8.c1", "--out", str(tmp_path)]) == 0 and len(built) == 1
    assert capsys.readouterr().err.startswith("note: clang version 21.0.0")
