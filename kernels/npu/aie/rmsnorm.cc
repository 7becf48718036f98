// RMSNorm: y = x / sqrt(mean(x^2) + eps) * w for ROWS rows of H, bfloat16 in and out.
// The scale is a bfloat16 pair, high + low, applied as two exact products (a single bfloat16 would shift a whole row by up to
// 2^-9); so is w, given as [2][H], high parts and then low ones. 32 lanes; a row is read twice, w once.
// Memory at H = 5376, ROWS = 1: x 10.5 KB, w 21 KB, y 10.5 KB; with x and y twice 63 KB, which leaves 1 KB for the stack.
#include <aie_api/aie.hpp>

#include "hints.h"

#ifndef ROWS
#define ROWS 1
#endif
#ifndef DIM_H
#define DIM_H 256
#endif
#ifndef EPS
#define EPS 1e-6f
#endif

static_assert(DIM_H % 32 == 0, "rmsnorm: H must be a multiple of 32");

namespace {

// 1 / sqrt(x) of a normal number, within a few units of its last place, by three Newton steps from a first guess of 5 bits.
// aie::invsqrt(float) divides by sqrtf, which the core's C library lacks.
float inverse_root(float x) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    bits = 0x5f3759df - (bits >> 1);
    float y;
    __builtin_memcpy(&y, &bits, sizeof y);
    for (unsigned step = 0; step < 3; step++) y *= 1.5f - 0.5f * x * y * y;
    return y;
}

float inverse_rms(const bfloat16 *x) {
    auto squares = aie::zeros<accfloat, 32>();
    PIPELINED(DIM_H / 32)
    for (unsigned i = 0; i < DIM_H; i += 32) {
        const auto v = aie::load_v<32>(x + i);
        squares = aie::mac(squares, v, v);
    }
    const float sum = aie::reduce_add(squares.to_vector<float>());
    return inverse_root(sum * (1.0f / DIM_H) + EPS);
}

} // namespace

extern "C" void rmsnorm(const bfloat16 *__restrict x, const bfloat16 *__restrict w, bfloat16 *__restrict y) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    event0();
    for (unsigned row = 0; row < ROWS; row++, x += DIM_H, y += DIM_H) {
        const float scale = inverse_rms(x);
        const bfloat16 scale_hi(scale), scale_lo(scale - static_cast<float>(scale_hi));
        PIPELINED(DIM_H / 32)
        for (unsigned i = 0; i < DIM_H; i += 32) {
            const auto v = aie::load_v<32>(x + i), w_hi = aie::load_v<32>(w + i), w_lo = aie::load_v<32>(w + DIM_H + i);
            auto normed = aie::mul(v, scale_hi);
            normed = aie::mac(normed, v, scale_lo);
            const auto hi = normed.to_vector<bfloat16>();
            const auto lo = aie::sub(normed, hi).to_vector<bfloat16>();
            auto out = aie::mul(lo, w_hi);
            out = aie::mac(out, hi, w_lo);
            out = aie::mac(out, hi, w_hi);
            aie::store_v(y + i, out.to_vector<bfloat16>());
        }
    }
    event1();
}
