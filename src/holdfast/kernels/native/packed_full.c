// Like packed_linear.c with x as it is: weights become floats, exactly, and everything is float32. And rows of an embedding.
//
// Order of an output: t = w * x of 32 columns, one by one by fma from the second on; y += t part by part; bias last.
#include <omp.h>

#include "kernels.h"
#include "packed_types.h"

#if LANES == 16
#define PANEL 8
#else
#define PANEL 4
#endif
#define PART 32
#define CHUNK_PARTS 8  // 16 KiB of floats
#define CHUNK (CHUNK_PARTS * PART)
#define MOST_ROWS 256
#define INPUT_BYTES (512 << 10)

// Weights of a chunk, column by column.
typedef float columns[CHUNK][TILE_ROWS];

INLINE void widen_part(const enum block_type type, const uint8_t *block, const int part, float (*out)[TILE_ROWS]) {
    const struct block_traits traits = TRAITS[type];
    const int is_wide = traits.bits == 8;
    UNROLL for (int v = 0; v < VECTORS; v++) {
        words w[8];
        unpack_codes(type, block, part, v, w);
        UNROLL for (int half = 0; half < 2; half++) {
            const int group = traits.step == 32 ? 0 : half;
            vec scales = unpack_scales(type, block, part, group, v), minima;
            if (traits.has_min) minima = unpack_minima(type, block, part, group, v);
            UNROLL for (int g = 0; g < 4; g++) UNROLL for (int i = 0; i < 4; i++) {
                words code = w[4 * half + g] << (24 - 8 * i);
                ivec number = (is_wide && SIGNED_CODES ? (ivec)code >> 24 : (ivec)(code >> 24)) - traits.offset;
                vec value = traits.has_min ? multiply_add(to_floats(number), scales, minima) : to_floats(number) * scales;
                store(out[16 * half + 4 * g + i] + v * LANES, value);
            }
        }
    }
}

typedef void widen_function(const uint8_t *tile, long first, long count, columns out);
#define DEFINE_WIDEN(TYPE)                                                                                              \
    static void widen_##TYPE(const uint8_t *tile, long first, long count, columns out) {                                \
        const struct block_traits traits = TRAITS[TYPE];                                                                \
        if (traits.elements == PART) {                                                                                  \
            for (long i = 0; i < count; i++)                                                                            \
                widen_part(TYPE, tile + (first + i) * traits.bytes * TILE_ROWS, 0, out + i * PART);                     \
            return;                                                                                                     \
        }                                                                                                               \
        const uint8_t *block = tile + first / CHUNK_PARTS * traits.bytes * TILE_ROWS;                                   \
        UNROLL for (int part = 0; part < CHUNK_PARTS; part++) widen_part(TYPE, block, part, out + part * PART);         \
    }
DEFINE_WIDEN(Q4_0) DEFINE_WIDEN(Q4_1) DEFINE_WIDEN(Q5_0) DEFINE_WIDEN(Q5_1) DEFINE_WIDEN(Q8_0) DEFINE_WIDEN(IQ4_NL)
DEFINE_WIDEN(MXFP4) DEFINE_WIDEN(Q2_K) DEFINE_WIDEN(Q3_K) DEFINE_WIDEN(Q4_K) DEFINE_WIDEN(Q5_K) DEFINE_WIDEN(Q6_K)
DEFINE_WIDEN(IQ4_XS)
static widen_function *const WIDEN[NUM_TYPES] = {
    [Q4_0] = widen_Q4_0, [Q4_1] = widen_Q4_1,     [Q5_0] = widen_Q5_0,   [Q5_1] = widen_Q5_1, [Q8_0] = widen_Q8_0,
    [IQ4_NL] = widen_IQ4_NL, [MXFP4] = widen_MXFP4, [Q2_K] = widen_Q2_K, [Q3_K] = widen_Q3_K, [Q4_K] = widen_Q4_K,
    [Q5_K] = widen_Q5_K, [Q6_K] = widen_Q6_K,     [IQ4_XS] = widen_IQ4_XS,
};

// Continue the sums of some rows over a chunk.
INLINE void add_rows(const int rows, const float (*w)[TILE_ROWS], long count, const float *x, long ldx, float *y,
                     const int v) {
    vec sums[PANEL];
    UNROLL for (int i = 0; i < rows; i++) sums[i] = load(y + i * TILE_ROWS + v * LANES);
    for (long part = 0; part < count; part++, w += PART, x += PART) {
        vec t[PANEL], first = load(w[0] + v * LANES);
        UNROLL for (int i = 0; i < rows; i++) t[i] = first * splat(x[i * ldx]);
        UNROLL for (int k = 1; k < PART; k++) {
            vec weights = load(w[k] + v * LANES);
            UNROLL for (int i = 0; i < rows; i++) t[i] = multiply_add_by(weights, x[i * ldx + k], t[i]);
        }
        UNROLL for (int i = 0; i < rows; i++) sums[i] += t[i];
    }
    UNROLL for (int i = 0; i < rows; i++) store(y + i * TILE_ROWS + v * LANES, sums[i]);
}

typedef void rows_function(const float (*w)[TILE_ROWS], long count, const float *x, long ldx, float *y);
#define DEFINE_ROWS(ROWS)                                                                                               \
    static void rows_##ROWS(const float (*w)[TILE_ROWS], long count, const float *x, long ldx, float *y) {              \
        UNROLL for (int v = 0; v < VECTORS; v++) add_rows(ROWS, w, count, x, ldx, y, v);                                \
    }
DEFINE_ROWS(1)
DEFINE_ROWS(2)
DEFINE_ROWS(4)
#if PANEL == 8
DEFINE_ROWS(8)
static rows_function *const ROWS[9] = {[1] = rows_1, [2] = rows_2, [4] = rows_4, [8] = rows_8};
#else
static rows_function *const ROWS[9] = {[1] = rows_1, [2] = rows_2, [4] = rows_4};
#endif

static inline long rows_of_panel(long rows) { return rows >= 8 && PANEL == 8 ? 8 : rows >= 4 ? 4 : rows >= 2 ? 2 : 1; }

void holdfast_packed_linear_full(const float *x, const uint8_t *tiles, const float *bias, float *y, long type, long m_size,
                                 long n_size, long k_size, long ldy) {
    long num_parts = k_size / PART, num_tiles = (n_size + TILE_ROWS - 1) / TILE_ROWS;
    long tile_bytes = k_size / TRAITS[type].elements * TRAITS[type].bytes * TILE_ROWS;
    long block_rows = INPUT_BYTES / (4 * k_size + 1) / PANEL * PANEL;
    block_rows = block_rows < PANEL ? PANEL : block_rows > MOST_ROWS ? MOST_ROWS : block_rows;
#pragma omp parallel
    for (long start = 0; start < m_size; start += block_rows) {
        long end = start + block_rows < m_size ? start + block_rows : m_size;
#pragma omp for schedule(static) nowait
        for (long tile = 0; tile < num_tiles; tile++) {
            columns weights;
            float sums[MOST_ROWS * TILE_ROWS];
            memset(sums, 0, (end - start) * TILE_ROWS * sizeof(float));
            for (long first = 0; first < num_parts; first += CHUNK_PARTS) {
                long count = num_parts - first < CHUNK_PARTS ? num_parts - first : CHUNK_PARTS, rows;
                WIDEN[type](tiles + tile * tile_bytes, first, count, weights);
                for (long row = start; row < end; row += rows) {
                    rows = rows_of_panel(end - row);
                    ROWS[rows](weights, count, x + row * k_size + first * PART, k_size, sums + (row - start) * TILE_ROWS);
                }
            }
            long n = tile * TILE_ROWS, cols = n_size - n < TILE_ROWS ? n_size - n : TILE_ROWS;
            for (long row = start; row < end; row++)
                for (long i = 0; i < cols; i++)
                    y[row * ldy + n + i] = sums[(row - start) * TILE_ROWS + i] + (bias ? bias[n + i] : 0.0f);
        }
    }
}

// Row ids[t] of the weight into row t of y.
void holdfast_packed_rows(const int64_t *ids, const uint8_t *tiles, float *y, long type, long num_ids, long k_size) {
    long num_parts = k_size / PART, tile_bytes = k_size / TRAITS[type].elements * TRAITS[type].bytes * TILE_ROWS;
#pragma omp parallel for schedule(static) if (num_ids * k_size > 1 << 14)
    for (long t = 0; t < num_ids; t++) {
        columns weights;
        for (long first = 0; first < num_parts; first += CHUNK_PARTS) {
            long count = num_parts - first < CHUNK_PARTS ? num_parts - first : CHUNK_PARTS;
            WIDEN[type](tiles + ids[t] / TILE_ROWS * tile_bytes, first, count, weights);
            for (long k = 0; k < count * PART; k++)
                y[t * k_size + first * PART + k] = weights[k][ids[t] % TILE_ROWS];
        }
    }
}
