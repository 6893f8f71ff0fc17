// A whole decoder layer in one call: RMSNorm, fused projection, heads into pages, attention, output projection, RMSNorm, MLP.
//
// It calls the kernels that the layer's parts call one by one, on the same buffers, so its bits are theirs. The structs are
// those of families/grouped/native_layer.py.
#include <string.h>

#include "kernels.h"

#define PART_BYTES 44   // of 32 quantized columns of a row (packed_linear.c)
#define PART_COLUMNS 32
#define MOST_PARTS 4

enum product_kind { PLAIN, QUANTIZED, TILES, TILES_FULL };

// Rows [first, first + num_rows) of a weight, stored in one way.
struct part {
    int64_t kind, type, first, num_rows;
    const void *codes, *scales;
    int64_t block_rows, block_columns;
};

struct product {
    int64_t num_parts, num_rows, num_columns;
    const float *bias;
    struct part parts[MOST_PARTS];
};

struct norm {
    const float *weight;
    double eps, offset;
};

struct layer {
    struct norm attn_norm, mlp_norm;
    struct product qkv, o, gate_up, down;
    const float *q_norm, *k_norm;
    double head_eps, head_offset;
    const float *cosine, *sine, *sinks;
    float *k_plane, *v_plane;
    int64_t group, num_heads, num_kv_heads, head_dim, num_pairs, page_tokens, window;
    double scale, softcap;
};

// Slots and pages of a cache group.
struct places {
    const int64_t *slots;
    const int32_t *pages;
    const int64_t *sequences;
    int64_t num_sequences;
};

struct step {
    int64_t num_rows;
    float *x, *normed, *delta, *qkv, *q, *attended, *wide, *active;
    uint8_t *room;
    int64_t room_bytes;
    const struct places *groups;
};

static void multiply(const struct product *p, const struct step *s, const float *x, float *y) {
    long m = s->num_rows, n = p->num_rows, k = p->num_columns;
    for (long i = 0; i < p->num_parts; i++) {
        const struct part *part = p->parts + i;
        const float *bias = p->bias ? p->bias + part->first : 0;
        if (part->kind == PLAIN)
            holdfast_linear(x, part->codes, bias, y, m, n, k);
        else if (part->kind == QUANTIZED)
            holdfast_quantized_linear(x, part->codes, part->scales, bias, y, m, n, k, part->type, part->block_rows,
                                      part->block_columns);
        else if (part->kind == TILES_FULL)
            holdfast_packed_linear_full(x, part->codes, bias, y + part->first, part->type, m, part->num_rows, k, n);
        else {
            long step = s->room_bytes / (k / PART_COLUMNS * PART_BYTES);
            for (long row = 0; row < m; row += step)
                holdfast_packed_linear(x + row * k, part->codes, bias, y + row * n + part->first, s->room, part->type,
                                       m - row < step ? m - row : step, part->num_rows, k, n);
        }
    }
}

static void add_norm(const struct norm *norm, const struct step *s, long size, int has_delta) {
    holdfast_add_rms_norm(s->x, has_delta ? s->delta : 0, norm->weight, s->normed, s->num_rows, size, (float)norm->eps,
                          (float)norm->offset);
}

// Leaves the residual stream in x, and in delta what the next norm adds to it.
void holdfast_layer(const struct layer *layer, const struct step *s, long has_delta) {
    const struct places *places = s->groups + layer->group;
    long hidden = layer->qkv.num_columns;
    add_norm(&layer->attn_norm, s, hidden, has_delta);
    multiply(&layer->qkv, s, s->normed, s->qkv);
    holdfast_write_heads(s->qkv, places->slots, layer->cosine, layer->sine, layer->q_norm, layer->k_norm,
                         (float)layer->head_eps, (float)layer->head_offset, s->q, layer->k_plane, layer->v_plane,
                         s->num_rows, layer->num_heads, layer->num_kv_heads, layer->head_dim, layer->num_pairs, 1);
    holdfast_paged_attention(s->q, layer->k_plane, layer->v_plane, s->attended, places->pages, places->sequences,
                             layer->sinks, places->num_sequences, layer->num_heads, layer->num_kv_heads, layer->head_dim,
                             layer->page_tokens, layer->window, (float)layer->scale, (float)layer->softcap);
    multiply(&layer->o, s, s->attended, s->delta);
    add_norm(&layer->mlp_norm, s, hidden, 1);
    multiply(&layer->gate_up, s, s->normed, s->wide);
    holdfast_silu_mul(s->wide, s->active, s->num_rows, layer->down.num_columns);
    multiply(&layer->down, s, s->active, s->delta);
}
