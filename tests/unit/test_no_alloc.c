/* After start-up nothing allocates: every function that takes memory from the system is replaced here by one that counts,
 * for every thread and library of the process, while steps run.  One exception: OpenBLAS maps a buffer whenever more threads
 * multiply at the same moment than ever before, which is a matter of luck, and at most one a thread.
 * Sanitizers bring their own allocator: skipped there. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cmocka.h>

#include "engine_rig.h"
#include "run/loader.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

static void needs_the_systems_allocator(void **unused)
{
    (void)unused;
    skip();
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(needs_the_systems_allocator) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

#define VISIBLE __attribute__((visibility("default")))

/* glibc's own names for what is replaced. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *mem, size_t size);
void *__libc_memalign(size_t align, size_t size);

static bool     armed;
static uint64_t n_call, n_openblas;

static void count(void)
{
    if (__atomic_load_n(&armed, __ATOMIC_RELAXED))
        __atomic_add_fetch(&n_call, 1, __ATOMIC_RELAXED);
}

VISIBLE void *malloc(size_t size)
{
    count();
    return __libc_malloc(size);
}

VISIBLE void *calloc(size_t n, size_t size)
{
    count();
    return __libc_calloc(n, size);
}

VISIBLE void *realloc(void *mem, size_t size)
{
    count();
    return __libc_realloc(mem, size);
}

VISIBLE void *aligned_alloc(size_t align, size_t size)
{
    count();
    return __libc_memalign(align, size);
}

VISIBLE void *memalign(size_t align, size_t size);
VISIBLE void *memalign(size_t align, size_t size)
{
    count();
    return __libc_memalign(align, size);
}

VISIBLE int posix_memalign(void **out, size_t align, size_t size)
{
    count();
    *out = __libc_memalign(align, size);
    return *out ? 0 : ENOMEM;
}

VISIBLE void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset)
{
    Dl_info caller;
    if (dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "openblas"))
        __atomic_add_fetch(&n_openblas, 1, __ATOMIC_RELAXED);
    else
        count();
    return (void *)syscall(SYS_mmap, at, size, protection, flags, fd, offset);
}

/* ---- */

static void arm(bool on)
{
    __atomic_store_n(&armed, on, __ATOMIC_SEQ_CST);
}

static void *allocate(void *unused)
{
    (void)unused;
    void *volatile mem = malloc(100);
    free(mem);
    return NULL;
}

/* The count sees this thread, others, and libraries. */
static void the_count_counts(void **unused)
{
    (void)unused;
    pthread_t other;
    n_call = 0;
    arm(true);
    allocate(NULL);
    assert_int_equal(n_call, 1);
    free(strdup("a library's"));
    assert_int_equal(n_call, 2);
    munmap(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 4096);
    assert_int_equal(n_call, 3);
    pthread_create(&other, NULL, allocate, NULL);
    pthread_join(other, NULL);
    assert_true(n_call >= 4);
    arm(false);
}

enum { DOCS = 40 };

static void make_tokens(fb_tokens *t, uint32_t *ids, uint8_t *mask, uint64_t *start, uint32_t vocab)
{
    uint64_t seed = 8;
    *t = (fb_tokens){ .n_doc = DOCS, .ids = ids, .mask = mask, .doc_start = start };
    start[0] = 0;
    for (uint32_t d = 0; d < DOCS; d++) {
        uint32_t n = 3 + random_under(&seed, RIG_ROW - 3);
        for (uint32_t i = 0; i < n; i++) {
            ids[t->n_token] = random_under(&seed, vocab);
            mask[t->n_token++] = i > 1;
        }
        start[d + 1] = t->n_token;
        t->doc_len_max = n > t->doc_len_max ? n : t->doc_len_max;
    }
}

static void steps_allocate_nothing(const tiny_model *model, const char *const *overrides, uint32_t n_pass, bool inputs_on_host)
{
    static uint32_t ids[DOCS * RIG_ROW];
    static uint8_t mask[DOCS * RIG_ROW];
    static uint64_t start[DOCS + 1];
    engine_rig r;
    fb_error err;
    fb_tokens tokens;
    fb_loader *loader;
    fb_step_result s;
    make_tokens(&tokens, ids, mask, start, model->vocab);
    rig_options(&r, overrides);
    assert_int_equal(fb_session_open(&r.session, temp_dir, &err), FB_OK);
    assert_int_equal(fb_session_plan(&r.session, &r.request, &err), FB_OK);
    while (r.session.plan.layout.n_pass < n_pass || r.session.plan.layout.kept_on_host < inputs_on_host) {
        r.options.hbm_budget = r.session.plan.device_bytes - 1;
        assert_int_equal(fb_session_plan(&r.session, &r.request, &err), FB_OK);
    }
    assert_int_equal(fb_session_start(&r.session, &r.request, &err), FB_OK);
    assert_int_equal(fb_loader_new(&loader, &tokens, &(fb_loader_options){ .row_len = RIG_ROW, .packing = true, .shuffle = true,
        .rows_per_step = RIG_ROWS, .rows_per_micro = RIG_MICRO_ROWS }, &err), FB_OK);
    for (uint32_t step = 1; step <= 10; step++) {
        if (step == 3) { /* libraries may take what they keep in the first two */
            n_call = n_openblas = 0;
            arm(true);
        }
        fb_adamw a = rig_adamw(&r, step - 1);
        uint32_t n = fb_loader_fill(loader, r.session.engine, step - 1, NULL);
        fb_status st = fb_engine_step(r.session.engine, n, &a, r.options.max_grad_norm, &s, &err);
        if (step > 5 && st == FB_OK)
            st = fb_engine_eval(r.session.engine, n, &s, &err);
        if (st != FB_OK)
            fail_msg("%s", err.msg);
    }
    fb_engine_settle(r.session.engine);
    arm(false);
    assert_int_equal(n_call, 0);
    assert_true(n_openblas <= r.options.compute_threads);
    fb_loader_free(loader);
    rig_stop(&r);
}

static void the_step_loop_allocates_nothing(void **unused)
{
    (void)unused;
    static const tiny_model models[] = {
        { "qwen3", 32, 40, 3, 4, 2, 16, 96, true, NULL, 0 },
        { "llama", 96, 160, 3, 4, 4, 24, 300, false, ", \"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 2.0}", 10 },
    };
    for (size_t i = 0; i < FB_COUNT(models); i++) {
        tiny_write(&models[i], 50 + i);
        for (int bits = 0; bits < 8; bits++)
            steps_allocate_nothing(&models[i], (const char *const[]){ bits & 1 ? "max_grad_norm=0" : "max_grad_norm=1",
                bits & 2 ? "compute_dtype=bfloat16" : "compute_dtype=float32", "slots=2",
                bits & 4 ? "recompute=full" : "recompute=selective", NULL }, bits & 4 ? 3 : 1, bits & 4);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_count_counts),
        cmocka_unit_test_setup_teardown(the_step_loop_allocates_nothing, temp_dir_make, temp_dir_remove),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
