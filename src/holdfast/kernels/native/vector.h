// Vectors of floats as wide as the machine has them, sums in a fixed order, and exp.
//
// Every result in these kernels is a function of its own inputs alone: the order of additions depends on shapes, never on
// how many rows or sequences are computed beside it. That is what makes a token independent of its neighbours, to the bit.
#ifndef HOLDFAST_VECTOR_H
#define HOLDFAST_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float loose_vec __attribute__((vector_size(LANES * 4), aligned(4)));

static inline vec load(const float *p) { return *(const loose_vec *)p; }
static inline void store(float *p, vec v) { *(loose_vec *)p = v; }
static inline vec splat(float x) { return x - (vec){0}; }

// The lanes of a vector, added neighbour to neighbour.
static inline float sum_lanes(vec v) {
    float s[LANES];
    UNROLL for (int i = 0; i < LANES; i++) s[i] = v[i];
    UNROLL for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] = s[2 * i] + s[2 * i + 1];
    return s[0];
}

// Four such sums at once, in the same order, to four places in a row.
static inline void store_sums4(float *p, vec a, vec b, vec c, vec d) {
#if defined(__ARM_NEON) && LANES == 4
    vst1q_f32(p, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
#else
    p[0] = sum_lanes(a), p[1] = sum_lanes(b), p[2] = sum_lanes(c), p[3] = sum_lanes(d);
#endif
}

static inline float max_lanes(vec v) {
    float m = v[0];
    UNROLL for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

static inline vec max_vec(vec a, vec b) {
    ivec pick = a > b;
    return (vec)(((ivec)a & pick) | ((ivec)b & ~pick));
}

// exp(x) for x <= 88; exactly 0 below -87, so that a masked score of -infinity adds nothing; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; the series of exp(r) to the sixth power is good to about one unit in the last place.
static inline vec exp_vec(vec x) {
    ivec gone = x < splat(-87.0f);
    vec kept = (vec)((ivec)x & ~gone);
    vec shifted = kept * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2^23: the low bits are round(x / ln 2)
    vec n = shifted - splat(12582912.0f);
    vec r = kept - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    vec r2 = r * r;  // pairs of terms side by side: half the waiting of one long chain
    vec high = splat(1.0f / 24) + r * splat(1.0f / 120) + r2 * splat(1.0f / 720);
    vec p = splat(1.0f) + r + r2 * (splat(0.5f) + r * splat(1.0f / 6) + r2 * high);
    ivec exponent = ((ivec)shifted << 23) + (127 << 23);  // the shift drops the bias of 1.5 * 2^23
    return (vec)((ivec)(p * (vec)exponent) & ~gone);
}

#endif
