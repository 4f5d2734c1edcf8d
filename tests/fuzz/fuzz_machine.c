/* A machine's profile. */
#include "fuzz.h"

#include "plan/machine.h"

#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fb_error   err;
    fb_machine m;
    fb_status st = fb_machine_parse(&m, (const char *)data, size, "profile", &err);
    if (st != FB_OK) {
        fuzz_refused(st, FB_INPUT, &err, "profile");
        return 0;
    }
    FUZZ_REQUIRE(isfinite(m.matmul_peak) && m.matmul_peak > 0, "a peak of %g", m.matmul_peak);
    FUZZ_REQUIRE(m.h2d.n >= 1 && m.h2d.n <= 16, "a curve of %u points", m.h2d.n);
    for (double x = 1; x < 1e12; x *= 10)
        FUZZ_REQUIRE(fb_curve_at(&m.h2d, x) > 0, "a rate of %g at %g", fb_curve_at(&m.h2d, x), x);
    return 0;
}
