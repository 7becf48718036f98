// attention.cc with a design's objects: positions are stored after the query tile, since a core has no third channel.
// A core's two incoming channels bring query tiles and, alternately, tiles of keys and values. After the LQ x D queries come 16
// int32 (softmax.h, header): positions, window, and the numbers of key tiles before, within and after the visible ones.
#include "attention.cc"

extern "C" {

void attention_stream_start(const bfloat16 *q, float *o, bfloat16 *m, float *l, int32 *bounds) {
    begin(q + LQ * DIM_D, bounds);
    start(o, m, l);
}

void attention_stream_tile(const bfloat16 *q, const bfloat16 *k, const bfloat16 *v, float *o, bfloat16 *m, float *l, float *s,
                           bfloat16 *p, int32 *bounds) {
    const header *h = reinterpret_cast<const header *>(q + LQ * DIM_D);
    attention_tile(q, k, v, o, m, l, s, p, h->q_pos, bounds[3], h->k_len, h->window);
    bounds[3] += LK;
}

void attention_stream_finish(const float *o, const float *l, bfloat16 *out) { finish(o, l, out); }

} // extern "C"
