// Vectors of floats as wide as the machine has them, sums in a fixed order, and exp.
//
// These kernels are batch invariant: the order of additions depends on shapes, never on the number of rows or sequences.
#ifndef HOLDFAST_VECTOR_H
#define HOLDFAST_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX__)
#include <immintrin.h>
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

// a * b + c, rounded once if the machine can. Explicit, because a compiler would fuse differently in tiles of different shapes,
// and then a row's last bit would depend on its tile.
static inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && LANES == 4
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Like multiply_add, with one factor for all lanes.
static inline vec multiply_add_by(vec a, float b, vec c) {
#if defined(__ARM_NEON) && LANES == 4
    return (vec)vfmaq_n_f32((float32x4_t)c, (float32x4_t)a, b);
#else
    return multiply_add(a, splat(b), c);
#endif
}

// Add the lanes of a vector pairwise.
static inline float sum_lanes(vec v) {
    float s[LANES];
    UNROLL for (int i = 0; i < LANES; i++) s[i] = v[i];
    UNROLL for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] = s[2 * i] + s[2 * i + 1];
    return s[0];
}

// Store four of these sums, in the same order.
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
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__ARM_NEON) && LANES == 4
    return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    ivec pick = a > b;
    return (vec)(((ivec)a & pick) | ((ivec)b & ~pick));
#endif
}

// exp(x) for x <= 88; exactly 0 below -87, so that a masked score of -infinity adds nothing; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; the series of exp(r) to the sixth power is good to about one unit in the last place.
static inline vec exp_vec(vec x) {
    ivec gone = x < splat(-87.0f);
    vec kept = (vec)((ivec)x & ~gone);
    vec shifted = multiply_add(kept, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: the low bits are round(x / ln 2)
    vec n = shifted - splat(12582912.0f);
    vec r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), kept));
    vec r2 = r * r;  // pairs of terms in parallel: half the latency of one chain
    vec high = multiply_add(r2, splat(1.0f / 720), multiply_add(r, splat(1.0f / 120), splat(1.0f / 24)));
    vec middle = multiply_add(r2, high, multiply_add(r, splat(1.0f / 6), splat(0.5f)));
    vec p = multiply_add(r2, middle, r + splat(1.0f));
    ivec exponent = ((ivec)shifted << 23) + (127 << 23);  // the shift drops the bias of 1.5 * 2^23
    return (vec)((ivec)(p * (vec)exponent) & ~gone);
}

#endif
