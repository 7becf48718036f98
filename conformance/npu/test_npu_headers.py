"""The headers command, on a made-up aie_api: undeclared intrinsics are found, a kernel's own errors are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.kernels.npu.headers import Found, headers_of, held_against, judged, main

pytestmark = pytest.mark.slow

API = """
#pragma once
#define ROUND_UP OP_TERM_UP
namespace aie {
template <class T, unsigned N> struct vector { static_assert(N == 16, "vectors of 16"); };
template <unsigned N, class T> vector<T, N> load_v(const T *p) {
    v16int8 wide = ::load_wide(p);
    auto other = ::load_wide(p);
    std::array<v16int8, 2> both = {wide, other.half};
    return {};
}
template <class T, unsigned N> void store_v(T *p, const vector<T, N> &v) { ::store_wide(p, v, ROUND_UP); }
} // namespace aie
#if defined(__AIENGINE__) && !defined(__AIE_API_AIE_ADF_HPP__)
#include <adf.h>
#endif
"""
GOOD = """
#include <aie_api/aie.hpp>
#include <aie_kernel_utils.h>
extern "C" void copy(const signed char *a, signed char *b) {
    event0();
    AIE_LOOP_MIN_ITERATION_COUNT(2)
    for (int i = 0; i < 32; i += 16) aie::store_v(b + i, aie::load_v<16>(a + i));
}
"""


def _checkout(folder: Path) -> Path:
    (folder / "include" / "aie_api").mkdir(parents=True)
    (folder / "include" / "aie_api" / "aie.hpp").write_text(API)
    return folder


def test_a_kernel_is_held_against_headers_whose_intrinsics_are_stubs(tmp_path: Path) -> None:
    include = headers_of(_checkout(tmp_path))
    good, bad = tmp_path / "good.cc", tmp_path / "bad.cc"
    good.write_text(GOOD)
    bad.write_text(GOOD.replace("aie::load_v<16>(a + i)", "aie::load_v<32>(a + i)").replace("event0()", "aie::event()"))
    found = held_against(include, [good, bad])
    assert (found[0].errors, found[0].set_aside) == ((), 1)  # other.half: of a stub, inside of aie_api; no <adf.h>
    assert any(e.startswith("bad.cc:5:") and "‘event’ is not a member of ‘aie’" in e for e in found[1].errors), found[1]
    assert any("static assertion failed: vectors of 16" in e for e in found[1].errors), found[1]


def test_errors_are_judged_by_where_they_are_and_what_they_name() -> None:
    said = """in.cc:3:4: error: no member named ‘x’ in ‘any_value’
/a/aie_api/include/aie_api/detail/mul.hpp:9:1: error: no match for ‘any_value’
/a/aie_api/include/aie_api/detail/mul.hpp:9:1: error: static assertion failed
/a/aie_api/include/aie_api/detail/mul.hpp:9:1: note: other"""
    assert judged(Path("in.cc"), said) == Found(
        Path("in.cc"),
        ("in.cc:3:4: no member named ‘x’ in ‘any_value’", "aie_api/detail/mul.hpp:9:1: static assertion failed"),
        1,
    )


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "no aie_api/aie.hpp" in capsys.readouterr().err
