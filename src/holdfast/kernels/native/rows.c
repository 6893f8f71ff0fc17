// Row-wise kernels: RMSNorm, the gate of an MLP, activations, KV heads into pages, logit masks.
#include "vector.h"

#define ROWS_PER_THREAD 16  // below this a second thread does not pay
#define ELEMENTS_PER_THREAD 4096

// `offset` is added to weights.
static inline void rms_row(const float *x, const float *weight, float *y, long size, float eps, float offset) {
    vec sums = splat(0.0f);
    long i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec v = load(x + i);
        sums = multiply_add(v, v, sums);
    }
    float total = sum_lanes(sums);
    for (; i < size; i++) total = fmaf(x[i], x[i], total);
    float scale = 1.0f / sqrtf(total / (float)size + eps);
    i = 0;
    for (; i + LANES <= size; i += LANES)
        store(y + i, load(x + i) * splat(scale) * (load(weight + i) + splat(offset)));
    for (; i < size; i++) y[i] = x[i] * scale * (weight[i] + offset);
}

void holdfast_rms_norm(const float *x, const float *weight, float *y, long num_rows, long size, float eps,
                       float offset) {
#pragma omp parallel for schedule(static) if (num_rows >= ROWS_PER_THREAD)
    for (long row = 0; row < num_rows; row++) rms_row(x + row * size, weight, y + row * size, size, eps, offset);
}

// silu(x) = x / (1 + exp(-x)); below -80 the value is under 1e-33 and becomes 0.
static inline vec silu_vec(vec x) {
    ivec gone = x < splat(-80.0f);
    vec negated = (vec)((ivec)(-x) & ~gone);
    return (vec)((ivec)(x / (splat(1.0f) + exp_vec(negated))) & ~gone);
}

void holdfast_silu_mul(const float *gate_up, float *y, long num_rows, long size) {
#pragma omp parallel for schedule(static) if (num_rows >= ROWS_PER_THREAD / 4)
    for (long row = 0; row < num_rows; row++) {
        const float *gate = gate_up + row * 2 * size, *up = gate + size;
        float *out = y + row * size;
        long i = 0;
        for (; i + 2 * LANES <= size; i += 2 * LANES) {  // two at a time, to hide latency
            vec left = silu_vec(load(gate + i)), right = silu_vec(load(gate + i + LANES));
            store(out + i, left * load(up + i));
            store(out + i + LANES, right * load(up + i + LANES));
        }
        for (; i + LANES <= size; i += LANES) store(out + i, silu_vec(load(gate + i)) * load(up + i));
        if (i < size) {
            float tail[LANES] = {0}, result[LANES];
            memcpy(tail, gate + i, (size - i) * sizeof(float));
            store(result, silu_vec(load(tail)));
            for (long t = i; t < size; t++) out[t] = result[t - i] * up[t];
        }
    }
}

// gate * sigmoid(1.702 gate) * (up + 1); the limit bounds gate from above and up on both sides. Gates of a row lie `step` apart,
// and each up `up_offset` after its gate. NaN stays NaN.
void holdfast_clamped_gate(const float *gate_up, float *y, long num_rows, long size, long step, long up_offset, float limit) {
#pragma omp parallel for schedule(static) if (num_rows >= ROWS_PER_THREAD / 4)
    for (long row = 0; row < num_rows; row++) {
        const float *gates = gate_up + row * 2 * size;
        for (long i = 0; i < size; i += LANES) {
            float gate[LANES] = {0}, up[LANES] = {0}, result[LANES];
            long count = size - i < LANES ? size - i : LANES;
            for (long t = 0; t < count; t++) {
                float g = gates[(i + t) * step], u = gates[(i + t) * step + up_offset];
                gate[t] = g > limit ? limit : g;
                up[t] = u > limit ? limit : u < -limit ? -limit : u;
            }
            vec inner = load(gate) * splat(1.702f);
            ivec gone = inner < splat(-80.0f);  // as for silu
            vec negated = (vec)((ivec)(-inner) & ~gone);
            vec active = (vec)((ivec)(load(gate) / (splat(1.0f) + exp_vec(negated))) & ~gone);
            store(result, active * (load(up) + splat(1.0f)));
            memcpy(y + row * size + i, result, count * sizeof(float));
        }
    }
}

// x *= sigmoid(gate), in place; zeros stay zeros whatever their gate. Row i of x has the gates of row rows[i], or of row i; gates of a
// row lie by head, `head_stride` apart.
void holdfast_gate_heads(float *x, const float *gates, const int64_t *rows, long num_rows, long num_heads, long head_dim,
                         long row_stride, long head_stride) {
#pragma omp parallel for schedule(static) if (num_rows >= ROWS_PER_THREAD / 4)
    for (long row = 0; row < num_rows; row++) {
        for (long head = 0; head < num_heads; head++) {
            const float *gate = gates + (rows ? rows[row] : row) * row_stride + head * head_stride;
            float *y = x + (row * num_heads + head) * head_dim;
            for (long i = 0; i < head_dim; i += LANES) {
                float factor[LANES] = {0}, value[LANES] = {0};
                long count = head_dim - i < LANES ? head_dim - i : LANES;
                memcpy(factor, gate + i, count * sizeof(float));
                memcpy(value, y + i, count * sizeof(float));
                vec g = load(factor), v = load(value);
                ivec gone = g < splat(-80.0f);  // as for silu
                vec negated = (vec)((ivec)(-g) & ~gone);
                vec open = (vec)((ivec)(splat(1.0f) / (splat(1.0f) + exp_vec(negated))) & ~gone);
                store(value, (vec)((ivec)(v * open) & ~(v == splat(0.0f))));
                memcpy(y + i, value, count * sizeof(float));
            }
        }
    }
}

// In place, by the C library's functions; kinds as kernels/activation.py numbers them.
void holdfast_activate(float *x, long size, long kind) {
#pragma omp parallel for schedule(static) if (size >= ELEMENTS_PER_THREAD)
    for (long i = 0; i < size; i++) {
        float v = x[i];
        if (kind == 0)
            x[i] = v / (1.0f + expf(-v));
        else if (kind == 1)
            x[i] = 0.5f * v * erfcf(v * -0.70710678f);
        else
            x[i] = 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
    }
}

static inline void rotate_row(const float *x, const float *cosine, const float *sine, float *y, long half) {
    long i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec left = load(x + i), right = load(x + half + i);
        vec turn = load(cosine + i), side = load(sine + i);
        store(y + i, left * turn - right * side);
        store(y + half + i, right * turn + left * side);
    }
    for (; i < half; i++) {
        float left = x[i], right = x[half + i];
        y[i] = left * cosine[i] - right * sine[i];
        y[half + i] = right * cosine[i] + left * sine[i];
    }
}

// Rows of q | k | v: normalize and rotate query and key heads if given, store queries to q, keys and values to their slots.
// A row with a negative slot is padding: it stores nothing, and its queries are zeros. cosine and sine have a row of `num_pairs` for
// each: the first 2 num_pairs elements of a head rotate. Queries of a row lie `query_step` heads apart.
void holdfast_write_heads(const float *qkv, const int64_t *slots, const float *cosine, const float *sine,
                          const float *q_norm, const float *k_norm, float eps, float offset, float *q,
                          float *k_plane, float *v_plane, long num_rows, long num_heads, long num_kv_heads, long head_dim,
                          long num_pairs, long query_step) {
    long before_keys = query_step * num_heads, width = (before_keys + 2 * num_kv_heads) * head_dim;
#pragma omp parallel for schedule(static) if (num_rows >= ROWS_PER_THREAD)
    for (long row = 0; row < num_rows; row++) {
        if (slots[row] < 0) {
            memset(q + row * num_heads * head_dim, 0, num_heads * head_dim * sizeof(float));
            continue;
        }
        const float *source = qkv + row * width;
        const float *row_cosine = cosine ? cosine + row * num_pairs : 0;
        const float *row_sine = sine ? sine + row * num_pairs : 0;
        float *keys = k_plane + slots[row] * num_kv_heads * head_dim;
        for (long head = 0; head < num_heads + num_kv_heads; head++) {
            int is_query = head < num_heads;
            const float *x = source + (is_query ? query_step * head : before_keys + head - num_heads) * head_dim;
            float *y = is_query ? q + (row * num_heads + head) * head_dim : keys + (head - num_heads) * head_dim;
            float normed[head_dim];
            if (q_norm) {
                rms_row(x, is_query ? q_norm : k_norm, normed, head_dim, eps, offset);
                x = normed;
            }
            if (cosine) rotate_row(x, row_cosine, row_sine, y, num_pairs);
            long first_same = cosine ? 2 * num_pairs : 0;
            memcpy(y + first_same, x + first_same, (head_dim - first_same) * sizeof(float));
        }
        memcpy(v_plane + slots[row] * num_kv_heads * head_dim, source + (before_keys + num_kv_heads) * head_dim,
               num_kv_heads * head_dim * sizeof(float));
    }
}

// -inf if the bit of a token is 0; other logits do not change.
void holdfast_mask_logits(float *logits, const uint32_t *masks, long num_rows, long size) {
    long num_words = (size + 31) / 32;
#pragma omp parallel for schedule(static) if (num_rows >= ROWS_PER_THREAD / 4)
    for (long row = 0; row < num_rows; row++) {
        const uint32_t *words = masks + row * num_words;
        for (long word = 0; word < num_words; word++) {
            uint32_t bits = words[word];
            if (bits == UINT32_MAX) continue;
            float *x = logits + row * size + 32 * word;
            long count = size - 32 * word < 32 ? size - 32 * word : 32;
            for (long i = 0; i < count; i++) x[i] = (bits >> i) & 1 ? x[i] : -INFINITY;
        }
    }
}
