// Lanes of packed weights: a vector holds four codes of each of LANES rows, and dots add four products to each row's sum.
//
// One vocabulary for AVX-512, AVX2, NEON and plain C. Sums are integers, so every machine has the same ones.
#ifndef HOLDFAST_PACKED_LANES_H
#define HOLDFAST_PACKED_LANES_H

#include "vector.h"

#define INLINE static inline __attribute__((always_inline))
#define TILE_ROWS 16
#define VECTORS (TILE_ROWS / LANES)  // of a tile's rows

typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint32_t loose_words __attribute__((vector_size(LANES * 4), aligned(1)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint8_t loose_bytes16 __attribute__((vector_size(16), aligned(1)));

INLINE words load_words(const uint8_t *p) { return *(const loose_words *)p; }
INLINE bytes16 load_bytes16(const uint8_t *p) { return *(const loose_bytes16 *)p; }

// SIGNED_CODES: eight-bit codes are signed; else they are unsigned, 128 higher, and the sum of x corrects it.
#if defined(HOLDFAST_PLAIN)
#define SIGNED_CODES 1
#elif defined(__AVX512BW__)
#define USE_AVX512 1
#ifdef __AVX512VNNI__
#define SIGNED_CODES 0
#else
#define SIGNED_CODES 1
#endif
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define USE_AVX2 1
#ifdef __AVXVNNI__
#define SIGNED_CODES 0
#else
#define SIGNED_CODES 1
#endif
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define USE_DOTPROD 1
#define SIGNED_CODES 1
#else
#define SIGNED_CODES 1
#endif
#if !(USE_AVX512 || USE_AVX2 || USE_DOTPROD)
#pragma GCC optimize("O1")  // more takes minutes to compile and gains little
#endif

// Codes of 16 columns of x, as products take them.
#if USE_DOTPROD
typedef int8x16_t codes16;
INLINE codes16 load_codes(const int8_t *p) { return vld1q_s8(p); }
#else
typedef const int8_t *codes16;
INLINE codes16 load_codes(const int8_t *p) { return p; }
#endif

INLINE words splat_codes(const int8_t *p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return four + (words){0};
}

#if (USE_AVX512 || USE_AVX2) && SIGNED_CODES
typedef int16_t pairs16 __attribute__((vector_size(LANES * 4)));

// Sums of two products, in 16 bits; a sign of the codes moves to x, since the instruction takes unsigned codes.
INLINE pairs16 multiply_pairs(words w, words x, const int is_signed) {
#if USE_AVX512
    if (!is_signed) return (pairs16)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
    __mmask64 is_negative = _mm512_movepi8_mask((__m512i)w);
    __m512i inputs = _mm512_mask_sub_epi8((__m512i)x, is_negative, _mm512_setzero_si512(), (__m512i)x);
    return (pairs16)_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), inputs);
#else
    if (!is_signed) return (pairs16)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
    return (pairs16)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)x, (__m256i)w));
#endif
}

INLINE ivec add_pairs(pairs16 pairs) {
#if USE_AVX512
    return (ivec)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#else
    return (ivec)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#endif
}
#endif

// sums += products of 16 columns: four words of codes of at most `bits` bits, and the codes of x, -127 to 127.
// Eight-bit codes of a machine with SIGNED_CODES are signed.
INLINE ivec add_dots(ivec sums, const words *w, codes16 x, const int bits) {
#if USE_AVX512 && !SIGNED_CODES
    (void)bits;
    UNROLL for (int g = 0; g < 4; g++)
        sums = (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w[g], (__m512i)splat_codes(x + 4 * g));
    return sums;
#elif USE_AVX2 && !SIGNED_CODES
    (void)bits;
    UNROLL for (int g = 0; g < 4; g++)
        sums = (ivec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w[g], (__m256i)splat_codes(x + 4 * g));
    return sums;
#elif USE_AVX512 || USE_AVX2
    // Pairs are added in 16 bits as long as these hold them: 2 * 31 * 127 * 4 and 2 * 63 * 127 * 2 are below 2^15.
    const int run = bits <= 5 ? 4 : bits <= 6 ? 2 : 1;
    UNROLL for (int first = 0; first < 4; first += run) {
        pairs16 pairs = {0};
        UNROLL for (int g = first; g < first + run; g++) pairs += multiply_pairs(w[g], splat_codes(x + 4 * g), bits > 6);
        sums += add_pairs(pairs);
    }
    return sums;
#elif USE_DOTPROD
    (void)bits;
    sums = (ivec)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)w[0], x, 0);
    sums = (ivec)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)w[1], x, 1);
    sums = (ivec)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)w[2], x, 2);
    return (ivec)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)w[3], x, 3);
#else
    (void)bits;  // smaller codes have no sign bit
    UNROLL for (int i = 0; i < 16; i++)
        sums += ((ivec)(w[i / 4] << (24 - 8 * (i % 4))) >> 24) * (int32_t)x[i];
    return sums;
#endif
}

// Entry `code` of a table for each byte, 0 to 15.
INLINE words look_up(words codes, const int8_t *table) {
#if USE_AVX512
    return (words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), (__m512i)codes);
#elif USE_AVX2
    return (words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), (__m256i)codes);
#elif USE_DOTPROD
    return (words)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)codes);
#else
    uint8_t all[sizeof codes];
    memcpy(all, &codes, sizeof codes);
    for (unsigned i = 0; i < sizeof codes; i++) all[i] = (uint8_t)table[all[i]];
    memcpy(&codes, all, sizeof codes);
    return codes;
#endif
}

// Bytes of LANES of 16 rows as integers.
INLINE ivec widen_bytes(bytes16 b, const int vector) {
#if USE_AVX512
    (void)vector;
    return (ivec)_mm512_cvtepu8_epi32((__m128i)b);
#elif USE_AVX2
    return (ivec)_mm256_cvtepu8_epi32(vector ? _mm_srli_si128((__m128i)b, 8) : (__m128i)b);
#elif USE_DOTPROD
    uint16x8_t half = vector < 2 ? vmovl_u8(vget_low_u8((uint8x16_t)b)) : vmovl_u8(vget_high_u8((uint8x16_t)b));
    return (ivec)vmovl_u16(vector % 2 ? vget_high_u16(half) : vget_low_u16(half));
#else
    ivec out;
    for (int i = 0; i < LANES; i++) out[i] = b[vector * LANES + i];
    return out;
#endif
}

INLINE vec to_floats(ivec integers) { return __builtin_convertvector(integers, vec); }

// LANES float16 numbers.
INLINE vec load_halves(const uint8_t *p) {
#if USE_AVX512
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif USE_AVX2 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif USE_DOTPROD
    return (vec)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
#else
    ivec bits;
    for (int i = 0; i < LANES; i++) bits[i] = p[2 * i] | p[2 * i + 1] << 8;
    // 2^112 makes up for the bias; subnormal numbers need no other path, infinity and NaN do.
    ivec special = (bits & 0x7C00) == 0x7C00;
    vec size = (vec)((bits & 0x7FFF) << 13) * splat(0x1p112f);
    return (vec)((ivec)size | (special & 0x7F800000) | ((bits & 0x8000) << 16));
#endif
}

#endif
