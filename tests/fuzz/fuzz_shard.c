/* A safetensors file: the whole file is the input. */
#include "fuzz.h"
#include "mutate.h"

#include "io/shard.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fb_error    err;
    fb_shard   *s = NULL;
    const char *path = fuzz_file(data, size);
    fb_status   st = fb_shard_open(&s, path, &err);
    if (st != FB_OK) {
        FUZZ_REQUIRE(!s, "a handle in spite of: %s", err.msg);
        fuzz_refused(st, FB_INPUT, &err, path);
        return 0;
    }
    uint64_t total = 0;
    for (uint32_t i = 0; i < fb_shard_count(s); i++) {
        const fb_tensor *t = fb_shard_at(s, i);
        uint64_t         bytes = fb_dtype_size(t->dtype);
        FUZZ_REQUIRE(t->rank <= FB_RANK_MAX, "rank %u", t->rank);
        for (uint32_t d = 0; d < t->rank; d++)
            bytes *= t->shape[d];
        FUZZ_REQUIRE(bytes == t->size, "'%s': %llu bytes by its shape", t->name, (unsigned long long)bytes);
        FUZZ_REQUIRE(fb_shard_find(s, t->name) == t, "'%s' is not found", t->name);
        FUZZ_REQUIRE(t->offset <= size && t->size <= size - t->offset, "'%s' ends past the file", t->name);
        fuzz_read(t);
        total += t->size;
    }
    FUZZ_REQUIRE(total <= size, "tensors of %llu bytes in %zu", (unsigned long long)total, size);
    FUZZ_REQUIRE(!fb_shard_at(s, fb_shard_count(s)), "a tensor past the last");
    fb_shard_metadata(s, "format");
    fb_shard_close(s);
    return 0;
}

#ifdef FB_LIBFUZZER
/* Mutates the header or the data, and lets the length follow the header. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t size_max, unsigned int seed)
{
    uint64_t header = 0;
    if (size >= 8)
        memcpy(&header, data, 8);
    if (seed % 4 == 0 || size < 10 || header > size - 8 || size_max < size || size > 1 << 16)
        return LLVMFuzzerMutate(data, size, size_max);
    static uint8_t rest[1 << 16];
    size_t         n_rest = size - 8 - header;
    if (seed % 4 == 1) /* the data */
        return 8 + header + LLVMFuzzerMutate(data + 8 + header, n_rest, size_max - 8 - header);
    memcpy(rest, data + 8 + header, n_rest);
    header = LLVMFuzzerMutate(data + 8, header, size_max - 8 - n_rest);
    memcpy(data, &header, 8);
    memcpy(data + 8 + header, rest, n_rest);
    return 8 + header + n_rest;
}
#endif
