/* test_device.c: which back end a name opens, on machines with and without a GPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dlfcn.h>
#include <string.h>

#include "device/device.h"
#include "device/plugin.h"

static fb_status open_close(const char *backend, const char *want_name, fb_error *err)
{
    fb_device *d;
    fb_status st = fb_device_open(&d, &(fb_device_options){ .backend = backend, .n_thread = 1 }, err);
    if (st == FB_OK) {
        assert_string_equal(d->ops->name, want_name);
        d->ops->close(d);
    }
    return st;
}

static void cpu_is_always_there(void **state)
{
    (void)state;
    fb_error err;
    assert_int_equal(open_close("cpu", "cpu", &err), FB_OK);
}

static void an_unknown_name_is_refused_and_the_known_ones_told(void **state)
{
    (void)state;
    fb_error err;
    assert_int_equal(open_close("rocm", "", &err), FB_CONFIG);
    assert_string_equal(err.msg, "backend 'rocm' is unknown; use auto, cpu, cuda or fault:<spec>");
}

/* Where the driver is not even installed, what follows is known. */
static void without_a_driver_cuda_says_so_and_auto_is_the_cpu(void **state)
{
    (void)state;
    fb_error err;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (driver) {
        dlclose(driver);
        skip();
    }
    assert_int_equal(open_close("cuda", "cuda", &err), FB_CONFIG);
    assert_non_null(strstr(err.msg, "libcuda.so.1 is missing"));
    assert_non_null(strstr(err.msg, "backend: cpu"));
    assert_int_equal(open_close("auto", "cpu", &err), FB_OK);
    assert_int_equal(open_close(NULL, "cpu", &err), FB_OK);
    bool absent = false;
    fb_device *d;
    assert_int_equal(fb_plugin_open_cuda(&d, &(fb_device_options){ 0 }, &absent, &err), FB_CONFIG);
    assert_true(absent);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cpu_is_always_there),
        cmocka_unit_test(an_unknown_name_is_refused_and_the_known_ones_told),
        cmocka_unit_test(without_a_driver_cuda_says_so_and_auto_is_the_cpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
