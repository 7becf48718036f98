// attention_i8.cc with a design's objects: a core has only two incoming channels, so an object holds codes, scales and more.
// A query tile is LQ x D codes, LQ float scales and the header (softmax.h); a key tile LK x D codes, LK float scales and the
// LK x D values in bfloat16: 3 D + 4 bytes a position, where bfloat16 keys and values take 4 D.
#include "attention_i8.cc"

namespace {

constexpr unsigned q_scales = LQ * DIM_D, q_header = q_scales + 4 * LQ, k_scales = LK * DIM_D, k_values = k_scales + 4 * LK;

} // namespace

extern "C" {

void attention_i8_stream_start(const uint8 *q, float *o, bfloat16 *m, float *l, int32 *bounds) {
    begin(q + q_header, bounds);
    start(o, m, l);
}

void attention_i8_stream_tile(const uint8 *q, const uint8 *kv, float *o, bfloat16 *m, float *l, float *s, bfloat16 *p,
                              int32 *bounds) {
    const header *h = reinterpret_cast<const header *>(q + q_header);
    attention_i8_tile(reinterpret_cast<const int8 *>(q), reinterpret_cast<const int8 *>(kv),
                      reinterpret_cast<const float *>(q + q_scales), reinterpret_cast<const float *>(kv + k_scales),
                      reinterpret_cast<const bfloat16 *>(kv + k_values), o, m, l, s, p, h->q_pos, bounds[3], h->k_len, h->window);
    bounds[3] += LK;
}

void attention_i8_stream_finish(const float *o, const float *l, bfloat16 *out) { finish(o, l, out); }

} // extern "C"
