// Entry points for single primitives of the host's aie_api, for test_npu_hostapi.py. None sets a mode: the test does.
#include <aie_api/aie.hpp>

namespace {

template <unsigned M, unsigned K, unsigned N, class A, class B, class C, class P, class Q>
void multiply(const P *a, const Q *b, C *c) {
    using MM = aie::mmul<M, K, N, A, B>;
    constexpr unsigned words_b = MM::size_B * aie::host::lane<B>::bits / 8 / sizeof(Q);
    MM mm(aie::load_v<MM::size_C>(c));
    mm.mac(aie::load_v<MM::size_A>(a), aie::load_v<words_b>(b).template cast_to<B>());
    aie::store_v(c, mm.template to_vector<C>());
}

} // namespace

extern "C" {

void srs_i8(const int32 *x, int8 *out, int32 shift) {
    aie::store_v(out, aie::accum<acc32, 32>(aie::load_v<32>(x)).to_vector<int8>(shift));
}
void srs_i16(const int32 *x, int16 *out, int32 shift) {
    aie::store_v(out, aie::accum<acc64, 16>(aie::load_v<16>(x), 8).to_vector<int16>(shift));
}
void to_bf16(const float *x, bfloat16 *out) {
    aie::store_v(out, aie::accum<accfloat, 16>(aie::load_v<16>(x)).to_vector<bfloat16>());
}
void set_modes(int32 rounding, int32 saturation) {
    aie::set_rounding(static_cast<aie::rounding_mode>(rounding));
    aie::set_saturation(static_cast<aie::saturation_mode>(saturation));
}

void mmul_i8_488(const int8 *a, const int8 *b, int32 *c) { multiply<4, 8, 8, int8, int8>(a, b, c); }
void mmul_i8_288(const int8 *a, const int8 *b, int32 *c) { multiply<2, 8, 8, int8, int8>(a, b, c); }
void mmul_i8i4_4168(const int8 *a, const uint8 *b, int32 *c) { multiply<4, 16, 8, int8, int4>(a, b, c); }
void mmul_i16i8_484(const int16 *a, const int8 *b, int32 *c) { multiply<4, 8, 4, int16, int8>(a, b, c); }
void mmul_i16i8_448(const int16 *a, const int8 *b, int32 *c) { multiply<4, 4, 8, int16, int8>(a, b, c); }
void mmul_i16i8_288(const int16 *a, const int8 *b, int32 *c) { multiply<2, 8, 8, int16, int8>(a, b, c); }
void mmul_i16_444(const int16 *a, const int16 *b, int32 *c) { multiply<4, 4, 4, int16, int16>(a, b, c); }
void mmul_i16_248(const int16 *a, const int16 *b, int32 *c) { multiply<2, 4, 8, int16, int16>(a, b, c); }
void mmul_i16_428(const int16 *a, const int16 *b, int32 *c) { multiply<4, 2, 8, int16, int16>(a, b, c); }
void mmul_bf16_484(const bfloat16 *a, const bfloat16 *b, float *c) { multiply<4, 8, 4, bfloat16, bfloat16>(a, b, c); }

// Lanes moved: transpose 4 x 8, both halves of a zip by 4, rotation by 5, every second 8, b where bits of the mask are set.
void moves(const int16 *a, const int16 *b, int16 *out, int32 bits) {
    const auto x = aie::load_v<32>(a), y = aie::load_v<32>(b);
    const auto zipped = aie::interleave_zip(x, y, 4);
    aie::store_v(out, aie::transpose(x, 4, 8));
    aie::store_v(out + 32, zipped.first);
    aie::store_v(out + 64, zipped.second);
    aie::store_v(out + 96, aie::shuffle_down_rotate(x, 5));
    aie::store_v(out + 128, aie::concat(aie::filter_even(x, 8), y.extract<16>(1)));
    aie::store_v(out + 160, aie::select(x, y, aie::mask<32>::from_uint32(static_cast<uint32>(bits))));
    auto inserted = x;
    inserted.insert(1, y.extract<16>(0));
    aie::store_v(out + 192, inserted);
}
// int16 lanes: a + b, a - b, -a, max, min; then int32: a * b, c + a * b, c - a * b in acc64.
void integers(const int16 *a, const int16 *b, int16 *small, int32 *large) {
    const auto x = aie::load_v<16>(a), y = aie::load_v<16>(b);
    aie::store_v(small, aie::add(x, y));
    aie::store_v(small + 16, aie::sub(x, y));
    aie::store_v(small + 32, aie::neg(x));
    aie::store_v(small + 48, aie::max(x, y));
    aie::store_v(small + 64, aie::min(x, y));
    aie::store_v(large, aie::mul(x, y).to_vector<int32>());
    const aie::accum<acc64, 16> c(aie::broadcast<int32, 16>(1000000000));
    aie::store_v(large + 16, aie::mac(c, x, y).to_vector<int32>(4));
    aie::store_v(large + 32, aie::msc(c, x, y).to_vector<int32>(4));
    large[48] = aie::reduce_add(x.cast_to<int32>());
    large[49] = aie::reduce_max(x);
    large[50] = aie::reduce_min(x);
}
// bfloat16 lanes: a + b, a - b, max, min; then float32: c + a * b, c - a * b, and sums of c.
void reals(const bfloat16 *a, const bfloat16 *b, const float *c, bfloat16 *small, float *large) {
    const auto x = aie::load_v<16>(a), y = aie::load_v<16>(b);
    const auto z = aie::load_v<16>(c);
    aie::store_v(small, aie::add(x, y));
    aie::store_v(small + 16, aie::sub(x, y));
    aie::store_v(small + 32, aie::max(x, y));
    aie::store_v(small + 48, aie::min(x, y));
    const aie::accum<accfloat, 16> acc(z);
    aie::store_v(large, aie::mac(acc, x, y).to_vector<float>());
    aie::store_v(large + 16, aie::msc(acc, x, y).to_vector<float>());
    aie::store_v(large + 32, aie::sub(acc, x).to_vector<float>());
    large[48] = aie::reduce_add(z);
    large[49] = aie::inv(z[0]);
}
void to_fixed(const bfloat16 *x, int16 *out, int32 shift) { aie::store_v(out, aie::to_fixed<int16>(aie::load_v<16>(x), shift)); }
void to_float(const int32 *x, float *out, int32 shift) { aie::store_v(out, aie::to_float(aie::load_v<16>(x), shift)); }
void fetch(const bfloat16 *ab, const bfloat16 *cd, const int16 *keys, bfloat16 *out, int32 step) {
    using lut = aie::lut<4, bfloat16, bfloat16>;
    aie::parallel_lookup<uint16, lut, aie::lut_oor_policy::truncate> lookup(lut(64, ab, cd), static_cast<unsigned>(step));
    aie::store_v(out, lookup.fetch(aie::load_v<16>(keys).cast_to<uint16>()));
}
void load_at(const int8 *x, int8 *out, int32 at) { aie::store_v(out, aie::load_v<32>(x + at)); }
void store_at(const int8 *x, int8 *out, int32 at) { aie::store_v(out + at, aie::load_v<16>(x)); }

} // extern "C"
