"""Storage types agree with ggml's own Python (gguf.quants) bit for bit, and q8_act with its definition."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hybrid.core.dtypes import DTYPES, WEIGHT_TYPES, WRITABLE_TYPES
from hybrid.core.tensor import Tensor
from hybrid.quant.codec import dequantise, encode, from_ggml, quantise, round_into, take, to_ggml, widened

SEARCHED = ("q3_k", "q2_k", "iq4_nl", "iq4_xs")
"""Types that gguf.quants decodes only."""
GGML = {name: GGMLQuantizationType[name.upper()] for name in WRITABLE_TYPES if name not in SEARCHED}
READ = {name: GGMLQuantizationType[name.upper()] for name in WEIGHT_TYPES}
CASES = settings(max_examples=60, deadline=None, derandomize=True)

# Float32 whose blocks have a scale that float16 holds and a reciprocal that float32 holds.
normal = st.floats(-6e4, 6e4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30)
matrices = npst.arrays(np.float32, st.sampled_from([(1, 32), (3, 64), (2, 2, 96)]), elements=normal)


def ggml_bytes(array: np.ndarray, dtype: str) -> np.ndarray:
    return gguf.quants.quantize(array, GGML[dtype]).view(np.uint8).reshape(*array.shape[:-1], -1)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


SPECIAL = {
    "zeros": np.zeros(32),
    "negative zeros": np.full(32, -0.0),
    "one value": np.eye(1, 32, 5)[0] * -3.5,
    "ties of the largest": np.tile([1.0, -1.0], 16),
    "ties, negative first": np.tile([-1.0, 1.0], 16),
    "halves": (np.arange(32) - 16) + 0.5,
    "exact codes": np.concatenate([np.arange(-15, 16), [127]]),
    "just below a half": np.nextafter(np.float32(0.5), np.float32(0)) * np.r_[np.ones(31), 254],
    "underflowing scale": np.linspace(-1e-9, 1e-9, 32),
    "float16's largest": np.linspace(-65504, 65504, 32),
}


@pytest.mark.parametrize("dtype", GGML)
@pytest.mark.parametrize("case", SPECIAL)
def test_special_blocks_encode_as_ggml_does(dtype: str, case: str) -> None:
    x = SPECIAL[case].astype(np.float32)[None]
    assert same_bits(to_ggml(quantise(x, dtype)), ggml_bytes(x, dtype))


def _q8_act_is_its_definition(x: np.ndarray) -> None:
    codes, pairs = quantise(x, "q8_act").parts
    for block, code, (scale, scaled_sum) in zip(
        x.reshape(-1, 32), codes.reshape(-1, 32), pairs.reshape(-1, 2), strict=True
    ):
        amax = np.abs(block).max()
        inverse = np.float32(127) / amax if amax else np.float32(0)
        assert scale == np.float32(amax * np.float32(1 / 127))
        assert code.tolist() == [max(-127, min(127, round(float(v * inverse)))) for v in block]  # round: half to even
        assert scaled_sum == np.float32(scale * np.float32(sum(code.tolist())))


@pytest.mark.slow
@given(x=matrices)
@CASES
def test_encoding_equals_ggml(x: np.ndarray) -> None:
    """All types together: drawing the numbers is slower than the checks. int8 activations are not ggml's."""
    for dtype in GGML:
        tensor = quantise(x, dtype)
        raw = ggml_bytes(x, dtype)
        assert same_bits(to_ggml(tensor), raw), dtype
        assert same_bits(dequantise(tensor), gguf.quants.dequantize(raw, GGML[dtype]).reshape(x.shape)), dtype
    _q8_act_is_its_definition(x)


@pytest.mark.parametrize("dtype", READ)
@given(data=st.data())
@CASES
def test_decoding_any_bytes_equals_ggml(dtype: str, data: st.DataObject) -> None:
    shape = (2, max(64, DTYPES[dtype].block))
    size = DTYPES[dtype].nbytes(shape)
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    tensor = from_ggml(raw, dtype, shape)
    with np.errstate(invalid="ignore"):  # scales may be signalling NaN
        got, want = dequantise(tensor), gguf.quants.dequantize(raw.reshape(2, -1), READ[dtype])
    assert np.array_equal(got, want, equal_nan=True)
    assert same_bits(to_ggml(tensor), raw.reshape(2, -1))


def test_a_large_array_is_encoded_in_row_blocks_without_a_seam() -> None:
    x = np.random.default_rng(1).standard_normal((2049, 1024)).astype(np.float32)
    for dtype in ("bf16", "q8_0", "q4_0", "q5_1"):
        tensor = quantise(x, dtype)
        assert same_bits(to_ggml(tensor)[-5:], ggml_bytes(x[-5:], dtype))
        assert same_bits(to_ggml(tensor)[1020:1030], ggml_bytes(x[1020:1030], dtype))
        assert same_bits(dequantise(tensor)[-5:], dequantise(tensor.rows(2044, 2049)))


@pytest.mark.parametrize(
    ("dtype", "most", "ggml"),
    [("q3_k", 0.146, 0.0040), ("q2_k", 0.265, 0.0075), ("iq4_nl", 0.075, 0.0020), ("iq4_xs", 0.076, 0.0020)],
)
def test_searched_scales_err_less_than_llama_cpp_allows_its_own(dtype: str, most: float, ggml: float) -> None:
    """Relative error of a normal distribution, and the measure and limits of llama.cpp's test-quantize-fns."""
    x = np.random.default_rng(4).standard_normal((16, 1024)).astype(np.float32)
    error = dequantise(quantise(x, dtype)) - x
    assert np.sqrt(np.square(error).mean()) < most
    x = (0.1 + 2 * np.cos(np.arange(4096, dtype=np.float32)))[None]
    error = (dequantise(quantise(x, dtype)) - x).astype(np.float64)
    assert np.sqrt(np.square(error).sum()) / x.size < ggml


@pytest.mark.parametrize("dtype", SEARCHED)
def test_searched_scales_find_the_numbers_of_a_block(dtype: str) -> None:
    """Exactly representable blocks round-trip: all codes under one scale, zeros, one number, tiny numbers."""
    kind = DTYPES[dtype]
    codes = np.array(kind.table or range(kind.integers[0], kind.integers[1] + 1))
    x = np.resize(codes, (2, 256)).astype(np.float32) * 0.25
    x[1] *= -1 if not kind.minimum else 4
    near = 0.05 if kind.minimum else 1e-3
    assert np.abs(dequantise(quantise(x, dtype)) - x).max() <= near * np.abs(x).max()
    assert not dequantise(quantise(np.zeros((1, 256), np.float32), dtype)).any()
    one = np.zeros((1, 256), np.float32)
    one[0, 77] = -3.5
    got = dequantise(quantise(one, dtype))
    assert abs(got[0, 77] + 3.5) < 0.05 * 3.5 and np.abs(np.delete(got, 77)).max() < 0.05 * 3.5
    for tiny in (1e-9, 1e-30, 1e-42):
        assert np.abs(dequantise(quantise(one * np.float32(tiny), dtype))).max() <= 4 * tiny


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", *SEARCHED])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_values_that_no_block_can_hold_are_refused(dtype: str, bad: float) -> None:
    x = np.ones((1, 256), np.float32)
    x[0, 7] = bad
    with pytest.raises(ValueError, match="NaN, infinite, or too large"):
        quantise(x, dtype)


def test_bf16_keeps_nan_and_infinity() -> None:
    x = np.array([[np.nan, np.inf, -np.inf, 3.4e38]], np.float32)
    x.view(np.uint32)[0, 0] = 0xFFFFFFFF
    assert same_bits(to_ggml(quantise(x, "bf16")), ggml_bytes(x, "bf16"))
    assert np.isnan(dequantise(quantise(x, "bf16"))[0, 0])


def test_q8_act_of_a_block_that_is_not_finite_is_nan() -> None:
    x = np.ones((3, 32), np.float32)
    x[0, 3], x[1, 3] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        y = dequantise(quantise(x, "q8_act"))
    assert np.isnan(y[:2]).all() and np.allclose(y[2], 1)


def test_encode_rounds_float64_once_and_takes_integers() -> None:
    between = np.float64(1) + 2.0**-11 + 2.0**-40  # rounding to float32 first would make a tie of it
    assert encode(np.array([between]), "f16").array[0] == np.float16(1 + 2.0**-10)
    assert encode(np.array([3, -1]), "i32").array.tolist() == [3, -1]
    with pytest.raises(ValueError, match="cannot encode"):
        quantise(np.zeros((1, 32)), "i32")


def test_wrong_sizes_and_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="takes 68 bytes, got 67"):
        from_ggml(bytes(67), "q8_0", (2, 32))
    with pytest.raises(ValueError, match="multiple of 32"):
        quantise(np.zeros((2, 33), np.float32), "q4_0")
    with pytest.raises(ValueError, match=r"row index outside 0\.\.3"):
        take(Tensor.empty("q8_0", (4, 32)), np.array([0, -1]))


def test_dequantise_into_a_given_array_and_in_float64() -> None:
    x = np.random.default_rng(2).standard_normal((4, 64))
    for dtype in (*GGML, "q8_act"):
        tensor, out = quantise(x, dtype), np.empty((4, 64), np.float32)
        value = tensor if dtype != "f16" else tensor.array
        assert dequantise(value, np.float32, out) is out
        exact = dequantise(value, np.float64)
        assert exact.dtype == np.float64
        assert np.array_equal(out, exact) or (dtype == "q8_act" and np.allclose(out, exact, rtol=2**-23))


def test_float16_is_widened_exactly() -> None:
    """Every bit pattern: NaN, infinities, subnormal numbers, both zeros; alone and among finite ones."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for x in (every, every[np.isfinite(every)], np.concatenate([every[:40000], every[31745:31746]])):
        np.testing.assert_array_equal(widened(x, np.float32).view(np.uint32), x.astype(np.float32).view(np.uint32))
    assert widened(every[:8], np.float32).dtype == np.float32 and widened(every, np.float64).dtype == np.float64
    strided = every.reshape(256, 256)[:, ::2]
    np.testing.assert_array_equal(
        widened(strided, np.float32).view(np.uint32), strided.astype(np.float32).view(np.uint32)
    )


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q8_act"])
def test_results_are_rounded_in_place_as_they_are_encoded(dtype: str) -> None:
    """Into rows of a larger tensor, whatever the values: zero blocks, subnormal ones, ties."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((7, 96)).astype(np.float32) * np.float32(10.0) ** rng.integers(-6, 4, (7, 1)).astype(
        np.float32
    )
    for scale in (1, 1e-33):  # the largest of a block near float32's least number: its reciprocal is infinite
        y = (x * np.float32(scale)).reshape(7, 3, 32)
        y[2, 1] = 0
        want, target = encode(y.reshape(7, 96), dtype), Tensor.empty(dtype, (9, 96))
        round_into(target.rows(1, 8), y.reshape(7, 96).astype(np.float64))
        for part, expected in zip(target.parts, want.parts, strict=True):
            np.testing.assert_array_equal(part[1:8].view(np.uint8), expected.view(np.uint8))
            assert not part[0].any() and not part[8].any()
