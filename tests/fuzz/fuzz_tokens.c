/* A token shard: the whole file is the input. */
#include "fuzz.h"
#include "mutate.h"

#include "io/tokens.h"

#include <string.h>
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fb_error    err;
    fb_tokens   t;
    const char *path = fuzz_file(data, size);
    fb_status   st = fb_tokens_open(&t, path, &err);
    if (st != FB_OK) {
        fuzz_refused(st, FB_INPUT, &err, path);
        return 0;
    }
    uint64_t learned = 0;
    for (uint64_t i = 0; i < t.n_token; i++) {
        int32_t label = fb_tokens_label(&t, i);
        FUZZ_REQUIRE(t.ids[i] <= t.id_max, "id %u past %u", t.ids[i], t.id_max);
        FUZZ_REQUIRE(label == FB_LABEL_NONE || (label >= 0 && (uint32_t)label <= t.id_max), "label %d past %u", label, t.id_max);
        learned += label != FB_LABEL_NONE;
    }
    FUZZ_REQUIRE(learned == t.n_learned, "%llu tokens are learned", (unsigned long long)learned);
    for (uint64_t d = 0; d < t.n_doc; d++) {
        uint64_t first = t.doc_start[d], end = t.doc_start[d + 1];
        FUZZ_REQUIRE(first < end && end <= t.n_token, "document %llu", (unsigned long long)d);
        FUZZ_REQUIRE(end - first <= t.doc_len_max, "document %llu is too long", (unsigned long long)d);
    }
    fuzz_touch(t.meta, t.meta_size);
    fb_tokens_close(&t);
    return 0;
}

#ifdef FB_LIBFUZZER
/* The offsets of file_size and checksum: docs/FORMATS.md. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t size_max, unsigned int seed)
{
    size = LLVMFuzzerMutate(data, size, size_max);
    if (size < 128 || seed % 4 == 0)
        return size;
    uint64_t file_size = size, checksum = XXH3_64bits(data + 128, size - 128);
    memcpy(data + 80, &file_size, 8);
    memcpy(data + 88, &checksum, 8);
    return size;
}
#endif
