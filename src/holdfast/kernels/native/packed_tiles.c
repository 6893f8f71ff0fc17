// GGUF blocks as stored, row by row, into tiles of 16 interleaved rows (packed_types.h) or into planes. One pass: the caller's
// thread has just read the blocks, so they lie in its cache.
#include "packed_types.h"

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (word4){__VA_ARGS__})
#endif

enum { NVFP4 = NUM_TYPES };  // has planes and no tiles

typedef uint32_t word4 __attribute__((vector_size(16)));
typedef uint32_t loose_word4 __attribute__((vector_size(16), aligned(1)));
typedef uint32_t row_words __attribute__((vector_size(64)));  // of 16 rows
typedef uint16_t row_halves __attribute__((vector_size(32)));

INLINE uint32_t load_word(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}

// 16 bytes of each row: word 0 of all rows, then word 1 of all rows.
INLINE void spread_words(const uint8_t *const *rows, long at, uint8_t *to) {
    UNROLL for (int row = 0; row < TILE_ROWS; row += 4, to += 16) {
        word4 a = *(const loose_word4 *)(rows[row] + at), b = *(const loose_word4 *)(rows[row + 1] + at);
        word4 c = *(const loose_word4 *)(rows[row + 2] + at), d = *(const loose_word4 *)(rows[row + 3] + at);
        word4 ab = SHUFFLE(a, b, 0, 4, 1, 5), cd = SHUFFLE(c, d, 0, 4, 1, 5);
        *(loose_word4 *)to = SHUFFLE(ab, cd, 0, 1, 4, 5), *(loose_word4 *)(to + 64) = SHUFFLE(ab, cd, 2, 3, 6, 7);
        ab = SHUFFLE(a, b, 2, 6, 3, 7), cd = SHUFFLE(c, d, 2, 6, 3, 7);
        *(loose_word4 *)(to + 128) = SHUFFLE(ab, cd, 0, 1, 4, 5), *(loose_word4 *)(to + 192) = SHUFFLE(ab, cd, 2, 3, 6, 7);
    }
}

INLINE void spread_runs(const uint8_t *const *rows, long at, uint8_t *to, const int bytes) {
    UNROLL for (int i = 0; i < bytes; i += 16) spread_words(rows, at + i, to + i * TILE_ROWS);
}

INLINE void spread_halves(const uint8_t *const *rows, long at, uint8_t *to) {
    UNROLL for (int row = 0; row < TILE_ROWS; row++) memcpy(to + 2 * row, rows[row] + at, 2);
}

INLINE row_words gather_words(const uint8_t *const *rows, long at) {
    row_words words;
    UNROLL for (int row = 0; row < TILE_ROWS; row++) words[row] = load_word(rows[row] + at);
    return words;
}

INLINE void store_halves(row_words low_halves, uint8_t *to) {
    row_halves halves = __builtin_convertvector(low_halves, row_halves);
    memcpy(to, &halves, sizeof halves);
}

// The low byte of each word.
INLINE void store_bytes(row_words words, uint8_t *to) {
    bytes16 bytes = __builtin_convertvector(words, bytes16);
    memcpy(to, &bytes, sizeof bytes);
}

// Four bytes of each row: byte 0 of all rows, then byte 1 of all rows.
INLINE void store_spread_bytes(row_words words, uint8_t *to) {
    UNROLL for (int i = 0; i < 4; i++) store_bytes(words >> (8 * i), to + i * TILE_ROWS);
}

INLINE void spread_bytes(const uint8_t *const *rows, long at, uint8_t *to, const int bytes) {
    UNROLL for (int i = 0; i < bytes; i += 4) store_spread_bytes(gather_words(rows, at + i), to + i * TILE_ROWS);
}

// Bit 4g + i to bit g of byte i: then one shift takes the fifth bits of four columns to their codes.
INLINE void spread_fifth(const uint8_t *const *rows, long at, uint8_t *to) {
    row_words bits = gather_words(rows, at), moved = {0};
    UNROLL for (int g = 0; g < 8; g++) moved |= (((bits >> (4 * g)) & 15) * 0x00204081 & 0x01010101) << g;
    memcpy(to, &moved, sizeof moved);
}

// Of eight six-bit scales and minima in 12 bytes, the low six bits of two words are numbers 0-3. Numbers 4-7 have their low four
// bits in the halves of the third word, and their high two bits on top of the first two words.
#define LOW_SIX(word) ((word) & 0x3F3F3F3F)
#define HIGH_SIX(word, third) (((third) & 0x0F0F0F0F) | (((word) >> 2) & 0x30303030))

INLINE void place_six_bits(const uint8_t *const *rows, long at, uint8_t *scales, uint8_t *mins, uint8_t *d, uint8_t *dmin) {
    row_words both = gather_words(rows, at), first = gather_words(rows, at + 4), second = gather_words(rows, at + 8);
    row_words third = gather_words(rows, at + 12);
    store_halves(both & 0xFFFF, d), store_halves(both >> 16, dmin);
    store_spread_bytes(LOW_SIX(first), scales), store_spread_bytes(HIGH_SIX(first, third), scales + 64);
    store_spread_bytes(LOW_SIX(second), mins), store_spread_bytes(HIGH_SIX(second, third >> 4), mins + 64);
}

// Halves of four bytes are the low four bits of a sub-scale, pairs of 16 bits the high two; 32 is subtracted.
#define SUB_SCALE(both, low, i) (((((low) >> (4 * (i))) & 15) | ((((both) >> (16 + 2 * (i))) & 3) << 4)) - 32)

INLINE void place_block(const enum block_type type, const uint8_t *const *rows, long at, uint8_t *tile) {
    switch (type) {
        case Q4_0:
        case IQ4_NL: spread_runs(rows, at + 2, tile, 16), spread_halves(rows, at, tile + HALVES_SCALES); break;
        case Q4_1:
            spread_runs(rows, at + 4, tile, 16);
            spread_halves(rows, at, tile + HALVES_SCALES), spread_halves(rows, at + 2, tile + HALVES_MINS);
            break;
        case MXFP4:
            spread_runs(rows, at + 1, tile, 16);
            UNROLL for (int row = 0; row < TILE_ROWS; row++) tile[HALVES_SCALES + row] = rows[row][at];
            break;
        case Q5_0:
            spread_runs(rows, at + 6, tile, 16), spread_fifth(rows, at + 2, tile + FIVES_FIFTH);
            spread_halves(rows, at, tile + FIVES_SCALES);
            break;
        case Q5_1:
            spread_runs(rows, at + 8, tile, 16), spread_fifth(rows, at + 4, tile + FIVES_FIFTH);
            spread_halves(rows, at, tile + FIVES_SCALES), spread_halves(rows, at + 2, tile + FIVES_MINS);
            break;
        case Q8_0: spread_runs(rows, at + 2, tile, 32), spread_halves(rows, at, tile + Q8_0_SCALES); break;
        case Q2_K:
            spread_runs(rows, at + 16, tile, 64), spread_bytes(rows, at, tile + Q2_K_SUB, 16);
            spread_halves(rows, at + 80, tile + Q2_K_D), spread_halves(rows, at + 82, tile + Q2_K_DMIN);
            break;
        case Q3_K:
            spread_runs(rows, at + 32, tile, 64), spread_runs(rows, at, tile + Q3_K_THIRD, 32);
            spread_bytes(rows, at + 96, tile + Q3_K_SUB, 12), spread_halves(rows, at + 108, tile + Q3_K_D);
            break;
        case Q4_K:
            spread_runs(rows, at + 16, tile, 128);
            place_six_bits(rows, at, tile + Q4_K_SCALES, tile + Q4_K_MINS, tile + Q4_K_D, tile + Q4_K_DMIN);
            break;
        case Q5_K:
            spread_runs(rows, at + 48, tile, 128), spread_runs(rows, at + 16, tile + Q5_K_FIFTH, 32);
            place_six_bits(rows, at, tile + Q5_K_SCALES, tile + Q5_K_MINS, tile + Q5_K_D, tile + Q5_K_DMIN);
            break;
        case Q6_K:
            spread_runs(rows, at, tile, 128), spread_runs(rows, at + 128, tile + Q6_K_HIGH, 64);
            spread_bytes(rows, at + 192, tile + Q6_K_SCALES, 16), spread_halves(rows, at + 208, tile + Q6_K_D);
            break;
        default: {
            spread_runs(rows, at + 8, tile, 128);
            row_words both = gather_words(rows, at), low = gather_words(rows, at + 4);
            store_halves(both & 0xFFFF, tile + IQ4_XS_D);
            UNROLL for (int i = 0; i < 8; i++) store_bytes(SUB_SCALE(both, low, i), tile + IQ4_XS_SCALES + i * TILE_ROWS);
        }
    }
}

// Places of float16 scales in a tile block.
static const short HALF_FIELDS[NUM_TYPES][2] = {
    [Q4_0] = {HALVES_SCALES}, [Q4_1] = {HALVES_SCALES, HALVES_MINS}, [IQ4_NL] = {HALVES_SCALES}, [Q5_0] = {FIVES_SCALES},
    [Q5_1] = {FIVES_SCALES, FIVES_MINS}, [Q8_0] = {Q8_0_SCALES}, [Q2_K] = {Q2_K_D, Q2_K_DMIN}, [Q3_K] = {Q3_K_D},
    [Q4_K] = {Q4_K_D, Q4_K_DMIN}, [Q5_K] = {Q5_K_D, Q5_K_DMIN}, [Q6_K] = {Q6_K_D}, [IQ4_XS] = {IQ4_XS_D},
};
#define HALF_INFINITY 0x7C00  // exponent bits of float16: infinity and NaN have all of them
#define MOST_EXPONENT 252     // of e8m0 that leaves 6, the largest number of e2m1, in float32's range

// The first row of a tile with a scale that is not finite, or TILE_ROWS.
static long wrong_row(long type, const uint8_t *tile, long num_blocks) {
    long block_bytes = (long)TRAITS[type].bytes * TILE_ROWS;
    row_halves wrong = {0};
    for (long block = 0; block < num_blocks; block++, tile += block_bytes) {
        if (type == MXFP4) {
            bytes16 is_wrong = (bytes16)(load_bytes16(tile + HALVES_SCALES) > MOST_EXPONENT);
            wrong |= __builtin_convertvector(is_wrong, row_halves);
        }
        for (int i = 0; i < 2 && HALF_FIELDS[type][i]; i++) {
            row_halves scales;
            memcpy(&scales, tile + HALF_FIELDS[type][i], sizeof scales);
            wrong |= (row_halves)((scales & HALF_INFINITY) == HALF_INFINITY);
        }
    }
    long row = 0;
    while (row < TILE_ROWS && !wrong[row]) row++;
    return row;
}

// Row of the file: interleaved heads store rows i and i + half of a head as rows 2i and 2i + 1.
static inline long stored_row(long row, long head_dim) {
    if (!head_dim) return row;
    long half = head_dim / 2, place = row % head_dim;
    return row - place + place % half * 2 + place / half;
}

typedef void place_function(const uint8_t *const *rows, uint8_t *tile, long num_blocks);
typedef void split_function(const uint8_t *row, uint8_t *const *planes, long first, long num_blocks);

INLINE void split_block(const int type, const uint8_t *from, uint8_t *const *p, long i) {
    switch (type) {
        case Q4_0:
        case IQ4_NL: memcpy(p[0] + 16 * i, from + 2, 16), memcpy(p[1] + 2 * i, from, 2); break;
        case Q4_1: memcpy(p[0] + 16 * i, from + 4, 16), memcpy(p[1] + 2 * i, from, 2), memcpy(p[2] + 2 * i, from + 2, 2); break;
        case MXFP4: memcpy(p[0] + 16 * i, from + 1, 16), p[1][i] = *from; break;
        case NVFP4: memcpy(p[0] + 32 * i, from + 4, 32), memcpy(p[1] + 4 * i, from, 4); break;
        case Q5_0: memcpy(p[0] + 16 * i, from + 6, 16), memcpy(p[1] + 4 * i, from + 2, 4), memcpy(p[2] + 2 * i, from, 2); break;
        case Q5_1:
            memcpy(p[0] + 16 * i, from + 8, 16), memcpy(p[1] + 4 * i, from + 4, 4);
            memcpy(p[2] + 2 * i, from, 2), memcpy(p[3] + 2 * i, from + 2, 2);
            break;
        case Q8_0: memcpy(p[0] + 32 * i, from + 2, 32), memcpy(p[1] + 2 * i, from, 2); break;
        case Q2_K:
            memcpy(p[0] + 64 * i, from + 16, 64), memcpy(p[1] + 16 * i, from, 16);
            memcpy(p[2] + 2 * i, from + 80, 2), memcpy(p[3] + 2 * i, from + 82, 2);
            break;
        case Q3_K:
            memcpy(p[0] + 64 * i, from + 32, 64), memcpy(p[1] + 32 * i, from, 32);
            memcpy(p[2] + 12 * i, from + 96, 12), memcpy(p[3] + 2 * i, from + 108, 2);
            break;
        case Q4_K:
        case Q5_K: {
            memcpy(p[0] + 128 * i, from + (type == Q4_K ? 16 : 48), 128);
            if (type == Q5_K) memcpy(p[1] + 32 * i, from + 16, 32), p++;
            uint32_t first = load_word(from + 4), second = load_word(from + 8), third = load_word(from + 12);
            uint32_t scales[2] = {LOW_SIX(first), HIGH_SIX(first, third)};
            uint32_t mins[2] = {LOW_SIX(second), HIGH_SIX(second, third >> 4)};
            memcpy(p[1] + 8 * i, scales, 8), memcpy(p[2] + 8 * i, mins, 8);
            memcpy(p[3] + 2 * i, from, 2), memcpy(p[4] + 2 * i, from + 2, 2);
            break;
        }
        case Q6_K:
            memcpy(p[0] + 128 * i, from, 128), memcpy(p[1] + 64 * i, from + 128, 64);
            memcpy(p[2] + 16 * i, from + 192, 16), memcpy(p[3] + 2 * i, from + 208, 2);
            break;
        default: {
            memcpy(p[0] + 128 * i, from + 8, 128), memcpy(p[2] + 2 * i, from, 2);
            uint32_t both = load_word(from), low = load_word(from + 4);
            for (int j = 0; j < 8; j++) p[1][8 * i + j] = (uint8_t)SUB_SCALE(both, low, j);
        }
    }
}

#define DEFINE_SPLIT(TYPE, STORED_BYTES)                                                                                \
    enum { STORED_##TYPE = STORED_BYTES };                                                                              \
    static void split_##TYPE(const uint8_t *row, uint8_t *const *planes, long first, long num_blocks) {                 \
        for (long i = 0; i < num_blocks; i++) split_block(TYPE, row + i * STORED_BYTES, planes, first + i);             \
    }
#define DEFINE_TYPE(TYPE, STORED_BYTES)                                                                                 \
    DEFINE_SPLIT(TYPE, STORED_BYTES)                                                                                    \
    static void place_##TYPE(const uint8_t *const *rows, uint8_t *tile, long num_blocks) {                              \
        for (long i = 0; i < num_blocks; i++)                                                                           \
            place_block(TYPE, rows, i * STORED_BYTES, tile + i * TRAITS[TYPE].bytes * TILE_ROWS);                       \
    }
DEFINE_TYPE(Q4_0, 18) DEFINE_TYPE(Q4_1, 20) DEFINE_TYPE(Q5_0, 22) DEFINE_TYPE(Q5_1, 24) DEFINE_TYPE(Q8_0, 34)
DEFINE_TYPE(IQ4_NL, 18) DEFINE_TYPE(MXFP4, 17) DEFINE_TYPE(Q2_K, 84) DEFINE_TYPE(Q3_K, 110) DEFINE_TYPE(Q4_K, 144)
DEFINE_TYPE(Q5_K, 176) DEFINE_TYPE(Q6_K, 210) DEFINE_TYPE(IQ4_XS, 136) DEFINE_SPLIT(NVFP4, 36)
#define EACH_TYPE(NAME)                                                                                                 \
    [Q4_0] = NAME##_Q4_0, [Q4_1] = NAME##_Q4_1, [Q5_0] = NAME##_Q5_0, [Q5_1] = NAME##_Q5_1, [Q8_0] = NAME##_Q8_0,       \
    [IQ4_NL] = NAME##_IQ4_NL, [MXFP4] = NAME##_MXFP4, [Q2_K] = NAME##_Q2_K, [Q3_K] = NAME##_Q3_K, [Q4_K] = NAME##_Q4_K, \
    [Q5_K] = NAME##_Q5_K, [Q6_K] = NAME##_Q6_K, [IQ4_XS] = NAME##_IQ4_XS
static place_function *const PLACE[NUM_TYPES] = {EACH_TYPE(place)};
static split_function *const SPLIT[NUM_TYPES + 1] = {EACH_TYPE(split), [NVFP4] = split_NVFP4};

// Rows [first, first + num_rows) of those that begin at `blocks`, `row_bytes` apart, in whole groups of 16. `head_dim` is that of
// interleaved heads, whose first row is that of `blocks`; or 0. `wrong` gets the first row with a scale that is not finite,
// counted from `first`, if it is less.
void holdfast_place_blocks(const uint8_t *blocks, uint8_t *tiles, long type, long first, long num_rows, long num_blocks,
                           long row_bytes, long head_dim, int64_t *wrong) {
    long tile_bytes = num_blocks * TRAITS[type].bytes * TILE_ROWS;
    for (long row = 0; row < num_rows; row += TILE_ROWS, tiles += tile_bytes) {
        const uint8_t *rows[TILE_ROWS];
        for (int i = 0; i < TILE_ROWS; i++) rows[i] = blocks + stored_row(first + row + i, head_dim) * row_bytes;
        PLACE[type](rows, tiles, num_blocks);
        long found = wrong_row(type, tiles, num_blocks);
        if (found < TILE_ROWS && row + found < *wrong) *wrong = row + found;
    }
}

// The same rows into planes, whose rows have no gaps.
void holdfast_split_blocks(const uint8_t *blocks, uint8_t *const *planes, long type, long first, long num_rows,
                           long num_blocks, long row_bytes, long head_dim) {
    for (long row = 0; row < num_rows; row++)
        SPLIT[type](blocks + stored_row(first + row, head_dim) * row_bytes, planes, row * num_blocks, num_blocks);
}
