// One plane of packed rows into its place in tiles of 16 interleaved rows.

#include <stdint.h>
#include <string.h>

#define TILE_ROWS 16

// Bit 4g + i to bit g of byte i: then one shift takes the fifth bits of four columns to their codes.
static uint32_t by_byte(uint32_t bits) {
    uint32_t out = 0;
    for (int i = 0; i < 4; i++)
        for (int g = 0; g < 8; g++) out |= (bits >> (4 * g + i) & 1) << (8 * i + g);
    return out;
}

// One block of 16 rows, which lie `stride` bytes apart: stores are in order, and loads of a row too.
#define DEFINE_SPREAD(UNIT)                                                                                             \
    static void spread_##UNIT(const unsigned char *from, unsigned char *to, long bytes, long stride) {                  \
        for (long i = 0; i < bytes; i += UNIT, to += UNIT * TILE_ROWS)                                                  \
            _Pragma("GCC unroll 16") for (long row = 0; row < TILE_ROWS; row++)                                         \
                memcpy(to + row * UNIT, from + row * stride + i, UNIT);                                                 \
    }
DEFINE_SPREAD(1)
DEFINE_SPREAD(2)
DEFINE_SPREAD(4)

static void spread_bits(const unsigned char *from, unsigned char *to, long stride) {
    for (long row = 0; row < TILE_ROWS; row++) {
        uint32_t bits;
        memcpy(&bits, from + row * stride, 4);
        bits = by_byte(bits);
        memcpy(to + 4 * row, &bits, 4);
    }
}

// `plane` has `bytes` a block for `num_blocks` blocks of each row, in whole groups of 16 rows; `tiles` points to the plane in
// the first tile block. Unit -4: words whose bits are also permuted.
void holdfast_interleave(const unsigned char *plane, unsigned char *tiles, long num_rows, long num_blocks, long bytes,
                         long unit, long block_bytes) {
    long stride = num_blocks * bytes;
    for (long row = 0; row < num_rows; row += TILE_ROWS, plane += (TILE_ROWS - 1) * stride) {
        for (long block = 0; block < num_blocks; block++, plane += bytes, tiles += block_bytes) {
            if (unit == 4) spread_4(plane, tiles, bytes, stride);
            else if (unit == 2) spread_2(plane, tiles, bytes, stride);
            else if (unit == 1) spread_1(plane, tiles, bytes, stride);
            else spread_bits(plane, tiles, stride);
        }
    }
}
