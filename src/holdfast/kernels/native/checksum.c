// Checksums of saved weights: the sum that kernels/load/checksum.py describes, over a piece of a plane that begins anywhere.

#include <stdint.h>
#include <string.h>

#define BLOCK_WORDS 4096
#define BLOCK_BYTES (4 * BLOCK_WORDS)

static uint32_t mixed(uint32_t value) {
    value = (value ^ value >> 16) * 0x85EBCA6Bu;
    value = (value ^ value >> 13) * 0xC2B2AE35u;
    return value ^ value >> 16;
}

static uint64_t block_key(uint64_t block) {
    return (uint64_t)mixed((uint32_t)(2 * block + 1)) << 32 | mixed((uint32_t)(2 * block + 2)) | 1;
}

// Whole words of one block.
static uint64_t sum_words(const unsigned char *bytes, const uint32_t *keys, long num_words) {
    uint64_t sum = 0;
    for (long i = 0; i < num_words; i++) {
        uint32_t word;
        memcpy(&word, bytes + 4 * i, 4);
        sum += (uint64_t)word * keys[i];
    }
    return sum;
}

static uint64_t sum_bytes(const unsigned char *bytes, const uint32_t *keys, long place, long end) {
    uint64_t sum = 0;
    for (; place < end; place++) sum += ((uint64_t)*bytes++ << 8 * (place % 4)) * keys[place / 4];
    return sum;
}

void holdfast_add_checksum(const unsigned char *bytes, long num_bytes, long first_byte, int64_t *sum) {
    uint32_t keys[BLOCK_WORDS];
    uint64_t total = 0;
    for (uint32_t i = 0; i < BLOCK_WORDS; i++) keys[i] = mixed(i + 1);
    long end = first_byte + num_bytes;
    for (long start = first_byte; start < end;) {
        long block = start / BLOCK_BYTES, place = start - block * BLOCK_BYTES;
        long stop = end - block * BLOCK_BYTES;
        if (stop > BLOCK_BYTES) stop = BLOCK_BYTES;
        // The rest of a word, whole words, and the start of the last one.
        long low = (place + 3) / 4 * 4, high = stop / 4 * 4;
        if (low > stop) low = stop;
        if (high < low) high = low;
        uint64_t part = sum_bytes(bytes, keys, place, low);
        part += sum_words(bytes + (low - place), keys + low / 4, (high - low) / 4);
        part += sum_bytes(bytes + (high - place), keys, high, stop);
        total += part * block_key((uint64_t)block);
        bytes += stop - place;
        start += stop - place;
    }
    *sum = (int64_t)((uint64_t)*sum + total);
}
