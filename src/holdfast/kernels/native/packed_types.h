// Tiles of GGUF blocks: 16 rows, whose blocks' fields are interleaved; codes, scales and minima of 32 columns at a time.
//
// Plane by plane, a tile block holds the same 1, 2 or 4 bytes (units) of 16 rows after one another (quant/packed_tiles.py).
// Units are 4 bytes for codes, so the word of a lane holds four neighbouring columns. A value is scale * code + minimum.
#ifndef HOLDFAST_PACKED_TYPES_H
#define HOLDFAST_PACKED_TYPES_H

#include "packed_lanes.h"

enum block_type { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, NUM_TYPES };

struct block_traits {
    short elements, bytes;
    char step;    // columns of a scale: 16 or 32
    char has_min;
    short offset;  // the code of zero; a type with minima has none
    char bits;
};

#define WIDE_OFFSET (SIGNED_CODES ? 0 : 128)
static const struct block_traits TRAITS[NUM_TYPES] = {
    [Q4_0] = {32, 18, 32, 0, 8, 4},   [Q4_1] = {32, 20, 32, 1, 0, 4},    [Q5_0] = {32, 22, 32, 0, 16, 5},
    [Q5_1] = {32, 24, 32, 1, 0, 5},   [Q8_0] = {32, 34, 32, 0, WIDE_OFFSET, 8}, [IQ4_NL] = {32, 18, 32, 0, WIDE_OFFSET, 8},
    [MXFP4] = {32, 17, 32, 0, 16, 5}, [Q2_K] = {256, 84, 16, 1, 0, 2},   [Q3_K] = {256, 110, 16, 0, 4, 3},
    [Q4_K] = {256, 148, 32, 1, 0, 4}, [Q5_K] = {256, 180, 32, 1, 0, 5},  [Q6_K] = {256, 210, 16, 0, 32, 6},
    [IQ4_XS] = {256, 138, 32, 0, WIDE_OFFSET, 8},
};

// Bytes of a tile block before each plane; codes come first.
enum {
    HALVES_SCALES = 256, HALVES_MINS = 288,  // Q4_0, Q4_1, IQ4_NL, MXFP4
    FIVES_FIFTH = 256, FIVES_SCALES = 320, FIVES_MINS = 352,  // Q5_0, Q5_1
    Q8_0_SCALES = 512,
    Q2_K_SUB = 1024, Q2_K_D = 1280, Q2_K_DMIN = 1312,
    Q3_K_THIRD = 1024, Q3_K_SUB = 1536, Q3_K_D = 1728,
    Q4_K_SCALES = 2048, Q4_K_MINS = 2176, Q4_K_D = 2304, Q4_K_DMIN = 2336,
    Q5_K_FIFTH = 2048, Q5_K_SCALES = 2560, Q5_K_MINS = 2688, Q5_K_D = 2816, Q5_K_DMIN = 2848,
    Q6_K_HIGH = 2048, Q6_K_SCALES = 3072, Q6_K_D = 3328,
    IQ4_XS_SCALES = 2048, IQ4_XS_D = 2176,
};

#if SIGNED_CODES
#define WIDE(value) (value)
#else
#define WIDE(value) ((int8_t)(uint8_t)((value) + 128))
#endif
static const int8_t NONLINEAR[16] = {WIDE(-127), WIDE(-104), WIDE(-83), WIDE(-65), WIDE(-49), WIDE(-35), WIDE(-22), WIDE(-10),
                                     WIDE(1),    WIDE(13),   WIDE(25),  WIDE(38),  WIDE(53),  WIDE(69),  WIDE(89),  WIDE(113)};
// Twice the values of e2m1, and 16.
static const int8_t E2M1_CODES[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

INLINE words code_word(const uint8_t *field, int group, int vector) {
    return load_words(field + (group * TILE_ROWS + vector * LANES) * 4);
}

// Bits [from, from + 1) of each byte of `plane`, moved to bit `to`.
INLINE words moved_bits(words plane, int from, int to, uint32_t mask) {
    return (from <= to ? plane << (to - from) : plane >> (from - to)) & mask;
}

// Four high bits of each byte.
INLINE words high_halves(words both) {
#if USE_DOTPROD
    return (words)vshrq_n_u8((uint8x16_t)both, 4);
#else
    return (both >> 4) & 0x0F0F0F0F;
#endif
}

// 16 bytes whose low halves are columns 0-15, high halves 16-31.
INLINE void unpack_halves(const uint8_t *field, int vector, words *out) {
    UNROLL for (int g = 0; g < 4; g++) {
        words both = code_word(field, g, vector);
        out[g] = both & 0x0F0F0F0F, out[4 + g] = high_halves(both);
    }
}

// Codes of columns [32 * part, 32 * part + 32) of a block, four columns a word.
INLINE void unpack_codes(const enum block_type type, const uint8_t *block, const int part, const int vector, words *out) {
    switch (type) {
        case Q4_0:
        case Q4_1: unpack_halves(block, vector, out); break;
        case Q5_0:
        case Q5_1:
            unpack_halves(block, vector, out);
            UNROLL for (int g = 0; g < 8; g++)
                out[g] |= moved_bits(code_word(block + FIVES_FIFTH, 0, vector), g, 4, 0x10101010);
            break;
        case Q8_0:
            UNROLL for (int g = 0; g < 8; g++) out[g] = code_word(block, g, vector) ^ (SIGNED_CODES ? 0 : 0x80808080);
            break;
        case IQ4_NL:
        case IQ4_XS:
        case MXFP4:
            unpack_halves(block + part * 256, vector, out);
            UNROLL for (int g = 0; g < 8; g++) out[g] = look_up(out[g], type == MXFP4 ? E2M1_CODES : NONLINEAR);
            break;
        case Q2_K:
        case Q3_K:
            UNROLL for (int g = 0; g < 8; g++) {
                out[g] = (code_word(block, part / 4 * 8 + g, vector) >> (2 * (part % 4))) & 0x03030303;
                if (type == Q3_K)
                    out[g] |= moved_bits(code_word(block + Q3_K_THIRD, g, vector), part, 2, 0x04040404);
            }
            break;
        case Q4_K:
        case Q5_K:
            UNROLL for (int g = 0; g < 8; g++) {
                words both = code_word(block, part / 2 * 8 + g, vector);
                out[g] = part % 2 ? high_halves(both) : both & 0x0F0F0F0F;
                if (type == Q5_K)
                    out[g] |= moved_bits(code_word(block + Q5_K_FIFTH, g, vector), part, 4, 0x10101010);
            }
            break;
        case Q6_K:
            UNROLL for (int g = 0; g < 8; g++) {
                words both = code_word(block, part / 4 * 16 + part % 2 * 8 + g, vector);
                words high = code_word(block + Q6_K_HIGH, part / 4 * 8 + g, vector);
                out[g] = part % 4 / 2 ? high_halves(both) : both & 0x0F0F0F0F;
                out[g] |= moved_bits(high, 2 * (part % 4), 4, 0x30303030);
            }
            break;
        default: break;
    }
}

// 2^(e - 128); the two smallest are subnormal.
INLINE vec exponents(bytes16 bytes, const int vector) {
    ivec e = widen_bytes(bytes, vector), is_small = e < 2;
    return (vec)((is_small & (0x200000 + ((e & 1) << 21))) | (~is_small & ((e - 1) << 23)));
}

// A float16 number times (byte - zero), by row.
INLINE vec product_of(const uint8_t *halves, bytes16 bytes, const int zero, const int vector) {
    return load_halves(halves + 2 * vector * LANES) * to_floats(widen_bytes(bytes, vector) - zero);
}

// Six bits of scale number 0 to 15: low four in halves of eight bytes, high two in quarters of the next four.
INLINE bytes16 six_bits(const uint8_t *sub, const int number) {
    bytes16 low = load_bytes16(sub + 16 * (number % 8)), high = load_bytes16(sub + 128 + 16 * (number % 4));
    return (number < 8 ? low & 15 : low >> 4) | (((high >> (2 * (number / 4))) & 3) << 4);
}

// Scales of columns [32 * part + 16 * half, ...) of a block.
INLINE vec unpack_scales(const enum block_type type, const uint8_t *block, const int part, const int half, const int vector) {
    const int place = 2 * vector * LANES, number = 2 * part + half;
    switch (type) {
        case Q4_0:
        case Q4_1:
        case IQ4_NL: return load_halves(block + HALVES_SCALES + place);
        case MXFP4: return exponents(load_bytes16(block + HALVES_SCALES), vector);
        case Q5_0:
        case Q5_1: return load_halves(block + FIVES_SCALES + place);
        case Q8_0: return load_halves(block + Q8_0_SCALES + place);
        case Q2_K: return product_of(block + Q2_K_D, load_bytes16(block + Q2_K_SUB + 16 * number) & 15, 0, vector);
        case Q3_K: return product_of(block + Q3_K_D, six_bits(block + Q3_K_SUB, number), 32, vector);
        case Q4_K: return product_of(block + Q4_K_D, load_bytes16(block + Q4_K_SCALES + 16 * part), 0, vector);
        case Q5_K: return product_of(block + Q5_K_D, load_bytes16(block + Q5_K_SCALES + 16 * part), 0, vector);
        case Q6_K: return product_of(block + Q6_K_D, load_bytes16(block + Q6_K_SCALES + 16 * number) ^ 128, 128, vector);
        default: return product_of(block + IQ4_XS_D, load_bytes16(block + IQ4_XS_SCALES + 16 * part) ^ 128, 128, vector);
    }
}

// What a type with minima adds to scale * code.
INLINE vec unpack_minima(const enum block_type type, const uint8_t *block, const int part, const int half, const int vector) {
    const int place = 2 * vector * LANES, number = 2 * part + half;
    switch (type) {
        case Q4_1: return load_halves(block + HALVES_MINS + place);
        case Q5_1: return load_halves(block + FIVES_MINS + place);
        case Q2_K: return -product_of(block + Q2_K_DMIN, load_bytes16(block + Q2_K_SUB + 16 * number) >> 4, 0, vector);
        case Q4_K: return -product_of(block + Q4_K_DMIN, load_bytes16(block + Q4_K_MINS + 16 * part), 0, vector);
        default: return -product_of(block + Q5_K_DMIN, load_bytes16(block + Q5_K_MINS + 16 * part), 0, vector);
    }
}

#endif
