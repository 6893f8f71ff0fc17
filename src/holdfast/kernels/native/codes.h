// Dequantization of codes, one by one or, if the machine has the instructions, a line at a time.
//
// A line is dequantized up to a power of two, exactly, and its scale makes up for it. So a code times its scale is rounded
// once, as for single codes.
#ifndef HOLDFAST_CODES_H
#define HOLDFAST_CODES_H

#include "vector.h"

#define LINE 16

// E2M1 lie two to a byte, the even column in the low half, and their scales are bytes of exponents; other scales are floats.
enum kind { E4M3, INT8, E2M1 };

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float scale_at(enum kind kind, const void *scales, long index) {
    if (kind != E2M1) return ((const float *)scales)[index];
    uint32_t exponent = ((const uint8_t *)scales)[index];
    if (exponent == 255) return as_float(0x7FC00000);
    return as_float(exponent ? exponent << 23 : 1u << 22);
}

static inline float e4m3_value(uint8_t code) {
    uint32_t size = code & 0x7F;
    float value = size < 8 ? (float)size * 0x1p-9f : as_float(size == 0x7F ? 0x7FC00000 : (size << 20) + (120u << 23));
    return code & 0x80 ? -value : value;
}

static inline float code_value(enum kind kind, const uint8_t *codes, long column) {
    static const float e2m1_values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    if (kind == INT8) return (int8_t)codes[column];
    if (kind == E4M3) return e4m3_value(codes[column]);
    return e2m1_values[codes[column / 2] >> 4 * (column % 2) & 15];
}

#if defined(__ARM_NEON) && LANES == 4
// Shift bytes to where float32 has sign, exponent and mantissa: there is one unit for conversions, and it would need two passes.
#define HAS_LINES 1
#define E4M3_FACTOR 0x1p120f

static inline void halfwords_line(uint8x16_t low, uint8x16_t high, vec *out) {
    uint16x8_t zero = vdupq_n_u16(0);
    uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(low, high)), second = vreinterpretq_u16_u8(vzip2q_u8(low, high));
    out[0] = vreinterpretq_f32_u16(vzip1q_u16(zero, first)), out[1] = vreinterpretq_f32_u16(vzip2q_u16(zero, first));
    out[2] = vreinterpretq_f32_u16(vzip1q_u16(zero, second)), out[3] = vreinterpretq_f32_u16(vzip2q_u16(zero, second));
}

static inline void e4m3_line(const uint8_t *p, vec *out) {
    uint8x16_t codes = vld1q_u8(p), most = vdupq_n_u8(0x7F);
    uint8x16_t is_nan = vceqq_u8(vandq_u8(codes, most), most);
    uint8x16_t high = vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(codes), 4));
    halfwords_line(vshlq_n_u8(codes, 4), vorrq_u8(vandq_u8(high, vdupq_n_u8(0x87)), is_nan), out);
}

static inline void int8_line(const uint8_t *p, vec *out) {
    // 2^23 + (code + 128), minus the same
    uint8x16_t codes = veorq_u8(vld1q_u8(p), vdupq_n_u8(0x80)), zero = vdupq_n_u8(0);
    uint16x8_t top = vdupq_n_u16(0x4B00);
    float32x4_t added = vdupq_n_f32(0x1p23f + 128);
    uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(codes, zero)), second = vreinterpretq_u16_u8(vzip2q_u8(codes, zero));
    out[0] = vreinterpretq_f32_u16(vzip1q_u16(first, top)) - added;
    out[1] = vreinterpretq_f32_u16(vzip2q_u16(first, top)) - added;
    out[2] = vreinterpretq_f32_u16(vzip1q_u16(second, top)) - added;
    out[3] = vreinterpretq_f32_u16(vzip2q_u16(second, top)) - added;
}

static inline void e2m1_line(const uint8_t *p, vec *out) {
    const uint8x16_t low = {0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0, 0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0};
    const uint8x16_t high = {0,    0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
    uint8x8_t pairs = vld1_u8(p);
    uint8x16_t codes = vzip1q_u8(vcombine_u8(vand_u8(pairs, vdup_n_u8(15)), pairs), vcombine_u8(vshr_n_u8(pairs, 4), pairs));
    halfwords_line(vqtbl1q_u8(low, codes), vqtbl1q_u8(high, codes), out);
}
#elif defined(__AVX2__) && defined(__F16C__)
// Shift bytes to where half precision has sign, exponent and mantissa: subnormal float32 numbers are slow here.
#define HAS_LINES 1
#define E4M3_FACTOR 0x1p8f

static inline void halves_line(__m256i halves, vec *out) {
#if LANES == 16
    out[0] = (vec)_mm512_cvtph_ps(halves);
#else
    out[0] = (vec)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    out[1] = (vec)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#endif
}

static inline void e4m3_line(const uint8_t *p, vec *out) {
    __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8);
    __m256i number = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xBF80));
    __m256i size = _mm256_and_si256(number, _mm256_set1_epi16(0x7FFF));
    halves_line(_mm256_or_si256(number, _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x3F80))), out);
}

static inline void int8_line(const uint8_t *p, vec *out) {
    __m128i codes = _mm_loadu_si128((const __m128i *)p);
#if LANES == 16
    out[0] = (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
#else
    out[0] = (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    out[1] = (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)));
#endif
}

static inline void e2m1_line(const uint8_t *p, vec *out) {
    const __m128i high = _mm_setr_epi8(0, 0x38, 0x3C, 0x3E, 0x40, 0x42, 0x44, 0x46, (char)0x80, (char)0xB8, (char)0xBC,
                                       (char)0xBE, (char)0xC0, (char)0xC2, (char)0xC4, (char)0xC6);
    __m128i pairs = _mm_loadl_epi64((const __m128i *)p), low_bits = _mm_set1_epi8(15);
    __m128i codes = _mm_and_si128(_mm_unpacklo_epi8(pairs, _mm_srli_epi16(pairs, 4)), low_bits);
    halves_line(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_shuffle_epi8(high, codes)), 8), out);
}
#else
#define HAS_LINES 0
#define E4M3_FACTOR 1.0f
static inline void e4m3_line(const uint8_t *p, vec *out) { (void)p, (void)out; }
static inline void int8_line(const uint8_t *p, vec *out) { (void)p, (void)out; }
static inline void e2m1_line(const uint8_t *p, vec *out) { (void)p, (void)out; }
#endif

// Factor of a scale for lines.
static inline float line_factor(enum kind kind) { return kind == E4M3 ? E4M3_FACTOR : 1.0f; }

// True if codes of this scale can be taken by lines: not if the factor makes it infinite, nor if this thread flushes subnormal
// numbers to zero.
static inline int has_lines(enum kind kind, float scale) {
    static const volatile float least = 0x1p-149f;
    return HAS_LINES && (kind != E4M3 || (isfinite(scale * E4M3_FACTOR) && least * 0x1p120f > 0));
}

// Codes [column, column + LINE) of a row.
static inline __attribute__((always_inline)) void dequantize_line(const enum kind kind, const uint8_t *codes, long column,
                                                              vec *out) {
    if (kind == E4M3) e4m3_line(codes + column, out);
    else if (kind == INT8) int8_line(codes + column, out);
    else e2m1_line(codes + column / 2, out);
}

#endif
