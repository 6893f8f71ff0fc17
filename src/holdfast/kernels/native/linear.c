// y[m][n] = sum over k of x[m][k] * w[n][k], plus bias[n].
//
// Both operands are dense in k, so a register tile of rows of x and w needs no packed copy of w: that copy makes a BLAS slow
// for the few rows of a decode step. Every output has the same order of summation in any tile.
#include "kernels.h"
#include "tiles.h"

#define BLOCK_M 16
#define LINE 16              // floats in a cache line
#define FETCH_AHEAD (4 << 10)  // floats, 16 KiB: measured best of 8 to 56 KiB for a lone row

#define DEFINE_TILE(ROWS, COLS)                                                                                         \
    static void tile_##ROWS##_##COLS(const float *restrict x, const float *restrict w, const float *restrict bias,      \
                                     float *restrict y, long k_size, long ldy) {                                         \
        vec sums[ROWS * COLS];                                                                                          \
        UNROLL for (int i = 0; i < ROWS * COLS; i++) sums[i] = splat(0.0f);                                             \
        long k = add_products(ROWS, COLS, sums, x, k_size, w, k_size, k_size);                                          \
        UNROLL for (int i = 0; i < ROWS; i++)                                                                           \
            finish(sums + i * COLS, COLS, x + i * k_size, w, k_size, bias, y + i * ldy, k, k_size);                     \
    }

// A lone row is bound by memory: prefetch its weights in memory order.
static void lone_row(const float *restrict x, const float *restrict w, const float *restrict bias, float *restrict y,
                     long k_size, long ldy) {
    (void)ldy;
    vec sums[NR];
    UNROLL for (int j = 0; j < NR; j++) sums[j] = splat(0.0f);
    long k = 0;
    for (; k + LINE <= k_size; k += LINE) {
        UNROLL for (int j = 0; j < NR; j++) __builtin_prefetch(w + FETCH_AHEAD + NR * k + LINE * j);
        UNROLL for (int part = 0; part < LINE; part += LANES) {
            vec input = load(x + k + part);
            UNROLL for (int j = 0; j < NR; j++) sums[j] = multiply_add(input, load(w + j * k_size + k + part), sums[j]);
        }
    }
    for (; k + LANES <= k_size; k += LANES) {
        vec input = load(x + k);
        UNROLL for (int j = 0; j < NR; j++) sums[j] = multiply_add(input, load(w + j * k_size + k), sums[j]);
    }
    finish(sums, NR, x, w, k_size, bias, y, k, k_size);
}

#define DEFINE_TILES(COLS) DEFINE_TILE(2, COLS) DEFINE_TILE(3, COLS) DEFINE_TILE(4, COLS)
DEFINE_TILE(1, 1)
DEFINE_TILES(1)
#if NR == 3
DEFINE_TILES(3)
#define WIDE(ROWS) tile_##ROWS##_3
#else
DEFINE_TILES(4)
#define WIDE(ROWS) tile_##ROWS##_4
#endif

typedef void tile_function(const float *, const float *, const float *, float *, long, long);
static tile_function *const wide_tiles[] = {0, lone_row, WIDE(2), WIDE(3), WIDE(4)};
static tile_function *const narrow_tiles[] = {0, tile_1_1, tile_2_1, tile_3_1, tile_4_1};

void holdfast_linear(const float *x, const float *w, const float *bias, float *y, long m_size, long n_size, long k_size) {
    long block_n = columns_of_block(n_size), num_blocks = (n_size + block_n - 1) / block_n;
#pragma omp parallel for schedule(static)
    for (long block = 0; block < num_blocks; block++) {
        long n_end = (block + 1) * block_n < n_size ? (block + 1) * block_n : n_size;
        for (long m_block = 0; m_block < m_size; m_block += BLOCK_M) {
            long m_end = m_block + BLOCK_M < m_size ? m_block + BLOCK_M : m_size;
            for (long n = block * block_n; n < n_end;) {
                long cols = n + NR <= n_end ? NR : 1;
                tile_function *const *tiles = cols == NR ? wide_tiles : narrow_tiles;
                for (long m = m_block; m < m_end; m += MR) {
                    long rows = m_end - m < MR ? m_end - m : MR;
                    tiles[rows](x + m * k_size, w + n * k_size, bias ? bias + n : 0, y + m * n_size + n, k_size, n_size);
                }
                n += cols;
            }
        }
    }
}
