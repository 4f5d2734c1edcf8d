/* trainer_state.json of a checkpoint. */
#include "fuzz.h"

#include "run/checkpoint.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fb_error    err;
    fb_progress p;
    json_t     *identity = NULL;
    fuzz_put("trainer_state.json", data, size);
    fb_status st = fb_checkpoint_read_progress(&p, &identity, fuzz_folder(), &err);
    if (st != FB_OK) {
        fuzz_refused(st, FB_INPUT, &err, "trainer_state.json");
        return 0;
    }
    FUZZ_REQUIRE(p.steps_per_epoch > 0, "no steps in an epoch");
    json_decref(identity);
    return 0;
}
