// Kernels of other files that a layer calls (layer.c).
#ifndef HOLDFAST_KERNELS_H
#define HOLDFAST_KERNELS_H

#include <stdint.h>

void holdfast_linear(const float *x, const float *w, const float *bias, float *y, long m_size, long n_size, long k_size);
void holdfast_quantized_linear(const float *x, const uint8_t *codes, const void *scales, const float *bias, float *y,
                               long m_size, long n_size, long k_size, long kind, long block_rows, long block_columns);
void holdfast_packed_linear(const float *x, const uint8_t *tiles, const float *bias, float *y, uint8_t *scratch, long type,
                            long m_size, long n_size, long k_size, long ldy);
void holdfast_packed_linear_full(const float *x, const uint8_t *tiles, const float *bias, float *y, long type, long m_size,
                                 long n_size, long k_size, long ldy);
void holdfast_add_rms_norm(float *x, const float *delta, const float *weight, float *y, long num_rows, long size, float eps,
                           float offset);
void holdfast_silu_mul(const float *gate_up, float *y, long num_rows, long size);
void holdfast_write_heads(const float *qkv, const int64_t *slots, const float *cosine, const float *sine,
                          const float *q_norm, const float *k_norm, float eps, float offset, float *q,
                          float *k_plane, float *v_plane, long num_rows, long num_heads, long num_kv_heads, long head_dim,
                          long num_pairs, long query_step);
void holdfast_paged_attention(const float *q, const float *k_plane, const float *v_plane, float *out, const int32_t *pages,
                              const int64_t *sequences, const float *sinks, long num_sequences, long num_heads,
                              long num_kv_heads, long head_dim, long page_tokens, long window, float scale, float softcap);

#endif
