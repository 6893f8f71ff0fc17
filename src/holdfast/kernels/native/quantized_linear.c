// Like linear.c with a quantized weight: the same bits as for its dequantized float32 values.
//
// A lone row dequantizes in registers. More rows share a buffer of dequantized weight rows, one chunk of k at a time, which
// stays in the L1 cache. Memory delivers a quarter or an eighth of the bytes.
#include "codes.h"
#include "kernels.h"
#include "tiles.h"

#define BLOCK_M 64  // rows of x that share what was dequantized
#define CHUNK 1024  // columns: 16 KiB of floats for NR rows
#define INLINE static inline __attribute__((always_inline))

struct quantized_weight {
    const uint8_t *codes;
    const void *scales;
    long columns, block_rows, block_columns, blocks_per_row;
};

INLINE const uint8_t *codes_of(const enum kind kind, const struct quantized_weight *w, long n) {
    return w->codes + n * (kind == E2M1 ? w->columns / 2 : w->columns);
}

// Where the scales of row n begin.
INLINE long scales_of(const struct quantized_weight *w, long n) { return n / w->block_rows * w->blocks_per_row; }

// Columns [start, end) of row n as floats.
INLINE void dequantize(const enum kind kind, const struct quantized_weight *w, long n, long start, long end, float *out) {
    const uint8_t *codes = codes_of(kind, w, n);
    long scales = scales_of(w, n), block = start / w->block_columns;
    for (long column = start; column < end; block++) {
        long stop = (block + 1) * w->block_columns < end ? (block + 1) * w->block_columns : end;
        float scale = scale_at(kind, w->scales, scales + block);
        if (has_lines(kind, scale)) {
            vec factor = splat(scale * line_factor(kind)), values[LINE / LANES];
            for (; column + LINE <= stop; column += LINE) {
                dequantize_line(kind, codes, column, values);
                UNROLL for (int i = 0; i < LINE / LANES; i++) store(out + column - start + i * LANES, values[i] * factor);
            }
        }
        for (; column < stop; column++) out[column - start] = code_value(kind, codes, column) * scale;
    }
}

// Outputs n to n + NR of a lone row, or false if codes cannot be taken by lines.
INLINE int lone_row(const enum kind kind, const struct quantized_weight *w, const float *x, const float *bias, float *y,
                    long n) {
    long k_size = w->columns, column = 0, lines_end = k_size / LINE * LINE;
    if (w->block_columns % LINE && w->block_columns < k_size) return 0;
    const uint8_t *codes[NR];
    long scales[NR];
    vec sums[NR], factors[NR];
    UNROLL for (int j = 0; j < NR; j++) {
        codes[j] = codes_of(kind, w, n + j), scales[j] = scales_of(w, n + j);
        sums[j] = splat(0.0f);
    }
    for (long block = 0; column < lines_end; block++) {
        long stop = (block + 1) * w->block_columns < lines_end ? (block + 1) * w->block_columns : lines_end;
        UNROLL for (int j = 0; j < NR; j++) {
            float scale = scale_at(kind, w->scales, scales[j] + block);
            if (!has_lines(kind, scale)) return 0;
            factors[j] = splat(scale * line_factor(kind));
        }
        for (; column < stop; column += LINE) {
            UNROLL for (int j = 0; j < NR; j++) {
                vec values[LINE / LANES];
                dequantize_line(kind, codes[j], column, values);
                UNROLL for (int i = 0; i < LINE / LANES; i++)
                    sums[j] = multiply_add(load(x + column + i * LANES), values[i] * factors[j], sums[j]);
            }
        }
    }
    float rest[NR * LINE];
    for (int j = 0; j < NR; j++) dequantize(kind, w, n + j, column, k_size, rest + j * LINE);
    long whole = add_products(1, NR, sums, x + column, 0, rest, LINE, k_size - column);
    finish(sums, NR, x + column, rest, LINE, bias, y, whole, k_size - column);
    return 1;
}

// Continue the sums of the chunk before.
#define DEFINE_SUMS(ROWS)                                                                                               \
    static void sums_##ROWS(const float *restrict x, long ldx, const float *restrict w, vec *restrict kept, long k_size) { \
        vec sums[ROWS * NR];                                                                                            \
        UNROLL for (int i = 0; i < ROWS * NR; i++) sums[i] = kept[i];                                                   \
        add_products(ROWS, NR, sums, x, ldx, w, CHUNK, k_size);                                                         \
        UNROLL for (int i = 0; i < ROWS * NR; i++) kept[i] = sums[i];                                                   \
    }
DEFINE_SUMS(1)
DEFINE_SUMS(2)
DEFINE_SUMS(3)
DEFINE_SUMS(4)
typedef void sums_function(const float *, long, const float *, vec *, long);
static sums_function *const sums_functions[] = {0, sums_1, sums_2, sums_3, sums_4};

// Outputs n to n + cols of up to BLOCK_M rows of x.
INLINE void some_rows(const enum kind kind, const struct quantized_weight *w, const float *x, const float *bias, float *y,
                      long rows, long n, long cols, long ldy) {
    float values[NR * CHUNK];
    vec sums[BLOCK_M * NR];
    long k_size = w->columns, start = 0, width = 0;
    for (long j = cols; j < NR; j++) memset(values + j * CHUNK, 0, CHUNK * sizeof(float));
    for (long i = 0; i < rows * NR; i++) sums[i] = splat(0.0f);
    for (; start < k_size; start += width) {
        width = k_size - start < CHUNK ? k_size - start : CHUNK;
        for (long j = 0; j < cols; j++) dequantize(kind, w, n + j, start, start + width, values + j * CHUNK);
        for (long m = 0; m < rows; m += MR)
            sums_functions[rows - m < MR ? rows - m : MR](x + m * k_size + start, k_size, values, sums + m * NR, width);
    }
    start -= width;  // of the last chunk, which holds the rest of k
    for (long m = 0; m < rows; m++)
        finish(sums + m * NR, cols, x + m * k_size + start, values, CHUNK, bias, y + m * ldy, width / LANES * LANES,
               width);
}

typedef void tile_function(const struct quantized_weight *, const float *, const float *, float *, long, long, long, long);
#define DEFINE_TILE(KIND)                                                                                               \
    static void tile_##KIND(const struct quantized_weight *w, const float *x, const float *bias, float *y, long rows, long n, \
                            long cols, long ldy) {                                                                      \
        if (rows == 1 && cols == NR && lone_row(KIND, w, x, bias, y, n)) return;                                        \
        some_rows(KIND, w, x, bias, y, rows, n, cols, ldy);                                                             \
    }
DEFINE_TILE(E4M3)
DEFINE_TILE(INT8)
DEFINE_TILE(E2M1)
static tile_function *const tiles[] = {tile_E4M3, tile_INT8, tile_E2M1};

void holdfast_quantized_linear(const float *x, const uint8_t *codes, const void *scales, const float *bias, float *y,
                           long m_size, long n_size, long k_size, long kind, long block_rows, long block_columns) {
    long blocks_per_row = (k_size + block_columns - 1) / block_columns;
    struct quantized_weight w = {codes, scales, k_size, block_rows, block_columns, blocks_per_row};
    long block_n = columns_of_block(n_size), num_blocks = (n_size + block_n - 1) / block_n;
#pragma omp parallel for schedule(static)
    for (long block = 0; block < num_blocks; block++) {
        long n_end = (block + 1) * block_n < n_size ? (block + 1) * block_n : n_size;
        for (long m = 0; m < m_size; m += BLOCK_M) {
            long rows = m_size - m < BLOCK_M ? m_size - m : BLOCK_M;
            for (long n = block * block_n; n < n_end; n += NR) {
                long cols = n_end - n < NR ? n_end - n : NR;
                tiles[kind](&w, x + m * k_size, bias ? bias + n : 0, y + m * n_size + n, rows, n, cols, n_size);
            }
        }
    }
}
