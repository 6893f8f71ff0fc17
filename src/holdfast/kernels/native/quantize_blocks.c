// float32 rows to GGUF blocks: Q4_0, Q5_0, Q8_0, Q4_K, Q6_K, with the bits of kernels/load/quantize_blocks.py.
//
// Fits run over as many sub-blocks as a vector has lanes. A sum over the elements of one adds halves: element i to i + 16, then
// to i + 8, and so on. Elements come in bit-reversed order, so that a few partial sums suffice.
#include <omp.h>

#include "vector.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL_ALL _Pragma("GCC unroll 32")
#define SUB_4 32
#define SUB_6 16
#define NUM_STRETCHES 9
#define LEAST_SPREAD 1e-5f
#define SUPER 256

enum kind { TO_Q4_0, TO_Q5_0, TO_Q8_0, TO_Q4_K, TO_Q6_K };

static inline float stretch_of(int i) { return (float)(i - 4) / 4; }

// 1 / x; 0 if x is 0, or so small that float32 has no inverse.
static inline float inverse(float x) {
    float y = 1.0f / x;
    return isinf(y) ? 0.0f : y;
}

INLINE vec pick(ivec condition, vec yes, vec no) { return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition)); }

INLINE vec inverse_vec(vec x) {
    vec y = splat(1.0f) / x;
    return pick(((ivec)y & 0x7FFFFFFF) == 0x7F800000, splat(0.0f), y);
}

// Nearest integers, ties to even.
INLINE vec round_vec(vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX__)
    return (vec)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vec)vrndnq_f32((float32x4_t)x);
#else
    UNROLL for (int i = 0; i < LANES; i++) x[i] = rintf(x[i]);
    return x;
#endif
}

INLINE vec clamp_vec(vec x, float low, float high) {
    x = pick(x < splat(low), splat(low), x);
    return pick(x > splat(high), splat(high), x);
}

static inline float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

INLINE vec root_vec(vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
    return (vec)_mm256_sqrt_ps((__m256)x);
#else
    UNROLL for (int i = 0; i < LANES; i++) x[i] = sqrtf(x[i]);
    return x;
#endif
}

INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7FFFFFFF); }

// Bits of the nearest float16, ties to even; |x| is at most 65504 up to rounding.
static uint16_t half_of(float x) {
    uint32_t bits, sign, size;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    if (size >= 0x477FF000) return (uint16_t)(sign | 0x7C00);
    if (size < 0x38800000) {  // subnormal: the unit is 2^-24
        float magnitude, shifted;
        memcpy(&magnitude, &size, 4);
        shifted = magnitude + 0.5f;  // the unit of 0.5 is 2^-24
        memcpy(&size, &shifted, 4);
        return (uint16_t)(sign | (size - 0x3F000000));
    }
    size += 0xFFF + (size >> 13 & 1);
    return (uint16_t)(sign | ((size - 0x38000000) >> 13));
}

static float half_value(uint16_t half) {
    uint32_t size = (uint32_t)(half & 0x7FFF) << 13;
    float value;
    memcpy(&value, &size, 4);
    value *= 0x1p112f;
    return half & 0x8000 ? -value : value;
}

static inline void store_half(uint8_t *to, float x) {
    uint16_t half = half_of(x);
    memcpy(to, &half, 2);
}

// The first value of the largest magnitude.
static float extreme_of(const float *x, int count) {
    float largest = -1.0f;
    for (int i = 0; i < count; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    int i = 0;
    while (i < count - 1 && fabsf(x[i]) != largest) i++;
    return x[i];
}

// Three sums at a time, each over `count` leaves in bit-reversed order.
typedef struct {
    vec levels[5][3];
} tree;

INLINE void add_leaf(tree *t, const int leaf, const int count, vec a, vec b, vec c, vec *sums) {
    int level = 0;
    for (; leaf >> level & 1; level++) a += t->levels[level][0], b += t->levels[level][1], c += t->levels[level][2];
    if (1 << level == count) {
        sums[0] = a, sums[1] = b, sums[2] = c;
        return;
    }
    t->levels[level][0] = a, t->levels[level][1] = b, t->levels[level][2] = c;
}

INLINE int reversed(const int i, const int count) {
    int out = 0;
    for (int bit = 1; bit < count; bit *= 2) out = out * 2 + (i / bit & 1);
    return out;
}

// Scale and minimum of LANES sub-blocks: value = scale * code - minimum, codes from 0 to 15, minimum >= 0.
static void fit_lines(const vec *x, vec *scale, vec *minimum) {
    vec low = x[0], high = x[0], sums[3], weights[SUB_4], weighted[SUB_4], above[SUB_4];
    for (int e = 1; e < SUB_4; e++) low = pick(x[e] < low, x[e], low), high = pick(x[e] > high, x[e], high);
    low = pick(low < splat(0.0f), low, splat(0.0f)), high = pick(high > splat(0.0f), high, splat(0.0f));
    tree t;
    UNROLL_ALL for (int i = 0; i < SUB_4; i++) {
        vec v = x[reversed(i, SUB_4)];
        add_leaf(&t, i, SUB_4, v * v, v, v, sums);
    }
    vec root = root_vec(sums[0] / splat((float)SUB_4));
    UNROLL_ALL for (int i = 0; i < SUB_4; i++) {
        const int e = reversed(i, SUB_4);
        weights[e] = magnitude(x[e]) + root, weighted[e] = weights[e] * x[e], above[e] = x[e] - low;
        add_leaf(&t, i, SUB_4, weights[e], weighted[e], weighted[e], sums);
    }
    vec sum_w = sums[0], sum_x = sums[1], range = inverse_vec(high - low), best = splat(INFINITY);
    *scale = splat(0.0f), *minimum = -low;
    for (int number = 0; number < NUM_STRETCHES; number++) {
        vec factor = range * splat(15 + stretch_of(number));
        UNROLL_ALL for (int i = 0; i < SUB_4; i++) {
            const int e = reversed(i, SUB_4);
            vec code = clamp_vec(round_vec(above[e] * factor), 0, 15), coded = weights[e] * code;
            add_leaf(&t, i, SUB_4, coded, coded * code, code * weighted[e], sums);
        }
        vec sum_l = sums[0], sum_ll = sums[1], sum_xl = sums[2], both = sum_w * sum_ll, spread = both - sum_l * sum_l;
        vec over = inverse_vec(spread);
        over = pick(spread < splat(LEAST_SPREAD) * sum_w * sum_ll, splat(0.0f), over);
        vec shift = (sum_ll * sum_x - sum_l * sum_xl) * over;
        ivec has_shift = shift < splat(0.0f);
        vec slope = pick(has_shift, (sum_w * sum_xl - sum_x * sum_l) * over, sum_xl * inverse_vec(sum_ll));
        shift = pick(has_shift, shift, splat(0.0f));
        vec error = slope * (slope * sum_ll + splat(2.0f) * (shift * sum_l - sum_xl)) +
                    shift * (shift * sum_w - splat(2.0f) * sum_x);
        ivec is_better = (error < best) & (slope > splat(0.0f));
        best = pick(is_better, error, best), *scale = pick(is_better, slope, *scale);
        *minimum = pick(is_better, -shift, *minimum);
    }
}

// Scale of LANES sub-blocks for codes from -32 to 31; `extremes` are their values of the largest magnitude.
static vec fit_scales(const vec *x, vec extremes) {
    vec over = inverse_vec(-extremes), best = splat(0.0f), scale = extremes / splat(-32.0f), sums[3];
    tree t;
    for (int number = 0; number < NUM_STRETCHES; number++) {
        vec factor = over * splat(32 + stretch_of(number));
        UNROLL_ALL for (int i = 0; i < SUB_6; i++) {
            vec value = x[reversed(i, SUB_6)], code = clamp_vec(round_vec(value * factor), -32, 31);
            add_leaf(&t, i, SUB_6, value * code, code * code, code, sums);
        }
        vec slope = sums[0] * inverse_vec(sums[1]), gain = slope * sums[0];
        ivec is_better = gain > best;
        best = pick(is_better, gain, best), scale = pick(is_better, slope, scale);
    }
    return scale;
}

// Codes from 0 to 63 of a block's eight numbers, all >= 0; returns their float16 scale, whose bits go to `to`.
static float six_bits(const float *numbers, uint8_t *codes, uint8_t *to) {
    float largest = numbers[0];
    for (int i = 1; i < 8; i++) largest = numbers[i] > largest ? numbers[i] : largest;
    float factor = inverse(largest) * 63;
    for (int i = 0; i < 8; i++) codes[i] = (uint8_t)clamp(rintf(numbers[i] * factor), 0, 63);
    uint16_t half = half_of(largest / 63);
    memcpy(to, &half, 2);
    return half_value(half);
}

static void fill_q4_k(const float *x, const float *scales, const float *minima, uint8_t *to) {
    uint8_t s[8], m[8];
    float step = six_bits(scales, s, to), shift = six_bits(minima, m, to + 2);
    for (int i = 0; i < 4; i++) {
        to[4 + i] = (uint8_t)(s[i] | s[4 + i] >> 4 << 6), to[8 + i] = (uint8_t)(m[i] | m[4 + i] >> 4 << 6);
        to[12 + i] = (uint8_t)((s[4 + i] & 15) | m[4 + i] << 4);
    }
    for (int sub = 0; sub < 8; sub++) {
        float factor = inverse((float)s[sub] * step), added = (float)m[sub] * shift;
        uint8_t *pairs = to + 16 + sub / 2 * SUB_4;
        for (int e = 0; e < SUB_4; e++) {
            int code = (int)clamp(rintf((x[sub * SUB_4 + e] + added) * factor), 0, 15);
            pairs[e] = (uint8_t)(sub % 2 ? pairs[e] | code << 4 : code);
        }
    }
}

static void fill_q6_k(const float *x, const float *wanted, uint8_t *to) {
    uint8_t codes[SUPER];
    float scale = extreme_of(wanted, 16) / -128, over = inverse(scale), stored;
    store_half(to + 208, scale);
    stored = half_value(half_of(scale));
    for (int sub = 0; sub < 16; sub++) {
        float number = clamp(rintf(wanted[sub] * over), -128, 127), factor = inverse(number * stored);
        to[192 + sub] = (uint8_t)(int8_t)number;
        for (int e = 0; e < SUB_6; e++)
            codes[sub * SUB_6 + e] = (uint8_t)((int)clamp(rintf(x[sub * SUB_6 + e] * factor), -32, 31) + 32);
    }
    for (int half = 0; half < 2; half++) {
        const uint8_t *c = codes + 128 * half;
        for (int i = 0; i < 64; i++) to[64 * half + i] = (uint8_t)((c[i] & 15) | (c[64 + i] & 15) << 4);
        for (int i = 0; i < 32; i++)
            to[128 + 32 * half + i] =
                (uint8_t)(c[i] >> 4 | c[32 + i] >> 4 << 2 | c[64 + i] >> 4 << 4 | c[96 + i] >> 4 << 6);
    }
}

// LANES blocks, or the last few.
static void quantize_super(const float *x, uint8_t *to, long count, const int kind) {
    const int num_subs = kind == TO_Q4_K ? SUPER / SUB_4 : SUPER / SUB_6, size = SUPER / num_subs;
    float first[LANES][16], second[LANES][16];
    for (int sub = 0; sub < num_subs; sub++) {
        float turned[SUB_4][LANES] = {{0}}, extremes[LANES] = {0};
        for (long block = 0; block < count; block++) {
            const float *from = x + block * SUPER + sub * size;
            for (int e = 0; e < size; e++) turned[e][block] = from[e];
            if (kind == TO_Q6_K) extremes[block] = extreme_of(from, size);
        }
        vec values[SUB_4], scale, minimum = splat(0.0f);
        for (int e = 0; e < size; e++) values[e] = load(turned[e]);
        if (kind == TO_Q4_K) fit_lines(values, &scale, &minimum);
        else scale = fit_scales(values, load(extremes));
        for (long block = 0; block < count; block++) first[block][sub] = scale[block], second[block][sub] = minimum[block];
    }
    for (long block = 0; block < count; block++) {
        if (kind == TO_Q4_K) fill_q4_k(x + block * SUPER, first[block], second[block], to + block * 144);
        else fill_q6_k(x + block * SUPER, first[block], to + block * 210);
    }
}

// value = scale * (code - middle), with the scale of the extreme value over -middle.
static void signed_block(const float *x, uint8_t *to, const int middle) {
    float scale = extreme_of(x, 32) / (float)-middle, over = inverse(scale);
    uint8_t codes[32], *pairs = to + (middle == 16 ? 6 : 2);
    uint32_t fifth = 0;
    store_half(to, scale);
    for (int i = 0; i < 32; i++) {
        int code = (int)(x[i] * over + (middle + 0.5f));
        codes[i] = (uint8_t)(code < 2 * middle ? code : 2 * middle - 1);
    }
    for (int i = 0; i < 16; i++) pairs[i] = (uint8_t)((codes[i] & 15) | (codes[16 + i] & 15) << 4);
    if (middle == 8) return;
    for (int i = 0; i < 32; i++) fifth |= (uint32_t)(codes[i] >> 4) << i;
    memcpy(to + 2, &fifth, 4);
}

// Halves round away from zero.
static void byte_block(const float *x, uint8_t *to) {
    float largest = 0.0f;
    for (int i = 0; i < 32; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    float scale = largest / 127, over = inverse(scale);
    store_half(to, scale);
    for (int i = 0; i < 32; i++) {
        float scaled = x[i] * over, size = fabsf(scaled), whole = floorf(size);
        int code = (int)whole + (size - whole >= 0.5f);
        to[2 + i] = (uint8_t)(int8_t)(scaled < 0 ? -code : code);
    }
}

void holdfast_quantize_blocks(const float *x, uint8_t *blocks, long kind, long num_blocks) {
    static const long BYTES[] = {18, 22, 34, 144, 210};
    const long each = kind >= TO_Q4_K ? LANES : 64, elements = kind >= TO_Q4_K ? SUPER : 32, bytes = BYTES[kind];
#pragma omp parallel for schedule(static)
    for (long start = 0; start < num_blocks; start += each) {
        long count = num_blocks - start < each ? num_blocks - start : each;
        const float *from = x + start * elements;
        uint8_t *to = blocks + start * bytes;
        if (kind == TO_Q4_K) quantize_super(from, to, count, TO_Q4_K);
        else if (kind == TO_Q6_K) quantize_super(from, to, count, TO_Q6_K);
        else
            for (long i = 0; i < count; i++, from += 32, to += bytes) {
                if (kind == TO_Q8_0) byte_block(from, to);
                else signed_block(from, to, kind == TO_Q5_0 ? 16 : 8);
            }
    }
}
