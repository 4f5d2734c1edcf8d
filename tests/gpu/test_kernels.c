/* test_kernels.c - the cuda back end against the cpu's, kernel by kernel, and its device.
 *
 *   gpu_test_kernels [PART]    only cases whose name contains PART
 *
 * One line a case; the last line counts.  Exit 77: no GPU here. */
#include "compare.h"

#include "kernel_cases.h"
#include "layer_cases.h"
#include "device_cases.h"

static void open_device(int i, const char *backend, bool deterministic)
{
    void *arena;
    must(fb_device_open(&t.device[i], &(fb_device_options){ .backend = backend, .deterministic = deterministic }, &t.err));
    must(t.device[i]->ops->alloc(t.device[i], ARENA_SIZE, &arena, &t.err));
    t.arena[i] = arena;
}

static void close_device(int i)
{
    t.device[i]->ops->close(t.device[i]);
}

int main(int argc, char **argv)
{
    fb_device *probe;
    if (argc == 2 && !strcmp(argv[1], RUIN_WORD))
        return ruin_a_device();
    t.only = argc > 1 ? argv[1] : NULL;
    t.random = 1;
    if (fb_device_open(&probe, &(fb_device_options){ .backend = "cuda" }, &t.err) != FB_OK) {
        printf("skipped: %s\n", t.err.msg);
        return 77;
    }
    fb_device_info info;
    probe->ops->info(probe, &info);
    printf("%s; %.0f MiB, %.0f free before, %.0f taken\n", info.name, (double)info.memory_total / 0x1p20,
           (double)info.memory_free / 0x1p20, (double)info.memory_overhead / 0x1p20);
    probe->ops->close(probe);

    t.image = malloc(ARENA_SIZE);
    for (int i = 0; i < 3; i++)
        t.got[i] = malloc(ARENA_SIZE);
    if (!t.image || !t.got[0] || !t.got[1] || !t.got[2])
        return fprintf(stderr, "gave up: no memory for the images\n"), 1;
    open_device(0, "cpu", true);
    open_device(1, "cuda", true);
    t.repeats = true;
    kernel_cases();
    layer_cases();
    close_device(1);
    open_device(1, "cuda", false);
    measured_matmul_cases();
    t.repeats = false;
    fast_attention_cases();
    close_device(1);
    close_device(0);
    device_cases(argv[0]);
    printf("%d passed, %d failed\n", t.n_pass, t.n_fail);
    return t.n_fail != 0;
}
