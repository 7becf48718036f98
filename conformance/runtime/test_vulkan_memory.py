"""The parts of the Vulkan runtime that need no device: allocator, hazards, grids, selection, build, SPIR-V reader."""

from __future__ import annotations

import hashlib
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.devices import need_compiler
from conformance.support.paths import DATA
from hybrid.core.plan import ALIGN, TensorDecl
from hybrid.kernels.vulkan import build, modules
from hybrid.kernels.vulkan.api import VulkanError, VulkanUnavailable
from hybrid.kernels.vulkan.dry import manifest
from hybrid.kernels.vulkan.instance import prefer, select, validation_mode
from hybrid.kernels.vulkan.kernel import SPIRV as SHIPPED
from hybrid.kernels.vulkan.kernel import Kernel, KernelCache, read_cache, write_cache
from hybrid.kernels.vulkan.memory import Buffer, FreeList, Slice
from hybrid.kernels.vulkan.recorder import Barrier, Live, Recorder
from hybrid.kernels.vulkan.spirv import SpirvError, inspect, written
from hybrid.kernels.vulkan.tensors import part_bytes, split_rows

TOY = DATA / "shaders"
SPIRV = DATA / "spirv"


# --- sub-allocation --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=60))
def test_sub_allocations_never_overlap_and_all_space_comes_back(steps: list[tuple[bool, int]]) -> None:
    block = FreeList(64 * ALIGN)
    live: list[tuple[int, int]] = []
    for take, n in steps:
        if take:
            offset = block.take(n)
            if offset is not None:
                assert offset % ALIGN == 0 and offset + n <= block.size
                assert all(offset + n <= o or o + m <= offset for o, m in live if n and m)
                live.append((offset, n))
        elif live:
            block.give(*live.pop(n % len(live)))
    for piece in live:
        block.give(*piece)
    assert block.empty


def test_a_full_block_refuses_and_a_double_free_is_an_error() -> None:
    block = FreeList(2 * ALIGN)
    assert block.take(ALIGN + 1) == 0 and block.take(1) is None
    block.give(0, ALIGN + 1)
    with pytest.raises(ValueError, match="freed twice"):
        block.give(0, ALIGN)


@given(st.integers(1, 500), st.sampled_from(["f32", "bf16", "q4_0", "q8_0"]), st.integers(1, 40), st.integers(64, 5000))
def test_split_weights_cover_every_row_within_the_limit(rows: int, dtype: str, blocks: int, limit: int) -> None:
    decl = TensorDecl("w", dtype, (rows, 32 * blocks), "weight")
    if max(part_bytes(dtype, (1, 32 * blocks))) > limit:
        with pytest.raises(VulkanError, match=r"(one row is|8 rows, which are stored in tiles, are) larger"):
            split_rows(decl, limit)
        return
    chunks = split_rows(decl, limit)
    assert [row for row, _ in chunks] == [sum(n for _, n in chunks[:i]) for i in range(len(chunks))]
    assert sum(n for _, n in chunks) == rows
    assert all(max(part_bytes(dtype, (n, 32 * blocks))) <= limit for _, n in chunks)


def test_only_weights_are_split() -> None:
    with pytest.raises(VulkanError, match=r"kv\.0\.k \(state f16.*a buffer of this device at most 1024"):
        split_rows(TensorDecl("kv.0.k", "f16", (64, 16, 1, 16), "state"), 1024)


# --- hazards and grids -----------------------------------------------------------------------------------------------


def null_recorder() -> tuple[Recorder, Buffer]:
    def kernel(name: str, **constants: int) -> Kernel:
        return Kernel(name, 3, 8, (64, 1, 1), writes=frozenset({2}))

    memory = Buffer(1 << 20, "device")
    device = SimpleNamespace(kernel=kernel, max_groups=(65535,) * 3, subgroup_size=32, max_range=1 << 27)
    return Recorder(device, Slice(memory, 0, 32)), memory


COPY = Kernel("copy", 3, 0, (64, 1, 1), writes=frozenset({2}))


def barriers_of(pairs: list[tuple[int, int]]) -> list[bool]:
    """Record one copy for each (source slot, target slot) of 256 bytes; returns which of them needed a barrier."""
    rec, memory = null_recorder()
    for source, target in pairs:
        rec.dispatch(COPY, [Slice(memory, 256 + 256 * source, 256)], [Slice(memory, 256 + 256 * target, 256)])
    return [b is not None for b in rec.finish().barriers]


def test_independent_dispatches_need_no_barrier() -> None:
    assert barriers_of([(0, 1), (2, 3), (0, 4)]) == [False, False, False]


def test_read_after_write_write_after_read_and_write_after_write_need_one() -> None:
    assert barriers_of([(0, 1), (1, 2)]) == [False, True]
    assert barriers_of([(0, 1), (2, 0)]) == [False, True]
    assert barriers_of([(0, 1), (2, 1)]) == [False, True]


def test_one_barrier_orders_everything_before_it() -> None:
    assert barriers_of([(0, 1), (2, 3), (1, 4), (3, 5)]) == [False, False, True, False]


def test_neighbouring_slices_are_no_hazard_and_partly_overlapping_ones_are() -> None:
    rec, memory = null_recorder()
    for offset in (256, 512, 600):
        rec.dispatch(COPY, [Slice(memory, 4096, 16)], [Slice(memory, offset, 256)])
    assert [b is not None for b in rec.finish().barriers] == [False, False, True]


def test_scratch_is_reused_by_the_next_step_and_ordered() -> None:
    rec, memory = null_recorder()
    for step in range(2):
        rec.begin_step(step)
        a, b = rec.scratch(100), rec.scratch(300)
        assert (a.offset, b.offset) == (0, 256)
        rec.dispatch(COPY, [Slice(memory, 4096, 16)], [b])
    done = rec.finish()
    assert done.scratch_bytes == 768 and [x is not None for x in done.barriers] == [False, True]


def test_equal_live_grids_share_an_entry_and_the_grid_kernel_runs_before_them() -> None:
    rec, memory = null_recorder()
    for i, per in enumerate((8, 8, 4)):
        target = Slice(memory, 1024 * (i + 1), 16)
        rec.dispatch(COPY, [Slice(memory, 256, 16)], [target], grid=(Live("rows", per, 64), 2, 1))
    done = rec.finish()
    assert [d.kernel.name for d in done.dispatches] == ["grid", "copy", "copy", "copy"]
    assert [d.entry for d in done.dispatches] == [None, 0, 0, 1]
    assert done.dispatches[0].push == struct.pack("<II", 0, 2)
    assert done.table[:4] == [0 | 8 << 8, 8, 0xFF, 2]
    assert done.barriers == [None, Barrier(to_indirect=True), None, None]


def test_grids_are_computed_again_after_a_step_that_writes_control() -> None:
    rec, memory = null_recorder()
    out = Slice(memory, 1024, 16)
    rec.dispatch(COPY, [Slice(memory, 256, 16)], [out], grid=(Live("rows", 1, 9), 1, 1))
    rec.dispatch(COPY, [out], [rec.control])
    rec.dispatch(COPY, [Slice(memory, 256, 16)], [out], grid=(Live("context", 64, 640), 1, 1))
    done = rec.finish()
    assert [d.kernel.name for d in done.dispatches] == ["grid", "copy", "copy", "grid", "copy"]
    assert done.barriers == [
        None,
        Barrier(to_indirect=True),
        Barrier(from_indirect=True),
        Barrier(),
        Barrier(to_indirect=True),
    ]


def test_a_live_grid_of_one_group_at_most_is_dispatched_directly() -> None:
    rec, memory = null_recorder()
    rec.dispatch(COPY, [Slice(memory, 256, 16)], [Slice(memory, 512, 16)], grid=(Live("rows", 8, 8), 1, 1))
    done = rec.finish()
    assert [(d.kernel.name, d.entry, d.grid) for d in done.dispatches] == [("copy", None, (1, 1, 1))]


MOVED = (Slice(Buffer(1 << 20, "device"), 256, 16), Slice(Buffer(1 << 20, "device"), 512, 16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reads": []}, "3 bindings"),
        ({"writes": [], "order": MOVED}, "copy writes its binding 2, which is recorded as read"),
        ({"reads": [], "writes": list(MOVED)}, "copy never writes its binding 1"),
        ({"push": b"1234"}, "0 bytes of push"),
        ({"grid": (0, 1, 1)}, "no groups"),
        ({"grid": (1 << 20, 1, 1)}, "limit"),
        ({"grid": (Live("rows", 1, 1 << 20), 1, 1)}, "limit"),
    ],
)
def test_a_wrong_dispatch_is_refused_when_it_is_recorded(arguments: dict, message: str) -> None:
    rec, _ = null_recorder()
    good = {"reads": [MOVED[0]], "writes": [MOVED[1]], "push": b"", "grid": (1, 1, 1)}
    with pytest.raises(VulkanError, match=message):
        rec.dispatch(COPY, **{**good, **arguments})


# --- selection -------------------------------------------------------------------------------------------------------

FOUND = [("llvmpipe", "cpu", 0), ("Radeon 780M", "integrated", 1), ("H200", "discrete", 2), ("Venus", "virtual", 3)]


def test_real_gpus_come_before_cpu_drivers() -> None:
    assert [d.label for d in prefer(FOUND)] == [
        "vulkan:0 (H200)",
        "vulkan:1 (Radeon 780M)",
        "vulkan:2 (Venus)",
        "vulkan:3 (llvmpipe)",
    ]


def test_selectors() -> None:
    devices = prefer(FOUND)
    assert [select(devices, s).name for s in ("auto", "vulkan", "gpu", "vulkan:3", "1")] == [
        "H200",
        "H200",
        "H200",
        "llvmpipe",
        "Radeon 780M",
    ]
    assert select(prefer(FOUND[:1]), "auto").name == "llvmpipe"


@pytest.mark.parametrize(
    ("devices", "selector", "message"),
    [
        ([], "auto", "mesa-vulkan-drivers libvulkan1"),
        (FOUND[:1], "gpu", r"real GPU \(found: vulkan:0 \(llvmpipe\)\)"),
        (FOUND[:1], "vulkan:1", r"no vulkan:1; here: vulkan:0 \(llvmpipe\)"),
    ],
)
def test_a_missing_device_is_named_with_the_available_ones(devices: list, selector: str, message: str) -> None:
    with pytest.raises(VulkanUnavailable, match=message):
        select(prefer(devices), selector)


def test_an_unknown_selector_is_no_missing_driver() -> None:
    with pytest.raises(ValueError, match="unknown Vulkan device 'cuda'"):
        select(prefer(FOUND), "cuda")


def test_validation_comes_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_VULKAN_VALIDATION", "1")
    assert [validation_mode(v) for v in (None, False, True, "sync")] == ["on", "", "on", "sync"]
    monkeypatch.setenv("HYBRID_VULKAN_VALIDATION", "0")
    assert validation_mode(None) == ""


# --- files: pipeline cache, SPIR-V, build ----------------------------------------------------------------------------


def test_a_damaged_pipeline_cache_is_refused_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "deep" / "cache.bin"
    assert read_cache(path) == b"" and not caplog.records
    write_cache(path, b"compiled")
    assert read_cache(path) == b"compiled"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert read_cache(path) == b"" and "is damaged" in caplog.text


def test_constants_set_workgroup_and_shared_memory() -> None:
    code = modules.read(SPIRV, "toy.affine")
    info = inspect(code, {0: 96})
    assert (info.local_size, info.shared_bytes, info.push, info.spec_ids) == ((96, 1, 1), 384, 12, {0})
    assert info.bindings == {0, 1, 2} and inspect(code).local_size == (32, 1, 1)
    with pytest.raises(SpirvError, match="magic"):
        inspect(b"\0" * 64)


def test_constants_decide_which_bindings_a_module_writes() -> None:
    """decode_attention appends keys and values (bindings 8 and 9) only where it projects them."""
    code, entry = modules.read(SHIPPED, "decode_attention.f32.2x1"), manifest()["decode_attention.f32.2x1"]
    assert written(code) == frozenset(entry["writes"]) and {8, 9} <= written(code)
    appends, reads = (written(code, {entry["constants"]["PROJECTIONS"]: n}) for n in (2, 0))
    assert appends - reads == {8, 9}


def test_a_module_that_is_cut_or_changed_is_refused_by_name(tmp_path: Path) -> None:
    code = modules.read(SPIRV, "toy.bump")
    modules.write(tmp_path, "toy.bump", code)
    path = modules.path_of(tmp_path, "toy.bump")
    packed = path.read_bytes()
    assert modules.names(tmp_path) == ["toy.bump"] and modules.read(tmp_path, "toy.bump") == code
    for damaged in (
        packed[:-9],
        packed[: len(packed) // 2],
        b"",
        b"\0" + packed[1:],
        packed[:40] + b"\xff\xff" + packed[42:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(SpirvError, match=r"toy\.bump\.spv\.gz is damaged"):
            modules.read(tmp_path, "toy.bump")
        with pytest.raises(VulkanError, match=r"toy\.bump\.spv\.gz is not the module that manifest\.json describes"):
            KernelCache._code(SimpleNamespace(folder=tmp_path), "toy.bump", hashlib.sha256(code).hexdigest())
    with pytest.raises(FileNotFoundError):
        modules.read(tmp_path, "toy.affine")


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    need_compiler()
    shutil.copytree(TOY, tmp_path / "shaders")
    sidecar = tmp_path / "shaders" / "toy.toml"
    sidecar.write_text(sidecar.read_text().replace("../../../kernels", str(Path(build.__file__).parents[1])))
    return tmp_path / "shaders"


def test_committed_test_kernels_are_what_their_sources_compile_to() -> None:
    need_compiler()
    assert build.check(TOY, SPIRV) == []


@pytest.mark.slow
def test_only_changed_shaders_are_compiled_and_check_reports_them(toys: Path, tmp_path: Path) -> None:
    out = tmp_path / "spirv"
    assert build.build(toys, out) == ["grid", "toy.affine", "toy.bump", "toy.stray"]
    assert build.build(toys, out) == [] and build.check(toys, out) == []
    source = toys / "toy.slang"
    source.write_text(source.read_text().replace("* push.scale + push.add", "* push.scale - push.add"))
    for share in (1, 1000):  # entries that differ from the manifest are rebuilt in any share
        assert [p.split(":")[0] for p in build.check(toys, out, share=share)] == ["toy.affine", "toy.bump", "toy.stray"]
    assert build.build(toys, out, only="toy.a") == ["toy.affine"]
    assert set(build.read_manifest(out)) == {"grid", "toy.affine", "toy.bump", "toy.stray"}
    modules.write(out, "grid", modules.read(out, "toy.bump"))
    assert all(
        any(p.startswith("grid: grid.spv.gz is not") for p in build.check(toys, out, "grid", n)) for n in (1, 1000)
    )


def test_the_manifest_has_what_a_shader_declares_used_or_not(toys: Path, tmp_path: Path) -> None:
    source = toys / "toy.slang"
    unused = "[[vk::constant_id(7)]] const uint SPARE = 1;\n[[vk::binding(5)]] StructuredBuffer<float> spare;\n"
    source.write_text(unused + source.read_text())
    build.build(toys, tmp_path / "out", only="toy.a")
    entry = build.read_manifest(tmp_path / "out")["toy.affine"]
    assert (entry["bindings"], entry["push"], entry["constants"]) == (6, 12, {"SPARE": 7, "THREADS": 0})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "const uint THREADS",
            "const uint WIDTH = 1;\n[[vk::constant_id(0)]] const uint THREADS",
            "THREADS, WIDTH share",
        ),
        ("struct Push", "uniform uint loose;\nstruct Push", "loose is no storage buffer"),
    ],
)
def test_a_shader_that_declares_what_no_kernel_can_have_is_refused(
    toys: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    source = toys / "toy.slang"
    source.write_text(source.read_text().replace(old, new, 1))
    with pytest.raises(build.BuildError, match=message):
        build.build(toys, tmp_path / "out", only="toy.b")


def test_a_sidecar_names_lists_of_types(toys: Path) -> None:
    (toys / "toy.toml").write_text(
        '[[kernel]]\nname = "toy.{W}.{X}"\nsource = "toy.slang"\ndefines = { W = ["f16", "scaled"], X = "cache" }\n'
    )
    assert {v.module for v in build.variants(toys)} == {
        f"toy.{w}.{x}" for w in ("f16", "q8_0", "q4_0") for x in ("f32", "f16", "q8_0")
    }


def test_a_key_that_sidecars_do_not_have_is_refused(toys: Path) -> None:
    sidecar = toys / "toy.toml"
    sidecar.write_text(sidecar.read_text().replace("defines", "defined", 1))
    with pytest.raises(build.BuildError, match="defined"):
        build.variants(toys)


def test_a_shader_error_is_shown_with_its_line(toys: Path, tmp_path: Path) -> None:
    (toys / "toy.slang").write_text((toys / "toy.slang").read_text().replace("uint row", "uint rwo"))
    with pytest.raises(build.BuildError, match=r"toy\.affine .*does not compile:(.|\n)*row"):
        build.build(toys, tmp_path / "out")


def test_slices_stay_within_their_parent() -> None:
    piece = Slice(Buffer(4096, "device", view=np.zeros(4096, np.uint8)), 512, 1000)
    assert piece.sub(256, 744).offset == 768 and piece.bytes.size == 1000
    with pytest.raises(ValueError, match="no range"):
        piece.sub(512, 1000)
