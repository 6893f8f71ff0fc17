// y[m][n] = sum over k of x[m][k] * w[n][k], plus bias[n], for weights of GGUF blocks in tiles of 16 rows.
//
// x is quantized first: 32 columns share a scale, and a code has eight bits. Order of an output, on every machine and for any
// number of rows: the products of 32 columns (16 with a scale of 16) are an integer sum; t = sum * scale, plus minimum * (sum
// of x's codes), by fma; y = fma(t, scale of x, y) block by block. Bias last.
#include <omp.h>

#include "kernels.h"
#include "packed_types.h"

#if LANES == 16
#define PANEL 8  // most rows of x that share registers with a tile
#else
#define PANEL 4
#endif
#define PART 32        // columns that share a scale of x
#define CHUNK_PARTS 8  // parts of a tile that are unpacked at a time: 6 KiB
#define MOST_ROWS 256  // rows of x whose sums lie on the stack
#define INPUT_BYTES (512 << 10)  // of quantized rows that pass a tile after another, from the L2 cache
#define FETCH_AHEAD 2048

// A panel of R rows of x, by parts: codes [R][32], scales [R], corrections [2][R] of each half or of the whole part.
// A correction is -offset * (sum of codes), an integer, or the sum of codes as a float for types with minima.
#define PART_BYTES 44  // of a row

typedef struct {
    uint8_t codes[8][TILE_ROWS * 4];
    float scales[2][TILE_ROWS], minima[2][TILE_ROWS];
} unpacked;

static inline long rows_of_panel(long rows) { return rows >= 8 && PANEL == 8 ? 8 : rows >= 4 ? 4 : rows >= 2 ? 2 : 1; }

// One part of a row. Not finite: its scale is NaN, and so is everything that it reaches.
static void quantize_part(const float *restrict x, int8_t *restrict codes, float *scale, int32_t *sums) {
    int32_t bits[PART], largest = 0, numbers[PART];
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < PART; i++) {
        int32_t size = bits[i] & 0x7FFFFFFF;
        largest = size > largest ? size : largest;
    }
    float amax, factor;
    memcpy(&amax, &largest, 4);
    factor = 127.0f / amax;
    int is_finite = largest < 0x7F800000;
    *scale = is_finite ? amax / 127.0f : NAN;
    if (!is_finite || factor > 0x1p126f) {  // nothing, or so little that its codes would overflow
        memset(codes, 0, PART);
        sums[0] = sums[1] = 0;
        if (is_finite) *scale = 0.0f;
        return;
    }
    for (int i = 0; i < PART; i++) {
        float shifted = x[i] * factor + 12582912.0f;  // 1.5 * 2^23: the low bits are the number, ties to even
        memcpy(numbers + i, &shifted, 4);
    }
    for (int i = 0; i < PART; i++) numbers[i] -= 0x4B400000;
    for (int i = 0; i < PART; i++) codes[i] = (int8_t)numbers[i];
    int32_t first = 0, second = 0;
    for (int i = 0; i < PART / 2; i++) first += numbers[i], second += numbers[PART / 2 + i];
    sums[0] = first, sums[1] = second;
}

// Parts [start, end) of a panel of rows.
static void quantize_panel(const float *x, uint8_t *panel, long rows, long k_size, long start, long end,
                           const struct block_traits *traits) {
    for (long part = start; part < end; part++) {
        uint8_t *to = panel + part * rows * PART_BYTES;
        float *scales = (float *)(to + rows * PART);
        int32_t *corrections = (int32_t *)(scales + rows);
        for (long i = 0; i < rows; i++) {
            int32_t sums[2];
            quantize_part(x + i * k_size + part * PART, (int8_t *)to + i * PART, scales + i, sums);
            if (traits->step == 32) sums[0] += sums[1];
            for (int half = 0; half < 2; half++) {
                float number = (float)sums[half];
                int32_t integer = -traits->offset * sums[half];
                memcpy(corrections + half * rows + i, traits->has_min ? (void *)&number : (void *)&integer, 4);
            }
        }
    }
}

INLINE ivec splat_integer(const void *p) {
    int32_t value;
    memcpy(&value, p, 4);
    return value + (ivec){0};
}

INLINE vec splat_float(const void *p) {
    float value;
    memcpy(&value, p, 4);
    return splat(value);
}

// Products of a part for one row and one vector of a tile, scaled: two sums of 16 columns or one of 32.
INLINE vec scaled_sums(const words *w, const vec *scales, const vec *minima, codes16 low, codes16 high,
                       const uint8_t *corrections, long rows, const int step, const int has_min, const int bits) {
    ivec start = has_min ? (ivec){0} : splat_integer(corrections), sums = add_dots(start, w, low, bits);
    if (step == 32) {
        vec t = to_floats(add_dots(sums, w + 4, high, bits)) * scales[0];
        return has_min ? multiply_add(minima[0], splat_float(corrections), t) : t;
    }
    const uint8_t *second = corrections + 4 * rows;
    start = has_min ? (ivec){0} : splat_integer(second);
    vec t = multiply_add(to_floats(add_dots(start, w + 4, high, bits)), scales[1], to_floats(sums) * scales[0]);
    if (!has_min) return t;
    return multiply_add(minima[1], splat_float(second), multiply_add(minima[0], splat_float(corrections), t));
}

// A lone row and one tile: codes go from memory to products in registers.
INLINE void lone_row(const enum block_type type, const uint8_t *tile, const uint8_t *x, long num_blocks, vec *y) {
    const struct block_traits traits = TRAITS[type];
    const int parts = traits.elements / PART, halves = PART / traits.step;
    const long block_bytes = (long)traits.bytes * TILE_ROWS;
    vec sums[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) sums[v] = splat(0.0f);
    for (long block = 0; block < num_blocks; block++, tile += block_bytes) {
        UNROLL for (int part = 0; part < parts; part++, x += PART_BYTES) {
            for (long line = block_bytes * part / parts; line < block_bytes * (part + 1) / parts; line += 64)
                __builtin_prefetch(tile + FETCH_AHEAD + line);
            codes16 low = load_codes((const int8_t *)x), high = load_codes((const int8_t *)x + 16);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                words w[8];
                vec scales[2], minima[2];
                unpack_codes(type, tile, part, v, w);
                UNROLL for (int half = 0; half < halves; half++) {
                    scales[half] = unpack_scales(type, tile, part, half, v);
                    if (traits.has_min) minima[half] = unpack_minima(type, tile, part, half, v);
                }
                vec t = scaled_sums(w, scales, minima, low, high, x + PART + 4, 1, traits.step, traits.has_min, traits.bits);
                sums[v] = multiply_add(t, splat_float(x + PART), sums[v]);
            }
        }
    }
    UNROLL for (int v = 0; v < VECTORS; v++) y[v] = sums[v];
}

// Parts [part, part + count) of a tile, for many rows of x.
INLINE void unpack_part(const enum block_type type, const uint8_t *block, const int part, unpacked *out) {
    const struct block_traits traits = TRAITS[type];
    UNROLL for (int v = 0; v < VECTORS; v++) {
        words w[8];
        unpack_codes(type, block, part, v, w);
        UNROLL for (int g = 0; g < 8; g++) *(loose_words *)(out->codes[g] + v * LANES * 4) = w[g];
        UNROLL for (int half = 0; half < PART / traits.step; half++) {
            store(out->scales[half] + v * LANES, unpack_scales(type, block, part, half, v));
            if (traits.has_min) store(out->minima[half] + v * LANES, unpack_minima(type, block, part, half, v));
        }
    }
}

INLINE void unpack_parts(const enum block_type type, const uint8_t *tile, long first, long count, unpacked *out) {
    const long block_bytes = (long)TRAITS[type].bytes * TILE_ROWS;
    if (TRAITS[type].elements == PART) {
        for (long i = 0; i < count; i++) unpack_part(type, tile + (first + i) * block_bytes, 0, out + i);
        return;
    }
    UNROLL for (int part = 0; part < CHUNK_PARTS; part++)
        unpack_part(type, tile + first / CHUNK_PARTS * block_bytes, part, out + part);
}

// Continue the sums of a panel of rows over some unpacked parts; vectors [v, v + 1) of the tile.
INLINE void add_panel(const int rows, const int step, const int has_min, const int bits, const unpacked *parts, long count,
                      const uint8_t *x, float *y, const int v) {
    vec sums[PANEL];
    UNROLL for (int i = 0; i < rows; i++) sums[i] = load(y + i * TILE_ROWS + v * LANES);
    for (long part = 0; part < count; part++, parts++, x += rows * PART_BYTES) {
        words w[8];
        vec scales[2], minima[2];
        UNROLL for (int g = 0; g < 8; g++) w[g] = load_words(parts->codes[g] + v * LANES * 4);
        UNROLL for (int half = 0; half < PART / step; half++) {
            scales[half] = load(parts->scales[half] + v * LANES);
            if (has_min) minima[half] = load(parts->minima[half] + v * LANES);
        }
        UNROLL for (int i = 0; i < rows; i++) {
            const int8_t *codes = (const int8_t *)x + i * PART;
            const uint8_t *corrections = x + rows * (PART + 4) + 4 * i;
            vec t = scaled_sums(w, scales, minima, load_codes(codes), load_codes(codes + 16), corrections, rows, step,
                                has_min, bits);
            sums[i] = multiply_add(t, splat_float(x + rows * PART + 4 * i), sums[i]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) store(y + i * TILE_ROWS + v * LANES, sums[i]);
}

typedef void panel_function(const unpacked *parts, long count, const uint8_t *x, float *y);
#define DEFINE_PANEL(NAME, ROWS, STEP, HAS_MIN, BITS)                                                                   \
    static void NAME##_##ROWS(const unpacked *parts, long count, const uint8_t *x, float *y) {                          \
        UNROLL for (int v = 0; v < VECTORS; v++) add_panel(ROWS, STEP, HAS_MIN, BITS, parts, count, x, y, v);           \
    }
#if PANEL == 8
#define DEFINE_PANEL_8(...) DEFINE_PANEL(__VA_ARGS__)
#define PANELS(NAME) {[1] = NAME##_1, [2] = NAME##_2, [4] = NAME##_4, [8] = NAME##_8}
#else
#define DEFINE_PANEL_8(...)
#define PANELS(NAME) {[1] = NAME##_1, [2] = NAME##_2, [4] = NAME##_4}
#endif
#define DEFINE_PANELS(NAME, ...)                                                                                        \
    DEFINE_PANEL(NAME, 1, __VA_ARGS__) DEFINE_PANEL(NAME, 2, __VA_ARGS__) DEFINE_PANEL(NAME, 4, __VA_ARGS__)           \
    DEFINE_PANEL_8(NAME, 8, __VA_ARGS__)                                                                                \
    static panel_function *const NAME##_panels[9] = PANELS(NAME);
DEFINE_PANELS(plain, 32, 0, 5)
DEFINE_PANELS(wide, 32, 0, 8)
DEFINE_PANELS(shifted, 32, 1, 5)
DEFINE_PANELS(fine, 16, 0, 6)
DEFINE_PANELS(fine_shifted, 16, 1, 5)

struct type_functions {
    void (*lone_row)(const uint8_t *tile, const uint8_t *x, long num_blocks, vec *y);
    void (*unpack)(const uint8_t *tile, long first, long count, unpacked *out);
    panel_function *const *panels;
};
#define DEFINE_TYPE(TYPE)                                                                                               \
    static void lone_##TYPE(const uint8_t *tile, const uint8_t *x, long num_blocks, vec *y) {                           \
        lone_row(TYPE, tile, x, num_blocks, y);                                                                         \
    }                                                                                                                   \
    static void unpack_##TYPE(const uint8_t *tile, long first, long count, unpacked *out) {                             \
        unpack_parts(TYPE, tile, first, count, out);                                                                    \
    }
DEFINE_TYPE(Q4_0) DEFINE_TYPE(Q4_1) DEFINE_TYPE(Q5_0) DEFINE_TYPE(Q5_1) DEFINE_TYPE(Q8_0) DEFINE_TYPE(IQ4_NL)
DEFINE_TYPE(MXFP4) DEFINE_TYPE(Q2_K) DEFINE_TYPE(Q3_K) DEFINE_TYPE(Q4_K) DEFINE_TYPE(Q5_K) DEFINE_TYPE(Q6_K)
DEFINE_TYPE(IQ4_XS)
#define FUNCTIONS(TYPE, NAME) [TYPE] = {lone_##TYPE, unpack_##TYPE, NAME##_panels}
static const struct type_functions FUNCTIONS[NUM_TYPES] = {
    FUNCTIONS(Q4_0, plain),   FUNCTIONS(Q4_1, shifted), FUNCTIONS(Q5_0, plain),        FUNCTIONS(Q5_1, shifted),
    FUNCTIONS(Q8_0, wide),    FUNCTIONS(IQ4_NL, wide),  FUNCTIONS(MXFP4, plain),       FUNCTIONS(Q2_K, fine_shifted),
    FUNCTIONS(Q3_K, fine),    FUNCTIONS(Q4_K, shifted), FUNCTIONS(Q5_K, shifted),      FUNCTIONS(Q6_K, fine),
    FUNCTIONS(IQ4_XS, wide),
};

struct product {
    const struct type_functions *functions;
    const uint8_t *tiles, *x;  // x: panels
    const float *bias;
    float *y;
    long ldy, m_size, n_size, num_parts, num_blocks, tile_bytes;
};

static void store_outputs(const struct product *p, const float *sums, long row, long tile) {
    long first = tile * TILE_ROWS, count = p->n_size - first < TILE_ROWS ? p->n_size - first : TILE_ROWS;
    float *y = p->y + row * p->ldy + first;
    if (p->bias)
        for (long n = 0; n < count; n++) y[n] = sums[n] + p->bias[first + n];
    else
        memcpy(y, sums, count * sizeof(float));
}

// Rows [start, end) of x, which begin with a panel, and one tile.
static void multiply_rows(const struct product *p, long start, long end, long tile) {
    unpacked parts[CHUNK_PARTS];
    float sums[MOST_ROWS * TILE_ROWS];
    memset(sums, 0, (end - start) * TILE_ROWS * sizeof(float));
    for (long first = 0; first < p->num_parts; first += CHUNK_PARTS) {
        long count = p->num_parts - first < CHUNK_PARTS ? p->num_parts - first : CHUNK_PARTS, rows;
        p->functions->unpack(p->tiles + tile * p->tile_bytes, first, count, parts);
        for (long row = start; row < end; row += rows) {
            rows = rows_of_panel(end - row);
            const uint8_t *x = p->x + (row * p->num_parts + first * rows) * PART_BYTES;
            p->functions->panels[rows](parts, count, x, sums + (row - start) * TILE_ROWS);
        }
    }
    for (long row = start; row < end; row++) store_outputs(p, sums + (row - start) * TILE_ROWS, row, tile);
}

// Rows of x that stay in the cache while all tiles pass.
static long rows_of_block(long num_parts) {
    long rows = INPUT_BYTES / (num_parts * PART_BYTES) / PANEL * PANEL;
    return rows < PANEL ? PANEL : rows > MOST_ROWS ? MOST_ROWS : rows;
}

// `scratch` holds PART_BYTES for every 32 columns of every row.
void holdfast_packed_linear(const float *x, const uint8_t *tiles, const float *bias, float *y, uint8_t *scratch, long type,
                            long m_size, long n_size, long k_size, long ldy) {
    const struct block_traits traits = TRAITS[type];
    long num_parts = k_size / PART, num_tiles = (n_size + TILE_ROWS - 1) / TILE_ROWS;
    long num_blocks = k_size / traits.elements, block_rows = rows_of_block(num_parts);
    struct product p = {FUNCTIONS + type, tiles,     scratch,   bias,       y, ldy, m_size, n_size,
                        num_parts,        num_blocks, num_blocks * traits.bytes * TILE_ROWS};
    long jobs_of_panel = (num_parts + CHUNK_PARTS - 1) / CHUNK_PARTS, num_panels = (m_size + PANEL - 1) / PANEL;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long job = 0; job < num_panels * jobs_of_panel; job++) {
            long row = job / jobs_of_panel * PANEL, start = job % jobs_of_panel * CHUNK_PARTS, rows;
            long row_end = row + PANEL < m_size ? row + PANEL : m_size;
            long end = start + CHUNK_PARTS < num_parts ? start + CHUNK_PARTS : num_parts;
            for (; row < row_end; row += rows) {
                rows = rows_of_panel(row_end - row);
                quantize_panel(x + row * k_size, scratch + row * num_parts * PART_BYTES, rows, k_size, start, end, &traits);
            }
        }
        for (long row = 0; row < m_size; row += block_rows) {
            long row_end = row + block_rows < m_size ? row + block_rows : m_size;
#pragma omp for schedule(static) nowait
            for (long tile = 0; tile < num_tiles; tile++) {
                if (m_size > 1) {
                    multiply_rows(&p, row, row_end, tile);
                    continue;
                }
                vec sums[VECTORS];
                p.functions->lone_row(tiles + tile * p.tile_bytes, scratch, num_blocks, sums);
                store_outputs(&p, (const float *)sums, 0, tile);
            }
        }
    }
}
