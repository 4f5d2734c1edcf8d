/* model.safetensors.index.json, in a folder with two good shards, a link that leads out of it, and a folder inside. */
#include "fuzz.h"

#include "io/shard.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void put_shard(const char *file, const char *header)
{
    unsigned char bytes[256] = { 0 };
    uint64_t      length = strlen(header);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, length);
    fuzz_put(file, bytes, 8 + length + 8);
}

static void prepare(void)
{
    char path[512];
    put_shard("model-00001-of-00002.safetensors", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}");
    put_shard("model-00002-of-00002.safetensors",
              "{\"b\":{\"dtype\":\"F16\",\"shape\":[2,1],\"data_offsets\":[0,4]},"
              "\"c\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[4,8]}}");
    snprintf(path, sizeof path, "%s/out.safetensors", fuzz_folder());
    FUZZ_REQUIRE(symlink("/proc/self/exe", path) == 0, "no link %s", path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int    prepared;
    fb_error      err;
    fb_shard_set *s = NULL;
    if (!prepared++)
        prepare();
    fuzz_put("model.safetensors.index.json", data, size);
    fb_status st = fb_shard_set_open(&s, fuzz_folder(), &err);
    if (st != FB_OK) {
        FUZZ_REQUIRE(!s, "a handle in spite of: %s", err.msg);
        fuzz_refused(st, FB_INPUT, &err, fuzz_folder());
        return 0;
    }
    for (uint32_t i = 0; i < fb_shard_set_count(s); i++) {
        const fb_tensor *t = fb_shard_set_at(s, i);
        FUZZ_REQUIRE(fb_shard_set_find(s, t->name) == t, "'%s' is not found", t->name);
        FUZZ_REQUIRE(!strncmp(fb_shard_path(t->shard), fuzz_folder(), strlen(fuzz_folder())), "'%s' lies outside", t->name);
        fuzz_read(t);
    }
    FUZZ_REQUIRE(!fb_shard_set_at(s, fb_shard_set_count(s)), "a tensor past the last");
    fb_shard_set_close(s);
    return 0;
}
