/* A profile's text is hostile: each way in which it can be wrong has a sentence.  The curve's values are worked out by hand. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <math.h>

#include "plan/machine.h"
#include "temp_dir.h"

/* Every number differs from every other, so that no two fields can be mistaken for one another; many are not short in decimal. */
static fb_machine example(void)
{
    return (fb_machine){
        .name = "a \"test\" of 3 µs", .device = "NVIDIA Test 1", .measured = true,
        .matmul_peak = 1e15 / 3, .matmul_rows = { 3, { 128, 1024, 8192 }, { 0.1, 2.0 / 3, 1 } }, .matmul_accumulate = 0.97,
        .attention_fwd = { 2, { 256, 16384 }, { 1e14 / 7, 5.5e14 } }, .attention_bwd = { 1, { 1000.5 }, { 3.3e14 } },
        .memory_rate = 4.2e12, .launch = 2.3e-6, .memory = (UINT64_C(1) << 53) + 1, .overhead = 1234567891, .peak_flops = 9.894e14,
        .h2d = { 2, { 1048576, 268435456 }, { 5.01e10, 5.5e10 } }, .d2h = { 2, { 1048576, 268435456 }, { 4.9e10, 5.4e10 } },
        .h2d_both = 5.1e10, .d2h_both = 5.2e10, .copy_latency = 1e-6 / 3,
        .dram = 1.5e11, .dram_dma = 1.1e11, .update = { 2, { 1, 16 }, { 4e8, 4.2e9 } }, .gather = 6e10,
        .cores = 17, .ram = 137438953472, .pinnable = 68719476736, .disk_write = 2e9 / 3, .disk_read = 3e9,
    };
}

static void assert_same_curve(const fb_curve *a, const fb_curve *b)
{
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->x, b->x, a->n * sizeof *a->x);
    assert_memory_equal(a->y, b->y, a->n * sizeof *a->y);
}

static void assert_same(const fb_machine *a, const fb_machine *b)
{
    assert_string_equal(a->name, b->name);
    assert_string_equal(a->device, b->device);
#define SAME(field) assert_memory_equal(&a->field, &b->field, sizeof a->field)
    SAME(measured); SAME(unified); SAME(matmul_peak); SAME(matmul_accumulate); SAME(memory_rate); SAME(launch); SAME(memory);
    SAME(overhead); SAME(peak_flops); SAME(h2d_both); SAME(d2h_both); SAME(copy_latency); SAME(dram); SAME(dram_dma); SAME(gather);
    SAME(cores); SAME(ram); SAME(pinnable); SAME(disk_write); SAME(disk_read);
#undef SAME
    assert_same_curve(&a->matmul_rows, &b->matmul_rows);
    assert_same_curve(&a->attention_fwd, &b->attention_fwd);
    assert_same_curve(&a->attention_bwd, &b->attention_bwd);
    assert_same_curve(&a->h2d, &b->h2d);
    assert_same_curve(&a->d2h, &b->d2h);
    assert_same_curve(&a->update, &b->update);
}

static void a_curve_is_linear_in_log_x(void **unused)
{
    (void)unused;
    const fb_curve c = { 3, { 16, 256, 4096 }, { 1, 3, 2 } }, none = { 0 };
    assert_true(fb_curve_at(&c, 16) == 1 && fb_curve_at(&c, 256) == 3 && fb_curve_at(&c, 4096) == 2); /* at its points */
    assert_true(fb_curve_at(&c, 1e-3) == 1 && fb_curve_at(&c, 1e9) == 2);                            /* beyond them */
    assert_true(fabs(fb_curve_at(&c, 64) - 2) < 1e-12);      /* 64 lies half way from 16 to 256 in octaves */
    assert_true(fabs(fb_curve_at(&c, 512) - 2.75) < 1e-12);  /* one octave of four */
    assert_true(fb_curve_at(&none, 5) == 0);
}

static void what_is_written_reads_back_the_same(void **unused)
{
    (void)unused;
    fb_error err;
    fb_machine m = example(), back = { 0 };
    const fb_machine_origin origin = { .date = "2025-01-31", .forebay = "0.1.0", .backend = "cuda", .device = "NVIDIA \"Test\" 1",
                                       .spread = 0.03 };
    assert_int_equal(fb_machine_write(&m, &origin, temp_path("m.json"), &err), FB_OK);
    assert_int_equal(fb_machine_read(&back, temp_path("m.json"), &err), FB_OK);
    assert_same(&m, &back);
    m = (fb_machine){ 0 };
    char *text;
    assert_int_equal(fb_machine_text(&text, &back, NULL, &err), FB_OK);
    assert_null(strstr(text, "measurement"));
    assert_int_equal(fb_machine_parse(&m, text, strlen(text), "text", &err), FB_OK);
    assert_same(&back, &m);
    free(text);
}

static void what_would_not_be_read_is_not_written(void **unused)
{
    (void)unused;
    fb_error err;
    fb_machine m = example();
    m.dram = NAN;
    expect_failure(fb_machine_write(&m, NULL, temp_path("nan.json"), &err), FB_INPUT, &err, "'dram' is null; expected a number");
    m = example();
    m.update.n = 0;
    expect_failure(fb_machine_write(&m, NULL, temp_path("nan.json"), &err), FB_INPUT, &err,
                   "'update' has 0 points; expected 1 to 16");
    assert_false(fb_file_exists(temp_path("nan.json")));
}

/* The example's text with the line of one field replaced; line NULL: without it. */
static fb_status parse_with(const char *field, const char *line, fb_error *err)
{
    fb_machine m = example(), out;
    char *text, key[64];
    assert_int_equal(fb_machine_text(&text, &m, NULL, err), FB_OK);
    snprintf(key, sizeof key, "  \"%s\": ", field);
    char *start = strstr(text, key), *end = start ? strchr(start, '\n') : NULL;
    assert_non_null(end);
    size_t size = strlen(text) + (line ? strlen(line) : 0) + 1;
    char *changed = malloc(size);
    assert_non_null(changed);
    snprintf(changed, size, "%.*s%s%s", (int)(start - text), text, line ? line : "", end + 1);
    fb_status st = fb_machine_parse(&out, changed, strlen(changed), "m.json", err);
    free(changed);
    free(text);
    return st;
}

static void each_fault_has_its_sentence(void **unused)
{
    (void)unused;
    static const struct { const char *field, *line, *part; } faults[] = {
        { "dram", NULL, "has no 'dram', which is needed" },
        { "name", NULL, "has no 'name'" },
        { "h2d", NULL, "has no 'h2d'" },
        { "measured", NULL, "has no 'measured'" },
        { "dram", "\"dram\": -1e11,", "'dram' is -1" },
        { "dram", "\"dram\": 0,", "'dram' is 0; expected a number from 1 to 1e+18" },
        { "dram", "\"dram\": \"fast\",", "'dram' is \"fast\"; expected a number" },
        { "dram", "\"dram\": null,", "'dram' is null" },
        { "dram", "\"dram\": NaN,", "is not JSON" },
        { "dram", "\"dram\": 1e999,", "is not JSON" },
        { "dram", "\"dram\": 1e40,", "'dram' is 1e40; expected a number from 1 to 1e+18" },
        { "dram", "\"dram\": 1, \"dram\": 2,", "is not JSON: duplicate object key" },
        { "dram", "\"dram\": 1, \"drum\": 2,", "has 'drum', which is no field" },
        { "launch", "\"launch\": 5,", "'launch' is 5; expected a number from 1e-09 to 1" },
        { "matmul_accumulate", "\"matmul_accumulate\": 1.01,", "'matmul_accumulate' is 1.01; expected a number from 1e-09 to 1" },
        { "cores", "\"cores\": 1.5,", "'cores' is 1.5; expected an integer from 1 to 65536" },
        { "cores", "\"cores\": 0,", "'cores' is 0" },
        { "cores", "\"cores\": 4294967297,", "'cores' is 4294967297" },
        { "ram", "\"ram\": -5,", "'ram' is -5; expected an integer" },
        { "ram", "\"ram\": 1e11,", "'ram' is 1e11; expected an integer" },
        { "memory", "\"memory\": 5,", "'overhead' is 1234567891, 'memory' only 5" },
        { "disk_write", "\"disk_write\": -1,", "'disk_write' is -1; expected a number from 0" },
        { "measured", "\"measured\": 1,", "'measured' is 1; expected true or false" },
        { "name", "\"name\": 7,", "'name' is 7; expected a string" },
        { "name", "\"name\": \"\",", "'name' is \"\"; expected a string of 1 to 95 bytes" },
        { "name", "\"name\": \"a\\u001bb\",", "without control characters" },
        { "name", "\"name\": \"01234567890123456789012345678901234567890123456789"
                  "01234567890123456789012345678901234567890123456789\",", "expected a string of 1 to 95 bytes" },
        { "h2d", "\"h2d\": 5,", "'h2d' is 5; expected an array of points" },
        { "h2d", "\"h2d\": {\"1\": 5},", "expected an array of points" },
        { "h2d", "\"h2d\": [],", "'h2d' has 0 points; expected 1 to 16" },
        { "h2d", "\"h2d\": [[1,9],[2,9],[3,9],[4,9],[5,9],[6,9],[7,9],[8,9],[9,9],[10,9],[11,9],[12,9],[13,9],[14,9],[15,9],"
                 "[16,9],[17,9]],", "'h2d' has 17 points; expected 1 to 16" },
        { "h2d", "\"h2d\": [[1, 9], [2]],", "'h2d' has [2] as point 2; expected two numbers" },
        { "h2d", "\"h2d\": [[1, 9, 9]],", "as point 1; expected two numbers" },
        { "h2d", "\"h2d\": [[1, \"9\"]],", "as point 1; expected two numbers" },
        { "h2d", "\"h2d\": [7],", "'h2d' has 7 as point 1; expected two numbers" },
        { "h2d", "\"h2d\": [[4, 9], [4, 9]],", "'h2d' has [4,9] as point 2, behind x = 4; expected rising x" },
        { "h2d", "\"h2d\": [[4, 9], [3, 9]],", "expected rising x" },
        { "h2d", "\"h2d\": [[0, 9]],", "expected an x above 0" },
        { "h2d", "\"h2d\": [[1, -9]],", "'h2d' has [1,-9] as point 1; expected a y from 1 to 1e+18" },
        { "matmul_rows", "\"matmul_rows\": [[128, 1.5]],", "'matmul_rows' has [128,1.5] as point 1; expected a y from 1e-09 to 1" },
    };
    fb_error err;
    assert_int_equal(parse_with("dram", "\"dram\": 1e11,", &err), FB_OK); /* the method itself is sound */
    for (size_t i = 0; i < FB_COUNT(faults); i++)
        expect_failure(parse_with(faults[i].field, faults[i].line, &err), FB_INPUT, &err, faults[i].part);
}

static void what_is_not_known_may_be_left_out(void **unused)
{
    (void)unused;
    static const char *const optional[] = { "overhead", "peak_flops", "pinnable", "disk_write" };
    fb_error err;
    for (size_t i = 0; i < FB_COUNT(optional); i++)
        assert_int_equal(parse_with(optional[i], NULL, &err), FB_OK);
}

static void what_is_no_profile_is_refused(void **unused)
{
    (void)unused;
    fb_error err;
    fb_machine m;
    expect_failure(fb_machine_parse(&m, "", 0, "m.json", &err), FB_INPUT, &err, "m.json: is not JSON");
    expect_failure(fb_machine_parse(&m, "{\"name\": \"x\"", 11, "m.json", &err), FB_INPUT, &err, "is not JSON");
    expect_failure(fb_machine_parse(&m, "[1]", 3, "m.json", &err), FB_INPUT, &err, "is not a JSON object");
    expect_failure(fb_machine_parse(&m, "{}", 2, "m.json", &err), FB_INPUT, &err, "has no 'name'");
    expect_failure(fb_machine_read(&m, temp_path("none.json"), &err), FB_INPUT, &err, "there is no such file");
    size_t size = (1 << 20) + 1;
    char *large = malloc(size);
    assert_non_null(large);
    memset(large, ' ', size);
    temp_write("large.json", large, size);
    free(large);
    expect_failure(fb_machine_read(&m, temp_path("large.json"), &err), FB_INPUT, &err, "at most 1048576 are read");
}

/* Reached is never more than the data sheet says, and both directions of a link are no faster than twice one. */
static void every_shipped_profile_reads(void **unused)
{
    (void)unused;
    static const char *const wanted[] = { "rtx3090", "rtx4090", "rtx5090", "rtx-pro-6000", "a100-80g", "h100", "h200", "h200-1.5tb",
                                          "gh200" };
    fb_error err;
    fb_machine m, found;
    DIR *dir = opendir(FB_SOURCE_DIR "/profiles");
    struct dirent *e;
    size_t n = 0;
    assert_non_null(dir);
    while ((e = readdir(dir)) != NULL)
        n += strstr(e->d_name, ".json") != NULL;
    closedir(dir);
    assert_int_equal(n, FB_COUNT(wanted));
    for (size_t i = 0; i < FB_COUNT(wanted); i++) {
        if (fb_machine_find(&m, wanted[i], &err) != FB_OK)
            fail_msg("%s", err.msg);
        assert_true(m.peak_flops > 0 && m.matmul_peak < m.peak_flops);
        assert_true(m.h2d_both <= 1.1 * fb_curve_at(&m.h2d, 1e12) && m.d2h_both <= 1.1 * fb_curve_at(&m.d2h, 1e12));
        assert_true(m.dram_dma <= m.dram);
        assert_true(fb_curve_at(&m.attention_fwd, 1e9) < m.peak_flops);
        assert_true(fb_curve_at(&m.attention_bwd, 1e9) <= fb_curve_at(&m.attention_fwd, 1e9));
        assert_true(26 * fb_curve_at(&m.update, 1e9) <= 1.1 * m.dram); /* bytes an update moves */
        assert_true(m.update.x[m.update.n - 1] == m.cores);
        char device[128];
        snprintf(device, sizeof device, "%s, compute capability 9.0", m.device);
        assert_int_equal(fb_machine_for_device(&found, device, m.ram, &err), FB_OK);
        assert_same(&m, &found);
    }
}

static void a_profile_is_found_by_name_path_and_device(void **unused)
{
    (void)unused;
    fb_error err;
    fb_machine m = example(), found;
    assert_int_equal(fb_machine_find(&found, FB_SOURCE_DIR "/profiles/h200.json", &err), FB_OK);
    assert_string_equal(found.device, "NVIDIA H200");
    expect_failure(fb_machine_find(&found, "h2000", &err), FB_INPUT, &err,
                   "no machine profile 'h2000'; known are: a100-80g, gh200,");
    expect_failure(fb_machine_find(&found, "", &err), FB_INPUT, &err, "no machine profile ''");
    expect_failure(fb_machine_find(&found, "../profiles/none", &err), FB_INPUT, &err, "there is no such file");

    assert_int_equal(setenv("FOREBAY_PROFILES", temp_dir, 1), 0);
    assert_int_equal(fb_machine_write(&m, NULL, temp_path("small.json"), &err), FB_OK);
    m.ram *= 8;
    snprintf(m.name, sizeof m.name, "large");
    assert_int_equal(fb_machine_write(&m, NULL, temp_path("big.json"), &err), FB_OK);
    assert_int_equal(fb_machine_find(&found, "big", &err), FB_OK);
    assert_string_equal(found.name, "large");
    assert_int_equal(fb_machine_for_device(&found, "NVIDIA Test 1, compute capability 9.0", m.ram / 2, &err), FB_OK);
    assert_string_equal(found.name, "large");
    assert_int_equal(fb_machine_for_device(&found, "NVIDIA Test 1", m.ram / 4, &err), FB_OK);
    assert_string_not_equal(found.name, "large");
    expect_failure(fb_machine_for_device(&found, "NVIDIA Test 1 Laptop GPU", 0, &err), FB_INPUT, &err,
                   "no shipped machine profile is of");
    expect_failure(fb_machine_for_device(&found, "NVIDIA Test", 0, &err), FB_INPUT, &err, "no shipped machine profile is of");
    temp_write_text("bad.json", "{");
    expect_failure(fb_machine_for_device(&found, "NVIDIA Test 1", 0, &err), FB_INPUT, &err, "bad.json: is not JSON");
    assert_int_equal(setenv("FOREBAY_PROFILES", temp_path("nowhere"), 1), 0);
    expect_failure(fb_machine_find(&found, "h200", &err), FB_INPUT, &err, "the folder of machine profiles cannot be read");
    unsetenv("FOREBAY_PROFILES");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_curve_is_linear_in_log_x),
        cmocka_unit_test_setup_teardown(what_is_written_reads_back_the_same, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(what_would_not_be_read_is_not_written, temp_dir_make, temp_dir_remove),
        cmocka_unit_test(each_fault_has_its_sentence),
        cmocka_unit_test(what_is_not_known_may_be_left_out),
        cmocka_unit_test_setup_teardown(what_is_no_profile_is_refused, temp_dir_make, temp_dir_remove),
        cmocka_unit_test(every_shipped_profile_reads),
        cmocka_unit_test_setup_teardown(a_profile_is_found_by_name_path_and_device, temp_dir_make, temp_dir_remove),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
