/* What the system says about memory, on files of the test's own making and on this process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "../../src/base/memory.c"
#include "temp_dir.h"
#include "test_kit.h"

static void group(const char *path, const char *max, const char *used)
{
    char name[128];
    fb_dir_make(temp_path(path), NULL);
    snprintf(name, sizeof name, "%s/memory.max", path);
    temp_write_text(name, max);
    snprintf(name, sizeof name, "%s/memory.current", path);
    temp_write_text(name, used);
}

static fb_memory_room tightest(const char *of, const group_files *files)
{
    fb_memory_room room = { .bytes = UINT64_MAX };
    consider_groups(&room, temp_dir, of, files);
    return room;
}

static uint64_t room(const char *of)
{
    return tightest(of, &version_2).bytes;
}

static void the_tightest_group_on_the_way_counts(void **unused)
{
    (void)unused;
    group("a", "1000\n", "400\n");
    group("a/b", "max\n", "10\n");
    group("a/b/c", "500\n", "20\n");
    group("a/over", "100\n", "300\n");
    fb_dir_make(temp_path("a/bare"), NULL);
    assert_int_equal(room("/a"), 600);
    assert_int_equal(room("/a/b"), 600);
    assert_int_equal(room("/a/b/c"), 480);
    assert_int_equal(room("/a/over"), 0);
    assert_int_equal(room("/a/bare"), 600);
    assert_true(room("/") == UINT64_MAX);
    assert_true(room("/none") == UINT64_MAX);
    temp_write_text("memory.max", "70\n");
    temp_write_text("memory.current", "3\n");
    assert_int_equal(room("/a/b/c"), 67);
    assert_int_equal(room("/"), 67);
}

/* Pages of files go when memory is wanted: they are room. */
static void the_page_cache_is_room(void **unused)
{
    (void)unused;
    group("a", "1000\n", "900\n");
    temp_write_text("a/memory.stat", "anon 200\nfile 650\ninactive_anon 7\ninactive_file 400\nactive_file 250\nslab 50\n");
    assert_int_equal(room("/a"), 750);
    temp_write_text("a/memory.stat", "inactive_file 5000\n"); /* the two were not read at one instant */
    assert_int_equal(room("/a"), 1000);
    temp_write_text("a/memory.limit_in_bytes", "1000\n");
    temp_write_text("a/memory.usage_in_bytes", "900\n");
    temp_write_text("a/memory.stat", "inactive_file 1\nactive_file 2\ntotal_inactive_file 30\ntotal_active_file 40\n");
    assert_int_equal(tightest("/a", &version_1).bytes, 170);
}

/* Above memory.high the kernel stalls a process: it must not get there. */
static void a_throttled_group_is_full(void **unused)
{
    (void)unused;
    group("a", "1000\n", "400\n");
    temp_write_text("a/memory.high", "max\n");
    assert_int_equal(room("/a"), 600);
    temp_write_text("a/memory.high", "450\n");
    assert_int_equal(room("/a"), 50);
    assert_string_equal(tightest("/a/b", &version_2).limit, "cgroup /a (memory.high)");
}

static void the_limit_has_a_name(void **unused)
{
    (void)unused;
    fb_memory_room r = { .bytes = 5000 };
    group("a", "1000\n", "400\n");
    group("memory/b", "max\n", "0\n");
    temp_write_text("memory/b/memory.limit_in_bytes", "700\n");
    temp_write_text("memory/b/memory.usage_in_bytes", "600\n");
    temp_write_text("membership", "7:cpu:/x\n4:memory:/b\n0::/a/none\n");
    consider_membership(&r, temp_path("membership"), temp_dir);
    assert_int_equal(r.bytes, 100);
    assert_string_equal(r.limit, "cgroup /b (memory.limit_in_bytes)");
    temp_write_text("membership", "0::/a/none\n");
    r = (fb_memory_room){ .bytes = 5000 };
    consider_membership(&r, temp_path("membership"), temp_dir);
    assert_int_equal(r.bytes, 600);
    assert_string_equal(r.limit, "cgroup /a (memory.max)");
    r = (fb_memory_room){ .bytes = 5000 };
    consider_membership(&r, temp_path("nothing"), temp_dir);
    assert_int_equal(r.bytes, 5000);
}

static void limits_of_the_process_count(void **unused)
{
    (void)unused;
    const struct {
        int kind;
        const char *field, *named;
    } limits[] = { { RLIMIT_DATA, "VmData", "ulimit -d" }, { RLIMIT_AS, "VmSize", "ulimit -v" } };
    for (size_t i = 0; i < FB_COUNT(limits) && !SANITIZED; i++) {
        fb_memory_room r;
        struct rlimit before, low;
        assert_int_equal(getrlimit(limits[i].kind, &before), 0);
        low = before;
        low.rlim_cur = proc_kib("/proc/self/status", limits[i].field) + (20 << 20);
        assert_int_equal(setrlimit(limits[i].kind, &low), 0);
        assert_true(fb_memory_room_now(&r));
        /* The oracle is the kernel: less than the room can be had, more cannot. */
        void *less = mmap(NULL, r.bytes - (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        void *more = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_int_equal(setrlimit(limits[i].kind, &before), 0);
        assert_true(less != MAP_FAILED && more == MAP_FAILED);
        munmap(less, r.bytes - (2 << 20));
        assert_non_null(strstr(r.limit, limits[i].named));
        assert_in_range(r.bytes, 18 << 20, 20 << 20);
    }
}

static void proc_lines_are_found_by_their_whole_name(void **unused)
{
    (void)unused;
    temp_write_text("meminfo", "MemAvailableNot:  5 kB\nMemTotal:       8000 kB\nMemAvailable:    123 kB\nMemAvailable: 9 kB\n");
    assert_int_equal(proc_kib(temp_path("meminfo"), "MemAvailable"), 123 * 1024);
    assert_int_equal(proc_kib(temp_path("meminfo"), "MemFree"), 0);
    assert_int_equal(proc_kib(temp_path("none"), "MemFree"), 0);
}

static void this_process_has_and_can_take_memory(void **unused)
{
    (void)unused;
    enum { SIZE = 64 << 20 };
    assert_true(fb_memory_available() <= proc_kib("/proc/meminfo", "MemTotal"));
    uint64_t before = fb_memory_resident();
    assert_true(before > 0);
    unsigned char *mem = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(mem != MAP_FAILED);
    memset(mem, 1, SIZE);
    uint64_t after = fb_memory_resident();
    /* A thread sanitizer keeps four bytes for each that is touched. */
    assert_in_range(after - before, SIZE - (4 << 20), SANITIZED ? 5 * SIZE + (32 << 20) : SIZE + (4 << 20));
    munmap(mem, SIZE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_tightest_group_on_the_way_counts, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(the_page_cache_is_room, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(a_throttled_group_is_full, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(the_limit_has_a_name, temp_dir_make, temp_dir_remove),
        cmocka_unit_test(limits_of_the_process_count),
        cmocka_unit_test_setup_teardown(proc_lines_are_found_by_their_whole_name, temp_dir_make, temp_dir_remove),
        cmocka_unit_test(this_process_has_and_can_take_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
