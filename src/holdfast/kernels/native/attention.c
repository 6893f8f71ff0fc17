// Attention of rows to the stored keys and values of their sequence, straight over the pages.
//
// A task is a few rows of one sequence with the query heads of one key/value head, or some of them if there are many; a row and
// a query head are a query. The task walks the sequence's tokens in tiles that start at multiples of TILE, with an online softmax
// (m is the running maximum, l the running sum, alpha rescales them). So a query's result depends on its position and the tokens
// before it, never on how the prompt was cut into steps. A sink is a score without a value: m and l begin with it.
#include <omp.h>

#include "kernels.h"
#include "vector.h"

#define TILE 64
#define TASK_QUERIES 96
#define MR 4
#define NR 4

typedef struct {
    const float *q, *k_plane, *v_plane;
    float *out;
    const int32_t *pages;
    const float *sinks;  // of each query head; NULL: none
    long num_heads, num_kv_heads, head_dim, page_tokens, window;
    float scale, softcap;  // softcap 0: none
} problem;

typedef struct {
    int64_t row, num_rows, start, first_page;  // rows of the step; position of the first; where its pages begin in `pages`
} sequence;

// scores[r][t] = q[r] . key[t]. Rows and tokens after the last repeat an earlier one; their results are unused.
static void score_tile(const float *q, const float *const *keys, float *scores, long num_queries, long num_tokens,
                       long head_dim) {
    for (long r = 0; r < num_queries; r += MR) {
        const float *query[MR];
        UNROLL for (int i = 0; i < MR; i++) query[i] = q + (r + i < num_queries ? r + i : r) * head_dim;
        for (long t = 0; t < num_tokens; t += NR) {
            const float *key[NR];
            UNROLL for (int j = 0; j < NR; j++) key[j] = keys[t + j < num_tokens ? t + j : t];
            vec sums[MR][NR];
            UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NR; j++) sums[i][j] = splat(0.0f);
            long d = 0;
            for (; d + LANES <= head_dim; d += LANES) {
                vec loaded[NR];
                UNROLL for (int j = 0; j < NR; j++) loaded[j] = load(key[j] + d);
                UNROLL for (int i = 0; i < MR; i++) {
                    vec input = load(query[i] + d);
                    UNROLL for (int j = 0; j < NR; j++) sums[i][j] = multiply_add(input, loaded[j], sums[i][j]);
                }
            }
            UNROLL for (int i = 0; i < MR; i++) {
                if (r + i >= num_queries) break;
                float *out = scores + (r + i) * TILE + t;
                store_sums4(out, sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
                for (int j = 0; j < NR && d < head_dim; j++)
                    for (long e = d; e < head_dim; e++) out[j] = fmaf(query[i][e], key[j][e], out[j]);
            }
        }
    }
}

// acc[r] += sum over t of p[r][t] * value[t], MR queries and NR vectors of the head at a time.
static void add_values(const float *p, const float *const *values, float *acc, long num_queries, long num_tokens,
                       long head_dim) {
    for (long r = 0; r < num_queries; r += MR) {
        long queries = num_queries - r < MR ? num_queries - r : MR, d = 0;
        const float *p_row[MR];
        UNROLL for (int i = 0; i < MR; i++) p_row[i] = p + (r + (i < queries ? i : 0)) * TILE;
        for (; d + NR * LANES <= head_dim; d += NR * LANES) {
            vec total[MR][NR];
            UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NR; j++)
                total[i][j] = load(acc + (r + (i < queries ? i : 0)) * head_dim + d + j * LANES);
            for (long t = 0; t < num_tokens; t++) {
                vec value[NR];
                UNROLL for (int j = 0; j < NR; j++) value[j] = load(values[t] + d + j * LANES);
                UNROLL for (int i = 0; i < MR; i++) {
                    float p_rt = p_row[i][t];
                    UNROLL for (int j = 0; j < NR; j++) total[i][j] = multiply_add_by(value[j], p_rt, total[i][j]);
                }
            }
            UNROLL for (int i = 0; i < MR; i++) {
                if (i >= queries) break;
                UNROLL for (int j = 0; j < NR; j++) store(acc + (r + i) * head_dim + d + j * LANES, total[i][j]);
            }
        }
        for (int i = 0; i < queries && d < head_dim; i++)
            for (long e = d; e < head_dim; e++) {
                float s = acc[(r + i) * head_dim + e];
                for (long t = 0; t < num_tokens; t++) s = fmaf(p_row[i][t], values[t][e], s);
                acc[(r + i) * head_dim + e] = s;
            }
    }
}

// cap * tanh(x / cap): by its series near zero, to avoid cancellation; NaN stays NaN.
static inline vec soft_cap(vec score, float cap) {
    vec x = score / splat(cap), size = (vec)((ivec)x & 0x7fffffff), x2 = x * x;
    vec e = exp_vec(size * splat(-2.0f)), closed = (splat(1.0f) - e) / (splat(1.0f) + e);
    vec high = multiply_add(x2, splat(62.0f / 2835), splat(-17.0f / 315));
    vec middle = multiply_add(x2, multiply_add(x2, high, splat(2.0f / 15)), splat(-1.0f / 3));
    vec series = multiply_add(size * x2, middle, size);
    ivec near = size < splat(0.25f), sign = (ivec)x & ~0x7fffffff;
    return splat(cap) * (vec)(((ivec)series & near) | ((ivec)closed & ~near) | sign);
}

// One query in one tile: scores of tokens [low, high) become p, all others 0; update m, l and acc.
static void online_softmax(float *scores, long low, long high, float cap, float *m, float *l, float *acc, long head_dim) {
    if (cap > 0.0f) {
        for (long t = high; t < TILE; t++) scores[t] = 0.0f;  // not written yet
        for (long t = 0; t < TILE; t += LANES) store(scores + t, soft_cap(load(scores + t), cap));
    }
    for (long t = 0; t < low; t++) scores[t] = -INFINITY;
    for (long t = high; t < TILE; t++) scores[t] = -INFINITY;
    vec highest = load(scores);
    UNROLL for (long t = LANES; t < TILE; t += LANES) highest = max_vec(highest, load(scores + t));
    float new_m = max_lanes(highest);
    if (new_m > *m) {
        float alpha = exp_vec(splat(*m - new_m))[0];
        long d = 0;
        for (; d + LANES <= head_dim; d += LANES) store(acc + d, load(acc + d) * splat(alpha));
        for (; d < head_dim; d++) acc[d] *= alpha;
        *l *= alpha;
        *m = new_m;
    }
    vec total = splat(0.0f), shift = splat(*m);
    for (long t = 0; t < TILE; t += 2 * LANES) {  // two at a time, to hide latency
        vec left = exp_vec(load(scores + t) - shift), right = exp_vec(load(scores + t + LANES) - shift);
        store(scores + t, left);
        store(scores + t + LANES, right);
        total += left + right;
    }
    *l += sum_lanes(total);
}

// Rows [first, first + count) of the step's part of a sequence, and query heads [head, head + group) of a key/value head.
static void attend(const problem *p, const sequence *s, long first, long count, long kv_head, long head, long group) {
    long head_dim = p->head_dim, num_queries = count * group;
    float q[num_queries * head_dim], acc[num_queries * head_dim], scores[num_queries * TILE];
    float m[num_queries], l[num_queries], zeros[head_dim];
    for (long r = 0; r < num_queries; r++) {
        const float *row = p->q + ((s->row + first + r / group) * p->num_heads + head + r % group) * head_dim;
        for (long d = 0; d < head_dim; d++) q[r * head_dim + d] = row[d] * p->scale;
        m[r] = p->sinks ? p->sinks[head + r % group] : -INFINITY, l[r] = p->sinks ? 1.0f : 0.0f;
    }
    memset(acc, 0, num_queries * head_dim * sizeof(float));
    memset(zeros, 0, head_dim * sizeof(float));

    long position = s->start + first, end = position + count;
    long lowest = p->window > 0 && position - p->window + 1 > 0 ? position - p->window + 1 : 0;
    for (long tile = lowest / TILE * TILE; tile < end; tile += TILE) {
        long num_tokens = end - tile < TILE ? end - tile : TILE;
        const float *keys[TILE], *values[TILE];
        // A tile may begin before the first visible token. Pages there may belong to other sequences and hold NaN, which a p
        // of 0 does not remove: read zeros instead. All later pages belong to the sequence, because a step frees only pages
        // that none of its rows sees.
        long hidden = lowest > tile ? lowest - tile : 0;
        for (long t = 0; t < hidden; t++) keys[t] = values[t] = zeros;
        for (long t = hidden; t < num_tokens; t++) {
            long page = p->pages[s->first_page + (tile + t) / p->page_tokens];
            long offset = ((page * p->page_tokens + (tile + t) % p->page_tokens) * p->num_kv_heads + kv_head) * head_dim;
            keys[t] = p->k_plane + offset;
            values[t] = p->v_plane + offset;
        }
        // Rows before the tile see none of it.
        long row = tile > position ? tile - position : 0, skipped = row * group, queries = num_queries - skipped;
        score_tile(q + skipped * head_dim, keys, scores + skipped * TILE, queries, num_tokens, head_dim);
        for (long r = skipped; r < num_queries; r++) {
            long own = position + r / group;
            long low = p->window > 0 && own - p->window + 1 > tile ? own - p->window + 1 - tile : 0;
            long high = own + 1 - tile < num_tokens ? own + 1 - tile : num_tokens;
            if (low >= high)  // the window has left the tile
                memset(scores + r * TILE, 0, TILE * sizeof(float));
            else
                online_softmax(scores + r * TILE, low, high, p->softcap, m + r, l + r, acc + r * head_dim, head_dim);
        }
        // A row that sees a part of the tile goes alone and stops at its own token: a p of 0 does not remove a later value
        // that is not finite. The others go together.
        for (; position + row + 1 < tile + num_tokens; row++)
            add_values(scores + row * group * TILE, values, acc + row * group * head_dim, group, position + row + 1 - tile,
                       head_dim);
        skipped = row * group;
        add_values(scores + skipped * TILE, values, acc + skipped * head_dim, num_queries - skipped, num_tokens, head_dim);
    }
    for (long r = 0; r < num_queries; r++) {
        float *out = p->out + ((s->row + first + r / group) * p->num_heads + head + r % group) * head_dim;
        for (long d = 0; d < head_dim; d++) out[d] = acc[r * head_dim + d] / l[r];
    }
}

void holdfast_paged_attention(const float *q, const float *k_plane, const float *v_plane, float *out, const int32_t *pages,
                              const int64_t *sequences, const float *sinks, long num_sequences, long num_heads,
                              long num_kv_heads, long head_dim, long page_tokens, long window, float scale, float softcap) {
    problem p = {q, k_plane, v_plane, out, pages, sinks, num_heads, num_kv_heads, head_dim, page_tokens, window, scale, softcap};
    long group = num_heads / num_kv_heads;
    long most_rows = TASK_QUERIES / group > 0 ? TASK_QUERIES / group : 1;
    long heads_per_task = group < TASK_QUERIES ? group : TASK_QUERIES, parts = (group + heads_per_task - 1) / heads_per_task;
    long tasks_per_block = num_kv_heads * parts;
    const sequence *all = (const sequence *)sequences;
#pragma omp parallel
    for (long i = 0; i < num_sequences; i++) {
        // Cut a short chunk of a prompt further, so that every thread has tasks.
        long least_blocks = (2 * omp_get_num_threads() + tasks_per_block - 1) / tasks_per_block;
        long rows_per_task = (all[i].num_rows + least_blocks - 1) / least_blocks;
        if (rows_per_task < MR) rows_per_task = MR;
        if (rows_per_task > most_rows) rows_per_task = most_rows;
        long num_blocks = (all[i].num_rows + rows_per_task - 1) / rows_per_task;
#pragma omp for schedule(dynamic, 1) nowait
        for (long task = 0; task < num_blocks * tasks_per_block; task++) {
            // The last rows see the most tokens: run them first, so that no thread ends with the longest task.
            long first = (num_blocks - 1 - task / tasks_per_block) * rows_per_task, rest = all[i].num_rows - first;
            long kv_head = task % num_kv_heads, part = task % tasks_per_block / num_kv_heads * heads_per_task;
            long heads = group - part < heads_per_task ? group - part : heads_per_task;
            attend(&p, all + i, first, rest < rows_per_task ? rest : rows_per_task, kv_head, kv_head * group + part, heads);
        }
    }
}
