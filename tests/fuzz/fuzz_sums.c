/* manifest.json of a checkpoint, and one file that it may speak of. */
#include "fuzz.h"

#include "io/sums.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fb_error err;
    fuzz_put("config.json", "{}", 2);
    fuzz_put("manifest.json", data, size);
    fb_status st = fb_sums_verify(fuzz_folder(), &err);
    if (st != FB_OK)
        fuzz_refused(st, FB_INPUT, &err, "");
    return 0;
}
