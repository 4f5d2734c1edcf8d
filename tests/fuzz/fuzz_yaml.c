/* A configuration: YAML and, behind each 0xff byte, one key=value argument. */
#include "fuzz.h"

#include "config/options.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { ARGUMENT_MAX = 16 };

static void warn(void *ctx, const char *sentence)
{
    (void)ctx;
    fuzz_touch(sentence, strlen(sentence));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fb_error   err;
    fb_options o = { 0 };
    char      *argument[ARGUMENT_MAX];
    int        n = 0;
    size_t     at = fuzz_cut(data, size);
    const char *path = fuzz_file(data, at);
    while (at < size && n < ARGUMENT_MAX) {
        size_t length = fuzz_cut(data + at + 1, size - at - 1);
        argument[n++] = strndup((const char *)data + at + 1, length);
        at += 1 + length;
    }
    fb_status st = fb_options_read(&o, path, (const char *const *)argument, n, warn, NULL, &err);
    if (st == FB_OK) {
        char   *text = fb_options_json(&o);
        json_t *all = text ? json_loads(text, JSON_REJECT_DUPLICATES, NULL) : NULL;
        FUZZ_REQUIRE(all, "the options are no JSON: %s", text ? text : "(none)");
        json_decref(all);
        free(text);
        fb_options_free(&o);
    } else
        fuzz_refused(st, FB_CONFIG, &err, strstr(err.msg, path) ? path : "command line: ");
    while (n)
        free(argument[--n]);
    return 0;
}
