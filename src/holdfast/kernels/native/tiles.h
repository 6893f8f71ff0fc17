// Register tiles of products, with one order of summation for every tile and every source of weights.
//
// An output is LANES running sums over k, then the lanes pairwise, then the rest of k one by one, then its bias. Kernels that
// use these functions agree to the bit.
#ifndef HOLDFAST_TILES_H
#define HOLDFAST_TILES_H

#include <omp.h>

#include "vector.h"

#define BLOCK_N 96
#define MR 4
#if LANES == 8
#define NR 3  // 4 x 3 sums, 3 weights and 1 input fill the 16 registers of AVX2
#else
#define NR 4
#endif

// Equal shares of columns for all threads, in blocks of about BLOCK_N.
static inline long columns_of_block(long n_size) {
    long share = (n_size + omp_get_max_threads() - 1) / omp_get_max_threads(), rounds = (share + BLOCK_N - 1) / BLOCK_N;
    return rounds ? ((share + rounds - 1) / rounds + NR - 1) / NR * NR : NR;
}

// sums[i][j] += x[i][k] * w[j][k] for whole vectors of k; returns where it stopped. Inlined, so that sums stay in registers.
static inline __attribute__((always_inline)) long add_products(const int rows, const int cols, vec *sums,
                                                               const float *restrict x, long ldx,
                                                               const float *restrict w, long ldw, long k_size) {
    long k = 0;
    for (; k + LANES <= k_size; k += LANES) {
        vec weights[NR];
        UNROLL for (int j = 0; j < cols; j++) weights[j] = load(w + j * ldw + k);
        UNROLL for (int i = 0; i < rows; i++) {
            vec input = load(x + i * ldx + k);
            UNROLL for (int j = 0; j < cols; j++) sums[i * cols + j] = multiply_add(input, weights[j], sums[i * cols + j]);
        }
    }
    return k;
}

// The outputs of one row of a tile, with the rest of k.
static inline void finish(const vec *sums, int cols, const float *x, const float *w, long ldw, const float *bias, float *out,
                          long k, long k_size) {
    int j = 0;
    for (; j + 4 <= cols; j += 4) store_sums4(out + j, sums[j], sums[j + 1], sums[j + 2], sums[j + 3]);
    for (; j < cols; j++) out[j] = sum_lanes(sums[j]);
    for (j = 0; j < cols && k < k_size; j++)
        for (long t = k; t < k_size; t++) out[j] = fmaf(x[t], w[j * ldw + t], out[j]);
    for (j = 0; j < cols && bias; j++) out[j] += bias[j];
}

#endif
